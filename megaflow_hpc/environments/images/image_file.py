"""An image where it lies: what is known of it without reading it, and reading it once, compared with its digest."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layered import LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.store import digest_in, known_size
from megaflow_hpc.errors import SandboxError


@dataclass(frozen=True)
class ImageFacts:
    """What is known of an image without reading it. ``digest`` is ``None`` where no store holds it.

    Of an image of layers the sizes are those of its base and all of them; a directory has none.
    """

    path: str
    digest: str | None
    bytes: int
    unpacked_bytes: int
    inodes: int
    base: ImageFacts | None = None
    """What the layers lie over."""
    layers: tuple[LayerFacts, ...] = ()
    """Each once, bottom first."""
    settings: str = ""
    """Lines of shell that set its variables (:class:`.layered.LayeredImage`)."""

    @property
    def is_layered(self) -> bool:
        """Whether it is a document that names a base and layers."""
        return is_layered(self.path)

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
        self._documents: dict[str, tuple[tuple[int, ...], LayeredImage]] = {}

    def facts(self, image: str) -> ImageFacts:
        """Returns the facts of an image.

        Raises:
            SandboxError: there is no such file, it is no image, or its base is not the one that it was built on.
        """
        try:
            found = os.stat(image)
        except OSError as error:
            raise SandboxError(
                f"{image}: no such image on this node ({error.strerror}); expected a SIF file or a directory that is "
                "an image"
            ) from None
        now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if is_layered(image):
            return self._layered(image, now)
        known = self._known.get(image)
        if known and known[0] == now:
            return known[1]
        path = os.path.realpath(image)
        partition = sif.system_partition(path)
        unpacked = known_size(path) or sif.unpacked_bytes(path, partition)
        facts = ImageFacts(path, digest_in(path), found.st_size, unpacked, partition.inodes)
        self._known[image] = (now, facts)
        return facts

    def _layered(self, image: str, now: tuple[int, ...]) -> ImageFacts:
        document = self._documents.get(image)
        if document is None or document[0] != now:
            document = self._documents[image] = (now, read_layered(os.path.realpath(image)))
            self._known.pop(image, None)
        layered, base = document[1], None
        if layered.base is not None:
            layered.base.check(image)
            place = layered.base.path
            base = ImageFacts(os.path.realpath(place), None, 0, 0, 0) if os.path.isdir(place) else self.facts(place)
        known = self._known.get(image)
        if known and known[1].base == base:
            return known[1]
        if base is None and not layered.layers:
            raise SandboxError(f"{image}: an image without a base and without layers")
        parts: list[LayerFacts | ImageFacts] = [*layered.layers, *([base] if base else [])]
        facts = ImageFacts(
            os.path.realpath(image),
            Path(os.path.realpath(image)).stem,
            sum(part.bytes for part in parts),
            sum(part.unpacked_bytes for part in parts),
            sum(part.inodes for part in parts),
            base,
            layered.layers,
            layered.settings,
        )
        self._known[image] = (now, facts)
        return facts


def stamp(path: str) -> tuple[int, int]:
    """Returns size in bytes and time of change in nanoseconds."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def read_checked(facts: ImageFacts, target: Path) -> None:
    """Copies an image to ``target``, and compares the digest of the copied bytes with the image's name.

    Use the copy afterwards: the owner of the store may change the file itself at any time.
    """
    digest = hashlib.sha256()
    with open(facts.path, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        while chunk := reader.read(1 << 22):
            digest.update(chunk)
            writer.write(chunk)
    if facts.digest and digest.hexdigest() != facts.digest:
        raise SandboxError(
            f"{facts.path}: its content has the digest {digest.hexdigest()}, not the one in its name: it was damaged "
            f"or replaced; remove it with megaflow-hpc images prune {facts.digest[:12]}, and build or pull it again"
        )
