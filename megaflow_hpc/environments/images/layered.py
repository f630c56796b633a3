r"""Images made of a base and layers, each described by a JSON document ``STORE/sha256/<digest>.image``.

::

    {"format": "megaflow-hpc/image", "format_version": 1,
     "base": {"digest": "<of a SIF of the store>"} | {"path": …, "bytes": …, "mtime_ns": …} | null,
     "layers": [{"digest": …, "bytes": …, "unpacked_bytes": …, "inodes": …}, …],      bottom first
     "settings": "export PATH=…\n", "workdir": "/app", "user": "agent", "start": [["/entry.sh"], ["serve"], [8000]]}

The file name is the digest of the document. Because the document contains the digests of all layers, the name
identifies the whole content. A base outside of stores, such as a SIF or directory that a campaign maps, is identified
by path, size and mtime. If there is no base, the first layer is the bottom one, as in registry images.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.errors import SandboxError

SUFFIX = ".image"
FORMAT = "megaflow-hpc/image"
FORMAT_VERSION = 1
_MAX_DOCUMENT_BYTES = 1 << 22


@dataclass(frozen=True)
class Base:
    """The image below the layers: a SIF in a store, with its ``digest``, or a SIF or directory outside of stores."""

    path: str
    digest: str = ""
    bytes: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: str | os.PathLike[str], digest: str | None = None) -> Base:
        """Creates a base from a directory, a SIF outside of stores, or a SIF in a store with its ``digest``."""
        absolute = os.path.abspath(path)
        if digest:
            return cls(absolute, digest)
        status = os.stat(absolute)
        return cls(absolute, "", status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """String that identifies the content: the digest, or else path, size and mtime."""
        return self.digest or f"{self.path}\0{self.bytes}\0{self.mtime_ns}"

    def check(self, image: str) -> None:
        """Raises :class:`SandboxError` if the base is missing or has changed since ``image`` was built on it."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise SandboxError(f"{image}: its base {self.path} is missing ({error.strerror})") from None
        if not self.digest and (status.st_size, status.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise SandboxError(f"{image}: its base {self.path} was changed after it was built; build it again")


@dataclass(frozen=True)
class ImageStart:
    """The program that an image runs: its entry point, arguments, and TCP ports."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entrypoint or self.command or self.ports)


@dataclass(frozen=True)
class LayeredImage:
    """An image that consists of a base, layers above it (bottom first), and settings for commands.

    If a layer occurs twice, only the last occurrence is kept. It hides the earlier one, and overlays reject duplicate
    directories.
    """

    base: Base | None
    layers: tuple[LayerFacts, ...] = ()
    settings: str = ""
    """Shell lines that set the image's variables. They run after the base's own settings."""
    workdir: str | None = None
    user: str = ""
    """User for the build steps of Dockerfiles based on this image. Empty means root. Ignored by sandboxes."""
    start: ImageStart = ImageStart()
    """The program that the image runs as a service. Other sandboxes ignore it."""

    def __post_init__(self) -> None:
        last = {layer.digest: number for number, layer in enumerate(self.layers)}
        layers = tuple(layer for number, layer in enumerate(self.layers) if last[layer.digest] == number)
        object.__setattr__(self, "layers", layers)

    def document(self) -> bytes:
        """Serializes the image to a JSON document. Equal images have equal documents."""
        base: dict[str, Any] | None = None
        if self.base is not None and self.base.digest:
            base = {"digest": self.base.digest}
        elif self.base is not None:
            base = {"path": self.base.path, "bytes": self.base.bytes, "mtime_ns": self.base.mtime_ns}
        content: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "base": base,
            "layers": [asdict(layer) for layer in self.layers],
            "settings": self.settings,
            "workdir": self.workdir,
        }
        if self.user:
            content["user"] = self.user
        if self.start:
            content["start"] = [self.start.entrypoint, self.start.command, self.start.ports]
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the document."""
        return hashlib.sha256(self.document()).hexdigest()

    def over(self, layers: Sequence[LayerFacts]) -> LayeredImage:
        """Returns a copy of the image with more layers on top."""
        return replace(self, layers=(*self.layers, *layers))


def tcp_ports(names: Iterable[str]) -> tuple[int, ...]:
    """Returns the TCP ports among names such as ``8000/tcp``, in order. Skips other names."""
    matches = (re.fullmatch(r"(\d{1,5})(/tcp)?", name) for name in names)
    return tuple(sorted({int(match[1]) for match in matches if match and 0 < int(match[1]) < 65536}))


def is_layered(image: str | os.PathLike[str]) -> bool:
    """Returns whether a path names the document of a layered image, judging by its suffix."""
    return os.fspath(image).endswith(SUFFIX)


def read_layered(path: str | os.PathLike[str]) -> LayeredImage:
    """Reads a layered image's document. Raises :class:`SandboxError` if it is invalid or its digest does not match its
    name."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_DOCUMENT_BYTES)
        content = json.loads(data)
        if content["format"] != FORMAT or content["format_version"] > FORMAT_VERSION:
            raise ValueError(f"of format {content['format']} {content['format_version']}")
        base = content["base"]
        if base is not None and "digest" in base:
            base = Base(str(base_path(path, str(base["digest"]))), str(base["digest"]))
        elif base is not None:
            base = Base(str(base["path"]), "", int(base["bytes"]), int(base["mtime_ns"]))
        layers = tuple(LayerFacts(**layer) for layer in content["layers"])
        start = ImageStart(*map(tuple, content.get("start", ())))
        user = str(content.get("user", ""))
        image = LayeredImage(base, layers, str(content["settings"]), content["workdir"], user, start)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SandboxError(
            f"{os.fspath(path)}: cannot be read as an image ({error}); build or pull it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != Path(path).stem:
        raise SandboxError(
            f"{os.fspath(path)}: its content does not match the digest in its name; it was damaged or "
            "replaced; build or pull it again"
        )
    return image


def base_path(image: str | os.PathLike[str], digest: str) -> Path:
    """Returns the path of the base SIF ``digest`` in the store that contains the document ``image``."""
    return Path(image).parent / f"{digest}.sif"


def layer_path(image: str | os.PathLike[str], digest: str) -> Path:
    """Returns the path of the layer blob ``digest`` in the store that contains the document ``image``."""
    return Path(image).parent.parent / "layers" / digest
