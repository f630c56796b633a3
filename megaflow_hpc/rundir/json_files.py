"""Reads and writes typed JSON files in a run directory. File content is untrusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import LARGEST, read_regular

T = TypeVar("T")


def read_json(path: str | os.PathLike[str], kind: type[T], max_bytes: int = LARGEST) -> T:
    """Reads and decodes one file. Ignores unknown keys.

    Raises:
        OSError: The file is missing, not a regular file, or temporarily unreadable.
        ValueError: The file is damaged. The message names the file, the field and the expected type.
    """
    data = read_regular(path, max_bytes)
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def try_read_json(path: str | os.PathLike[str], kind: type[T], max_bytes: int = LARGEST) -> T | None:
    """Reads and decodes one file. Returns ``None`` if it is missing, damaged or temporarily unreadable."""
    try:
        return read_json(path, kind, max_bytes)
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: msgspec.Struct, mode: int | None = None) -> None:
    """Publishes a record atomically at ``path`` (:func:`~megaflow_hpc.host.atomic.write_atomic`)."""
    write_json(path, msgspec.to_builtins(record), mode)
