"""Checksums of a weight version's files. The publisher writes them, and engines compare their copies with them.

::

    RUN/weights/7/checksums.json    {"model.safetensors": {"size": …, "sha256": …}, "config.json": …}

Policies with a single server have none, because a server alone reads the version where it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.json_files import read_json

CHECKSUMS = "checksums.json"
MAX_THREADS = 8
"""Maximum number of files that one process reads at a time."""


class Checksum(msgspec.Struct, frozen=True):
    """Size and digest of a file."""

    size: int
    """Bytes."""
    sha256: str
    """SHA-256 in hexadecimal."""


def checksum(path: Path) -> Checksum:
    """Reads a file and returns its checksum. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Checksum(file.tell(), digest.hexdigest())


def write_checksums(folder: Path, known: Mapping[str, Checksum]) -> None:
    """Writes the checksums of all files in a directory to :data:`CHECKSUMS`. Raises OSError.

    Args:
        known: Checksums of files that their writers computed, by name. Other files are read.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    sums = {n: known[n] for n in names if n in known and known[n].size == (folder / n).stat().st_size}
    unread = [name for name in names if name not in sums and name != CHECKSUMS]
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        sums |= zip(unread, threads.map(lambda name: checksum(folder / name), unread), strict=True)
    write_json(folder / CHECKSUMS, msgspec.to_builtins(sums))


def read_checksums(folder: Path) -> dict[str, Checksum]:
    """Returns the published checksums by file name. The mapping is empty without a checksum file.

    Raises:
        OSError, ValueError: The file cannot be read, or is damaged.
    """
    try:
        return read_json(folder / CHECKSUMS, dict[str, Checksum])
    except FileNotFoundError:
        return {}
