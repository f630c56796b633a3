"""The image store: images on the shared file system, each under the digest of its content.

::

    STORE/
      sha256/<digest>.sif  <digest>.json     an image, never changed once there, and what is known of it
      sha256/<digest>.image                  one that is a base and layers (layered.py)
      layers/  steps/                        its layers, and which step made which (layer_store.py)
      names/<key>.json                       what was asked for, by its key → digest
      work/<key>.lock  <kind>.<host>-<pid>-<start>     of who builds (atomic_files.py)

Everything appears by rename, whole. Who owns a store writes to it; for others it is read-only, and several stores are
looked through in order: one's own, then the group's. A store keeps no state that a reader would have to change.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megaflow_hpc.environments.images.atomic_files import (
    abandoned,
    link_record,
    locked,
    read_record,
    sweep,
    workplace,
    write_record,
)
from megaflow_hpc.environments.images.disk_quota import (
    STORE_DIRECTORIES,
    VARIABLE,
    check_quota,
    check_safe,
    default_stores,
)
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import SUFFIX, LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.sif import system_partition, unpacked_bytes
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host.private import make_parents


@dataclass(frozen=True)
class StoredImage:
    """One image of a store: ``bytes`` of the SIF or of all layers, ``unpacked_bytes`` and ``inodes`` of its files."""

    path: str
    digest: str
    bytes: int
    unpacked_bytes: int
    inodes: int
    source: str
    created_at: float


def digest_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_in(path: str | os.PathLike[str]) -> str | None:
    """Returns the digest that a store's file name states; ``None`` for a file that is in no store."""
    found = Path(path)
    named = re.fullmatch(r"[0-9a-f]{64}\.(sif|image)", found.name) and found.parent.name == "sha256"
    return found.stem if named else None


