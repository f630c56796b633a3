"""What an image says of itself beside its files: the work directory in which its maker meant commands to start.

Apptainer drops a Docker image's ``WORKDIR`` when it runs one, but keeps the image's configuration in the SIF it pulls.
Images that were built otherwise may name it in a label, ``megaflow.workdir``.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

LABEL = "megaflow.workdir"

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_JSON = 0x4006
_LONGEST = 1 << 20
_MOST = 256


def working_directory(image: str | os.PathLike[str]) -> str | None:
    """Absolute path, of a SIF or an unpacked image; ``None`` where it names none or cannot be read."""
    path = Path(image)
    try:
        if path.is_dir():
            labels = json.loads((path / ".singularity.d" / "labels.json").read_bytes())
            found = labels.get(LABEL)
        else:
            objects = _json_objects(path)
            labels = _dig(objects.get("inspect-metadata.json"), "data", "attributes", "labels") or {}
            found = labels.get(LABEL) or _dig(objects.get("oci-config.json"), "WorkingDir")
            found = found or _dig(objects.get("oci-config.json"), "config", "WorkingDir")
    except (OSError, ValueError, struct.error, AttributeError):
        return None
    return found if isinstance(found, str) and found.startswith("/") and "\0" not in found else None


def _json_objects(path: Path) -> dict[str, Any]:
    """The JSON documents that Apptainer stores in a SIF beside the file system, by name."""
    with open(path, "rb") as file:
        header = _HEADER.unpack(file.read(_HEADER.size))
        if header[1].rstrip(b"\0") != b"SIF_MAGIC":
            return {}
        file.seek(header[9])
        table = file.read(_DESCRIPTOR.size * min(max(header[8], 0), _MOST))
        found = {}
        for row in range(len(table) // _DESCRIPTOR.size):
            entry = _DESCRIPTOR.unpack_from(table, row * _DESCRIPTOR.size)
            if entry[0] == _JSON and entry[1] and entry[6] <= _LONGEST:
                file.seek(entry[5])
                name = entry[12].split(b"\0")[0].decode("utf-8", "replace")
                found[name] = json.loads(file.read(entry[6]))
        return found


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
