"""An image as a base and layers over it: a small JSON document of the store, ``STORE/sha256/<digest>.image``.

::

    {"format": "megaflow-hpc/image", "format_version": 1,
     "base": {"digest": "<of a SIF of the store>"} | {"path": …, "bytes": …, "mtime_ns": …} | null,
     "layers": [{"digest": …, "bytes": …, "unpacked_bytes": …, "inodes": …}, …],      bottom first
     "settings": "export PATH=…\n", "workdir": "/app", "user": "agent"}

The digest in its name is that of the document, and the document names its layers by theirs: so it stands for all
content. A base that is in no store, a SIF or a directory that a campaign maps, is known by path, size and time of
change. Without a base the lowest layer is the bottom, as in an image of a registry.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
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
    """What the layers lie over: a SIF of a store (``digest``), or a SIF or a directory elsewhere."""

    path: str
    digest: str = ""
    bytes: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: str | os.PathLike[str], digest: str | None = None) -> Base:
        """Returns what stands for an image file that is no document itself."""
        place = os.path.abspath(path)
        if digest:
            return cls(place, digest)
        found = os.stat(place)
        return cls(place, "", found.st_size, found.st_mtime_ns)

    @property
    def identity(self) -> str:
        """What stands for its content: a digest, else path, size and time of change."""
        return self.digest or f"{self.path}\0{self.bytes}\0{self.mtime_ns}"

    def check(self, image: str) -> None:
        """Raises :class:`SandboxError` where it is not what ``image`` was built on."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise SandboxError(f"{image}: its base {self.path} is not there ({error.strerror})") from None
        if not self.digest and (found.st_size, found.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise SandboxError(f"{image}: its base {self.path} was changed after it was built; build it again")


@dataclass(frozen=True)
class LayeredImage:
    """A base, layers over it (bottom first), and how commands start in it.

    A layer that comes twice is there once, where it came last: all that it holds is seen from there, and an overlay
    takes no directory twice.
    """

    base: Base | None
    layers: tuple[LayerFacts, ...] = ()
    settings: str = ""
    """Lines of shell that set the image's variables, after those of its base."""
    workdir: str | None = None
    user: str = ""
    """Whom steps of a Dockerfile run as that starts from it; sandboxes say so themselves. Empty: root."""

    def __post_init__(self) -> None:
        last = {layer.digest: number for number, layer in enumerate(self.layers)}
        layers = tuple(layer for number, layer in enumerate(self.layers) if last[layer.digest] == number)
        object.__setattr__(self, "layers", layers)

    def document(self) -> bytes:
        """Returns the document, the same bytes for the same image."""
        base: dict[str, Any] | None = None
        if self.base is not None:
            base = {"digest": self.base.digest} if self.base.digest else asdict(replace(self.base, digest=""))
            if not self.base.digest:
                del base["digest"]
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "base": base,
            "layers": [asdict(layer) for layer in self.layers],
            "settings": self.settings,
            "workdir": self.workdir,
        }
        content |= {"user": self.user} if self.user else {}
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the document."""
        return hashlib.sha256(self.document()).hexdigest()

    def over(self, layers: Sequence[LayerFacts]) -> LayeredImage:
        """Returns the image with further layers over its own."""
        return replace(self, layers=(*self.layers, *layers))


def is_layered(image: str | os.PathLike[str]) -> bool:
    """Whether an image's path is that of such a document."""
    return os.fspath(image).endswith(SUFFIX)


def read_layered(path: str | os.PathLike[str]) -> LayeredImage:
    """Reads a document; raises :class:`SandboxError` for a file that is none, or not the one its name says."""
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
        image = LayeredImage(base, layers, str(content["settings"]), content["workdir"], str(content.get("user", "")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SandboxError(
            f"{os.fspath(path)}: cannot be read as an image ({error}); build or pull it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != Path(path).stem:
        raise SandboxError(
            f"{os.fspath(path)}: its content is not the one in its name: it was damaged or replaced; build or pull it "
            "again"
        )
    return image


def base_path(image: str | os.PathLike[str], digest: str) -> Path:
    """Returns where the SIF of ``digest`` lies, beside a document."""
    return Path(image).parent / f"{digest}.sif"


def layer_path(image: str | os.PathLike[str], digest: str) -> Path:
    """Returns where the blob of a layer lies: in the store that holds the document."""
    return Path(image).parent.parent / "layers" / digest
