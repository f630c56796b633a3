"""Reads sizes, layers and the working directory of image files without unpacking them, and makes verified copies."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layered import Base, ImageStart, LayeredImage, is_layered, read_layered, tcp_ports
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.store import digest_in, known_size
from megaflow_hpc.errors import SandboxError

LABEL = "megaflow.workdir"
"""Label that records the working directory of an image built by Apptainer."""


@dataclass(frozen=True)
class ImageFacts:
    """Sizes and layers of an image file. ``digest`` is ``None`` if the image is not in a store.

    The sizes of a layered image include its base and all layers. The sizes of a directory are 0.
    """

    path: str
    digest: str | None
    bytes: int
    unpacked_bytes: int
    inodes: int
    base: ImageFacts | None = None
    """Facts of the image below the layers. ``None`` if there is no such image."""
    layers: tuple[LayerFacts, ...] = ()
    """The distinct layers, bottom first."""
    settings: str = ""
    """Shell lines that set the image's variables (:class:`.layered.LayeredImage`)."""

    @property
    def is_layered(self) -> bool:
        """True if the file is a JSON document that lists a base and layers."""
        return is_layered(self.path)

    @property
    def key(self) -> str:
        """Cache key: the first 40 hexadecimal digits of the digest, or of a hash of path, size and mtime."""
        if self.digest:
            return self.digest[:40]
        identity = f"{self.path}\0{stamp(self.path)}"
        return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:40]


class ImageFiles:
    """Reads image facts from store records or file headers, and caches them until the file changes."""

    def __init__(self) -> None:
        self._facts: dict[str, tuple[tuple[int, ...], ImageFacts]] = {}
        self._documents: dict[str, tuple[tuple[int, ...], LayeredImage]] = {}

    def facts(self, image: str) -> ImageFacts:
        """Returns the facts of an image.

        Raises:
            SandboxError: The file is missing or not an image, or its base is missing or has changed.
        """
        try:
            status = os.stat(image)
        except OSError as error:
            raise SandboxError(
                f"{image}: no such image on this node ({error.strerror}); expected a SIF file or a directory that is "
                "an image"
            ) from None
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if is_layered(image):
            return self._layered(image, version)
        cached = self._facts.get(image)
        if cached and cached[0] == version:
            return cached[1]
        path = os.path.realpath(image)
        partition = sif.system_partition(path)
        unpacked = known_size(path) or sif.unpacked_bytes(path, partition)
        facts = ImageFacts(path, digest_in(path), status.st_size, unpacked, partition.inodes)
        self._facts[image] = (version, facts)
        return facts

    def _layered(self, image: str, version: tuple[int, ...]) -> ImageFacts:
        path = os.path.realpath(image)
        cached = self._documents.get(image)
        if cached is None or cached[0] != version:
            cached = self._documents[image] = (version, read_layered(path))
        layered = cached[1]
        base = self._base(layered.base, image) if layered.base is not None else None
        if base is None and not layered.layers:
            raise SandboxError(f"{image}: an image without a base and without layers")
        parts: list[LayerFacts | ImageFacts] = [*layered.layers]
        if base is not None:
            parts.append(base)
        return ImageFacts(
            path,
            Path(path).stem,
            sum(part.bytes for part in parts),
            sum(part.unpacked_bytes for part in parts),
            sum(part.inodes for part in parts),
            base,
            layered.layers,
            layered.settings,
        )

    def _base(self, base: Base, image: str) -> ImageFacts:
        base.check(image)
        if os.path.isdir(base.path):
            return ImageFacts(os.path.realpath(base.path), None, 0, 0, 0)
        return self.facts(base.path)


def working_directory(image: str | os.PathLike[str]) -> str | None:
    """Returns the absolute working directory that the image specifies, or ``None`` if unknown.

    Apptainer ignores the ``WORKDIR`` of a Docker image but keeps the image's configuration in the SIF that it pulls.
    Other images may have the label :data:`LABEL`.
    """
    path = Path(image)
    try:
        if is_layered(path):
            layered = read_layered(path)
            return layered.workdir or (working_directory(layered.base.path) if layered.base else None)
        if path.is_dir():
            workdir = json.loads((path / ".singularity.d" / "labels.json").read_bytes()).get(LABEL)
        else:
            documents = sif.documents(path)
            labels = _nested(documents.get("inspect-metadata.json"), "data", "attributes", "labels")
            config = documents.get("oci-config.json")
            workdir = _nested(labels, LABEL) or _nested(config, "WorkingDir") or _nested(config, "config", "WorkingDir")
    except (OSError, ValueError, struct.error, AttributeError, SandboxError):
        return None
    is_valid = isinstance(workdir, str) and workdir.startswith("/") and "\0" not in workdir
    return workdir if is_valid else None


def image_start(image: str | os.PathLike[str]) -> ImageStart:
    """Returns the program that the image runs, if its file records it.

    Images from registries record it, as do SIFs that Apptainer pulled. Definition files and directories do not.
    """
    path = Path(image)
    try:
        if is_layered(path):
            layered = read_layered(path)
            return layered.start or (image_start(layered.base.path) if layered.base else ImageStart())
        if path.is_dir():
            return ImageStart()
        config = sif.documents(path).get("oci-config.json")
        config = _nested(config, "config") or config
        words = [_nested(config, "Entrypoint") or [], _nested(config, "Cmd") or []]
        if not all(isinstance(word, str) for part in words for word in part):
            return ImageStart()
        return ImageStart(tuple(words[0]), tuple(words[1]), tcp_ports(_nested(config, "ExposedPorts") or ()))
    except (OSError, ValueError, TypeError, struct.error, AttributeError, SandboxError):
        return ImageStart()


def _nested(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def stamp(path: str) -> tuple[int, int]:
    """Returns a file's size in bytes and mtime in nanoseconds."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def read_checked(facts: ImageFacts, target: Path) -> None:
    """Copies an image to ``target`` and verifies the copied bytes against the digest in the image's name.

    Callers should use the copy, because the owner of the store may change the original at any time.
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
