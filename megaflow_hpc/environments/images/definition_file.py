"""Builds images from definition files. Their content is the key of the image in the store."""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path

from megaflow_hpc.environments.images.apptainer_client import SIF_OPTIONS, build
from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.host.apptainer import find_apptainer


def definition_digest(path: Path) -> str:
    """Returns the SHA-256 of a definition file, its local base image and the files that it copies."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    digest = hashlib.sha256(b"definition\0" + text.encode("utf-8", "surrogateescape"))
    local = re.search(
        r"^\s*Bootstrap:\s*(localimage|oci-archive|docker-archive)\s*$", text, re.IGNORECASE | re.MULTILINE
    )
    start = re.search(r"^\s*From:\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    if local and start:
        digest.update(identity(path.parent / start[1]).encode())
    section = ""
    for line in text.splitlines():
        if line.startswith("%"):
            section = line.split()[0]
        elif section == "%files" and line.strip() and not line.lstrip().startswith("#"):
            source = path.parent / line.split()[0]
            files = sorted(source.rglob("*")) if source.is_dir() else [source]
            for file in files:
                if file.is_file():
                    name = file.relative_to(path.parent) if file.is_relative_to(path.parent) else file
                    digest.update(f"\0{name}\0".encode())
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def identity(path: Path) -> str:
    """Returns the part of a key that stands for a base image: the digest in its name, or path, size and mtime."""
    try:
        found = path.stat()
    except OSError:
        return path.name
    return digest_in(path) or f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"


def build_definition(target: Path, definition: Path, stopped: threading.Event) -> None:
    """Builds a SIF at ``target``, until ``stopped`` is set."""
    # Relative paths in a definition file are relative to its directory.
    options = ("--fakeroot", *SIF_OPTIONS)
    build(find_apptainer(), target, str(definition), *options, cwd=definition.parent, stopped=stopped)
