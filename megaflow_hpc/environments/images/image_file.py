"""An image where it lies: what is known of it without reading it, and reading it once, compared with its digest."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.store import digest_in, known_size
from megaflow_hpc.errors import SandboxError


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image without reading it. ``digest`` is ``None`` where no store holds it."""

    path: str
    digest: str | None
    bytes: int
    unpacked_bytes: int
    inodes: int
    squashfs_offset: int

    @property
    def key(self) -> str:
        """Name of its copies, 40 characters: of its digest, else of path, size and time of change."""
        if self.digest:
            return self.digest[:40]
        identity = f"{self.path}\0{stamp(self.path)}"
        return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class ImageFiles:
    """Facts of images, from the store's notes, else from their headers; remembered while the file is the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, ...], ImageFacts]] = {}

    def facts(self, image: str) -> ImageFacts:
        """Returns the facts of an image; raises :class:`SandboxError` where there is no such file, or it is no SIF."""
        try:
            found = os.stat(image)
        except OSError as error:
            raise SandboxError(
                f"{image}: no such image on this node ({error.strerror}); expected a SIF file or a directory that is "
                "an image"
            ) from None
        now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = self._known.get(image)
        if known and known[0] == now:
            return known[1]
        path = os.path.realpath(image)
        partition = sif.system_partition(path)
        unpacked = known_size(path) or sif.unpacked_bytes(path, partition)
        facts = ImageFacts(path, digest_in(path), found.st_size, unpacked, partition.inodes, partition.offset)
        self._known[image] = (now, facts)
        return facts


def stamp(path: str) -> tuple[int, int]:
    """Returns size in bytes and time of change in nanoseconds."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def read_checked(facts: ImageFacts, target: Path | None) -> None:
    """Reads an image once, writes it to ``target`` if there is one, and compares its digest with its name."""
    digest = hashlib.sha256()
    with open(facts.path, "rb", buffering=0) as reader:
        writer = open(target, "wb", buffering=0) if target else None  # noqa: SIM115
        try:
            while chunk := reader.read(1 << 22):
                digest.update(chunk)
                if writer:
                    writer.write(chunk)
        finally:
            if writer:
                writer.close()
    if facts.digest and digest.hexdigest() != facts.digest:
        raise SandboxError(
            f"{facts.path}: its content has the digest {digest.hexdigest()}, not the one in its name: it was damaged "
            f"or replaced; remove it with megaflow-hpc images prune {facts.digest[:12]}, and build or pull it again"
        )