class ImageStore:
    """One or more stores. The first is written to, where it is the caller's; the others are only read."""

    def __init__(self, root: str | os.PathLike[str] | None = None, named: str | None = None) -> None:
        """
        Args:
            root: the only store. Default: those of :func:`default_stores`.
            named: as of :func:`default_stores`.
        """
        self.roots = [Path(root).absolute()] if root else [path.absolute() for path in default_stores(named)]
        self.root = self.roots[0]
        for path in self.roots:
            check_safe(path)
        self.layers = LayerStore(self.roots)
        self._swept = False

    @property
    def writable(self) -> bool:
        """Whether images can be added: the store is the caller's own, or not there yet."""
        try:
            found = self.root.stat()
        except OSError:
            return True
        return found.st_uid == os.getuid() and os.access(self.root, os.W_OK | os.X_OK)

    # --- reading ------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Path | None:
        """Returns the image that was made for ``key``, from whichever store has it with all that it is made of."""
        for root in self.roots:
            name = read_record(root / "names" / f"{key}.json")
            if name and (image := self._image(root, str(name.get("digest")))) and self.whole(image.path):
                return Path(image.path)
        return None

    def whole(self, path: str | os.PathLike[str]) -> bool:
        """Whether the layers and the base of an image are there too: of a link's they may have gone elsewhere."""
        if not is_layered(path):
            return True
        try:
            image = read_layered(path)
        except SandboxError:
            return False
        base = image.base is None or not image.base.digest or os.path.exists(image.base.path)
        return base and all(self.layers.find(layer.digest) for layer in image.layers)

    def image(self, digest: str) -> StoredImage | None:
        """Returns the image of a digest, of which the first characters suffice where no other begins with them."""
        if len(digest) == 64:
            return next((image for root in self.roots if (image := self._image(root, digest))), None)
        found = {image.digest: image for image in self.images() if image.digest.startswith(digest)}
        if len(found) > 1:
            raise ConfigError(f"{digest}: {len(found)} images of {self.root} begin with it; write more of it")
        return next(iter(found.values()), None)

    def images(self) -> Iterator[StoredImage]:
        """Yields every image of every store, in the order of their digests."""
        for root in self.roots:
            for path in sorted(path for ending in (".sif", SUFFIX) for path in (root / "sha256").glob(f"*{ending}")):
                if image := self._image(root, path.stem):
                    yield image

    def names(self) -> dict[str, list[str]]:
        """Returns, by digest, what was asked for when the image was made."""
        found: dict[str, list[str]] = {}
        for root in self.roots:
            for path in sorted((root / "names").glob("*.json")):
                if name := read_record(path):
                    found.setdefault(str(name["digest"]), []).append(str(name.get("source")))
        return found

    def _image(self, root: Path, digest: str) -> StoredImage | None:
        known = read_record(root / "sha256" / f"{digest}.json")
        for path in (root / "sha256" / f"{digest}{ending}" for ending in (".sif", SUFFIX)):
            with suppress(OSError, KeyError):
                size = path.stat().st_size
                if known is not None and (path.suffix == SUFFIX or size == known["bytes"]):
                    return StoredImage(str(path), digest, **{name: known[name] for name in _KNOWN})
        return None

    # --- writing ------------------------------------------------------------------------------------------------

    def make(self, key: str, source: str, build: Callable[[Path], LayeredImage | None]) -> Path:
        """Returns the image of ``key``; where there is none, ``build(target)`` writes it. A key has one builder at a
        time.

        Args:
            build: writes a SIF, or returns an image whose layers are in a store.

        Raises:
            SiteError: the store is not the caller's to write to, or what ``build`` raises.
        """
        if found := self.find(key):
            return found
        self.prepare(source)
        with locked(self.root / "work" / f"{key}.lock"):
            if found := self.find(key):
                return found
            with workplace(self.root / "work", key) as place:
                target = place / "image.sif"
                layered = build(target)
                image = self.add_layered(layered, source) if layered else self._publish(target, source)
            self.name(key, source, image.digest)
        return Path(image.path)

    def add(self, file: Path, source: str, digest: str | None = None) -> StoredImage:
        """Copies a SIF that exists into the store; ``digest`` is what its content must have."""
        self.prepare(str(file))
        with workplace(self.root / "work", "add") as place:
            target = place / "image.sif"
            with open(file, "rb") as reader, open(target, "wb") as writer:
                while chunk := reader.read(1 << 22):
                    writer.write(chunk)
            return self._publish(target, source, digest)

    def add_layered(self, layered: LayeredImage, source: str) -> StoredImage:
        """Takes an image in whose layers and base are in some store; those of another are linked to.

        Its sizes are those of its layers alone: others share the base.
        """
        facts = {
            "bytes": sum(layer.bytes for layer in layered.layers),
            "unpacked_bytes": sum(layer.unpacked_bytes for layer in layered.layers),
            "inodes": sum(layer.inodes for layer in layered.layers),
            "source": source,
            "created_at": time.time(),
        }
        digest = layered.digest
        final = self.root / "sha256" / f"{digest}{SUFFIX}"
        with self.changing(), workplace(self.root / "work", "add") as place:
            for layer in layered.layers:
                self.layers.adopt(layer.digest)
            if layered.base is not None and layered.base.digest:
                self._adopt_base(layered.base.path, layered.base.digest)
            target = place / final.name
            with open(target, "wb") as file:
                file.write(layered.document())
                file.flush()
                os.fsync(file.fileno())
            target.chmod(0o444)
            write_record(final.with_suffix(".json"), facts)
            os.rename(target, final)
        return StoredImage(str(final), digest, **facts)  # type: ignore[arg-type]

    def _adopt_base(self, path: str, digest: str) -> None:
        own = self.root / "sha256" / f"{digest}.sif"
        if not os.path.exists(path):
            raise SiteError(f"{path}: removed while an image was built on it; build or pull it again")
        if not own.exists():
            link_record(own, Path(path))

    def name(self, key: str, source: str, digest: str) -> None:
        """Records that ``key`` is answered by the image of ``digest``."""
        write_record(self.root / "names" / f"{key}.json", {"digest": digest, "source": source})

    def remove(self, digest: str) -> int:
        """Takes an image and its names out of the store that is written to; returns the bytes that were freed.

        Layers stay: others may share them (pruning.py).
        """
        for name in (self.root / "names").glob("*.json"):
            if (known := read_record(name)) and known.get("digest") == digest:
                name.unlink(missing_ok=True)
        freed = 0
        for path in (self.root / "sha256" / f"{digest}{ending}" for ending in (".sif", SUFFIX)):
            with suppress(FileNotFoundError):
                freed += path.lstat().st_size
                path.unlink()
        (self.root / "sha256" / f"{digest}.json").unlink(missing_ok=True)
        return freed

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds what an image that appears and layers that go exclude each other by; for moments."""
        with locked(self.root / "work" / "store.lock"):
            yield

    def leftovers(self) -> list[Path]:
        """Returns what builders that were killed have left."""
        return [path for path in (self.root / "work").glob("*") if abandoned(path)]

    def prepare(self, source: str) -> None:
        """Makes the store's rooms; raises :class:`SiteError`, naming ``source``, where it is not the caller's."""
        if not self.writable:
            remedy = f"{VARIABLE}=~/.megaflow-hpc/images:{':'.join(map(str, self.roots))}"
            raise SiteError(
                f"{source}: not in the image store {self.root}, which is not yours to write to; "
                f"ask its owner to run megaflow-hpc images build, or put a store of yours before it: {remedy}"
            )
        check_quota(self.root)
        make_parents(self.root)
        self.root.mkdir(mode=0o700, exist_ok=True)
        mode = self.root.stat().st_mode & 0o7777
        for name in STORE_DIRECTORIES:
            place = self.root / name
            if not place.is_dir():
                place.mkdir(exist_ok=True)
                place.chmod(mode)
        if not self._swept:
            self._swept = True
            sweep(self.root / "work")

    def _publish(self, target: Path, source: str, expected: str | None = None) -> StoredImage:
        partition = system_partition(target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if expected and digest != expected:
            raise SiteError(f"{source}: its content has digest {digest}, expected {expected}; copy or pull it again")
        final = self.root / "sha256" / f"{digest}.sif"
        image = StoredImage(
            str(final),
            digest,
            target.stat().st_size,
            unpacked_bytes(target, partition),
            partition.inodes,
            source,
            time.time(),
        )
        target.chmod(0o444)
        known = {name: value for name, value in asdict(image).items() if name in _KNOWN}
        write_record(final.with_suffix(".json"), known)
        os.rename(target, final)
        return image


_KNOWN = ("bytes", "unpacked_bytes", "inodes", "source", "created_at")


def known_size(path: str | os.PathLike[str]) -> int | None:
    """Returns the bytes of the unpacked files of a store's image, as its store noted; ``None`` for a file of no
    store."""
    known = read_record(Path(path).with_suffix(".json")) if digest_in(path) else None
    return int(known["unpacked_bytes"]) if known and known.get("bytes") == os.path.getsize(path) else None
