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

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layered import is_layered, read_layered
from megaflow_hpc.errors import SandboxError

LABEL = "megaflow.workdir"


def working_directory(image: str | os.PathLike[str]) -> str | None:
    """Returns the absolute path that an image names; ``None`` if it names none or is unreadable."""
    path = Path(image)
    try:
        if is_layered(path):
            layered = read_layered(path)
            return layered.workdir or (working_directory(layered.base.path) if layered.base else None)
        if path.is_dir():
            labels = json.loads((path / ".singularity.d" / "labels.json").read_bytes())
            found = labels.get(LABEL)
        else:
            objects = sif.documents(path)
            labels = _dig(objects.get("inspect-metadata.json"), "data", "attributes", "labels") or {}
            found = labels.get(LABEL) or _dig(objects.get("oci-config.json"), "WorkingDir")
            found = found or _dig(objects.get("oci-config.json"), "config", "WorkingDir")
    except (OSError, ValueError, struct.error, AttributeError, SandboxError):
        return None
    return found if isinstance(found, str) and found.startswith("/") and "\0" not in found else None


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
