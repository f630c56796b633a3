"""Stores images on the shared file system, named by the digest of their content.

::

    STORE/
      sha256/<digest>.sif  <digest>.json     an immutable SIF image and its record
      sha256/<digest>.image                  an image of a base and layers (layered.py)
      layers/<digest>  <digest>.json         an immutable layer blob and its sizes
      steps/<key>.json                       layer of a build step, by hash of its inputs; empty if no file changed
      names/<key>.json                       digest of an image, by key of the request
      work/<key>.lock  <kind>.<host>-<pid>-<start>     locks and unfinished files of builders (atomic_files.py)

Files are added by rename, so they are always complete. Only the owner of a store writes to it. Other users read it.
Several stores are searched in order: first the user's own, then those of the group. Reading never changes a store.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from megaflow_hpc.environments.images.atomic_files import (
    abandoned,
    link_record,
    locked,
    read_record,
    sweep,
    work_directory,
    write_record,
)
from megaflow_hpc.environments.images.disk_quota import (
    STORE_DIRECTORIES,
    VARIABLE,
    check_quota,
    check_safe,
    default_stores,
)
from megaflow_hpc.environments.images.layered import SUFFIX, LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.layers.blob import LayerFacts, measure
from megaflow_hpc.environments.images.sif import system_partition, unpacked_bytes
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host.private import make_parents

_DIGEST = re.compile(r"[0-9a-f]{64}")


class LayerStore:
    """The layers in the stores ``roots``, each stored once for all images. New layers go to the first store.

    If an image in the first store needs a layer from another store, the layer is symlinked, not copied.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.root = roots[0]
        self.added_bytes = 0
        """Total size in bytes of the blobs added through this object."""
        self._guard = threading.Lock()

    # --- reading ------------------------------------------------------------------------------------------------

    def find(self, digest: str) -> LayerFacts | None:
        """Returns the facts of a layer, or ``None`` if no store has it."""
        located = self._locate(digest)
        return located[1] if located else None

    def path(self, digest: str) -> Path:
        """Returns the path of a layer's blob. Raises :class:`SiteError` if no store has it."""
        located = self._locate(digest)
        if located is None:
            raise SiteError(
                f"{digest}: no such layer in {', '.join(map(str, self.roots))}; build or pull its image again"
            )
        return located[0]

    def _locate(self, digest: str) -> tuple[Path, LayerFacts] | None:
        if not _DIGEST.fullmatch(digest):
            return None
        for root in self.roots:
            path = root / "layers" / digest
            record = read_record(path.with_name(f"{digest}.json"))
            with suppress(OSError, KeyError, TypeError, ValueError):
                if record and path.stat().st_size == record["bytes"]:
                    sizes = [int(record[name]) for name in ("bytes", "unpacked_bytes", "inodes")]
                    return path, LayerFacts(digest, *sizes)
        return None

    def step(self, key: str) -> LayerFacts | None:
        """Returns the layer that a build step produced, or ``None`` if the step changed no file.

        Raises:
            KeyError: The step is not recorded, or its layer no longer exists.
        """
        for root in self.roots:
            record = read_record(root / "steps" / f"{key}.json")
            if record is None:
                continue
            digest = str(record.get("layer") or "")
            if not digest:
                return None
            if facts := self.find(digest):
                return facts
        raise KeyError(key)

    def layers(self) -> Iterator[LayerFacts]:
        """Yields every layer of the first store."""
        for path in sorted((self.root / "layers").glob("*.json")):
            if facts := self.find(path.stem):
                yield facts

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self, key: str) -> Iterator[Path]:
        """Locks a step and yields a directory in the store for building its layer. Removes the directory on exit."""
        with locked(self.root / "work" / f"{key}.lock"), work_directory(self.root / "work", key) as directory:
            yield directory

    def add(self, file: Path, facts: LayerFacts) -> LayerFacts:
        """Moves a finished blob into the store. ``file`` must be on the store's file system."""
        final = self.root / "layers" / facts.digest
        file.chmod(0o444)
        record = asdict(facts)
        del record["digest"]
        write_record(final.with_name(f"{facts.digest}.json"), record)
        os.rename(file, final)
        with self._guard:
            self.added_bytes += facts.bytes
        return facts

    def take(self, digest: str, pieces: Iterable[bytes]) -> LayerFacts:
        """Stores a blob that arrives in chunks, after verifying that its digest is ``digest``.

        Raises:
            SiteError: The blob has another digest or is not a layer. Nothing is stored.
        """
        with work_directory(self.root / "work", "take") as directory:
            file = directory / "layer"
            with open(file, "wb") as writer:
                try:
                    facts = measure(_copied(pieces, writer), digest)
                except SandboxError as error:
                    raise SiteError(str(error)) from error
                writer.flush()
                os.fsync(writer.fileno())
            return self.add(file, facts)

    def record_step(self, key: str, layer: LayerFacts | None, source: str) -> None:
        """Records the layer that a step produced, or ``None`` if it changed no file."""
        write_record(self.root / "steps" / f"{key}.json", {"layer": layer.digest if layer else "", "source": source})

    def adopt(self, digest: str) -> None:
        """Makes a layer available in the first store. Adds a symlink if only another store has the layer."""
        path = self.path(digest)
        own = self.root / "layers" / digest
        if path != own:
            link_record(own, path)

    def remove(self, digest: str) -> int:
        """Removes a layer from the first store. Returns the number of bytes freed."""
        path = self.root / "layers" / digest
        try:
            size = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        path.with_name(f"{digest}.json").unlink(missing_ok=True)
        return size

    def tidy(self, older_s: float) -> None:
        """Removes dangling links, steps whose layer is missing, and records without a blob older than ``older_s``
        seconds."""
        directory = self.root / "layers"
        before = time.time() - older_s
        for path in directory.iterdir() if directory.is_dir() else ():
            blob = path.with_suffix("")
            with suppress(FileNotFoundError):
                is_dangling = blob.is_symlink() and not blob.exists()
                # Records are written before blobs are moved, so a recent record may not have its blob yet.
                is_abandoned = not os.path.lexists(blob) and path.stat().st_mtime < before
                if is_dangling or is_abandoned:
                    path.unlink()
        for path in (self.root / "steps").glob("*.json"):
            record = read_record(path)
            digest = str(record.get("layer") or "") if record is not None else "unreadable"
            if digest and self.find(digest) is None:
                path.unlink(missing_ok=True)


def _copied(pieces: Iterable[bytes], writer: BinaryIO) -> Iterator[bytes]:
    """Yields the chunks unchanged, after writing each of them to ``writer``."""
    for piece in pieces:
        writer.write(piece)
        yield piece


_FACTS = ("bytes", "unpacked_bytes", "inodes", "source", "created_at")
"""Fields of an image's record, in the order of :class:`StoredImage`."""


@dataclass(frozen=True)
class StoredImage:
    """An image in a store.

    ``bytes`` is the size of its SIF or layers. ``unpacked_bytes`` and ``inodes`` are the sizes of its files.
    ``created_at`` is in Unix seconds.
    """

    path: str
    digest: str
    bytes: int
    unpacked_bytes: int
    inodes: int
    source: str
    created_at: float


def digest_in(path: str | os.PathLike[str]) -> str | None:
    """Returns the digest in a store file's name, or ``None`` if the file is not in a store."""
    file = Path(path)
    is_stored = file.parent.name == "sha256" and re.fullmatch(r"[0-9a-f]{64}\.(sif|image)", file.name)
    return file.stem if is_stored else None


class ImageStore:
    """One or more stores. New images go to the first if it belongs to the user. The others are read-only.

    Args:
        root: Use only this store. Default: the stores of :func:`default_stores`.
        named: See :func:`default_stores`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, named: str | None = None) -> None:
        self.roots = [Path(root).absolute()] if root else [path.absolute() for path in default_stores(named)]
        self.root = self.roots[0]
        for path in self.roots:
            check_safe(path)
        self.layers = LayerStore(self.roots)
        self._swept = False

    @property
    def writable(self) -> bool:
        """True if images can be added: the first store belongs to the user or does not exist yet."""
        try:
            status = self.root.stat()
        except OSError:
            return True
        return status.st_uid == os.getuid() and os.access(self.root, os.W_OK | os.X_OK)

    # --- reading ------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Path | None:
        """Returns the image for ``key`` from the first store that has the complete image, or ``None``."""
        for root in self.roots:
            name = read_record(root / "names" / f"{key}.json")
            image = self._image(root, str(name.get("digest"))) if name else None
            if image and self.is_complete(image.path):
                return Path(image.path)
        return None

    def is_complete(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether an image's base and layers exist. They may be links to files that were removed from another
        store."""
        if not is_layered(path):
            return True
        try:
            image = read_layered(path)
        except SandboxError:
            return False
        if image.base is not None and image.base.digest and not os.path.exists(image.base.path):
            return False
        return all(self.layers.find(layer.digest) for layer in image.layers)

    def image(self, digest: str) -> StoredImage | None:
        """Returns the image with a digest, or ``None``. A unique prefix of the digest is enough.

        Raises:
            ConfigError: Several images have the prefix.
        """
        if len(digest) == 64:
            return next(filter(None, (self._image(root, digest) for root in self.roots)), None)
        matching = {image.digest: image for image in self.images() if image.digest.startswith(digest)}
        if len(matching) > 1:
            raise ConfigError(f"{digest}: {len(matching)} images of {self.root} begin with it; give more digits")
        return next(iter(matching.values()), None)

    def images(self) -> Iterator[StoredImage]:
        """Yields the images of all stores, sorted by digest within each store."""
        for root in self.roots:
            paths = [*(root / "sha256").glob("*.sif"), *(root / "sha256").glob(f"*{SUFFIX}")]
            for path in sorted(paths):
                if image := self._image(root, path.stem):
                    yield image

    def names(self) -> dict[str, list[str]]:
        """Returns, for each image digest, the sources for which the image was made."""
        sources: dict[str, list[str]] = {}
        for root in self.roots:
            for path in sorted((root / "names").glob("*.json")):
                if name := read_record(path):
                    sources.setdefault(str(name["digest"]), []).append(str(name.get("source")))
        return sources

    def _image(self, root: Path, digest: str) -> StoredImage | None:
        record = read_record(root / "sha256" / f"{digest}.json")
        if record is None:
            return None
        for path in _files(root, digest):
            with suppress(OSError, KeyError):
                size = path.stat().st_size
                if path.suffix == SUFFIX or size == record["bytes"]:
                    return StoredImage(str(path), digest, **{name: record[name] for name in _FACTS})
        return None

    # --- writing ------------------------------------------------------------------------------------------------

    def make(self, key: str, source: str, build: Callable[[Path], LayeredImage | None]) -> Path:
        """Returns the image for ``key``, and makes it if it is missing.

        Only one process at a time calls ``build(target)`` for a key.

        Args:
            build: Writes a SIF to ``target``, or returns an image whose layers are in a store.

        Raises:
            SiteError: The store belongs to another user. Errors of ``build`` are propagated.
        """
        if existing := self.find(key):
            return existing
        self.prepare(source)
        with locked(self.root / "work" / f"{key}.lock"):
            if existing := self.find(key):
                return existing
            with work_directory(self.root / "work", key) as directory:
                target = directory / "image.sif"
                layered = build(target)
                image = self.add_layered(layered, source) if layered else self._add_sif(target, source)
            self.name(key, source, image.digest)
        return Path(image.path)

    def add(self, file: Path, source: str, digest: str | None = None) -> StoredImage:
        """Copies an existing SIF into the store. If ``digest`` is given, verifies the content against it."""
        self.prepare(str(file))
        with work_directory(self.root / "work", "add") as directory:
            target = directory / "image.sif"
            shutil.copyfile(file, target)
            return self._add_sif(target, source, digest)

    def _add_sif(self, target: Path, source: str, expected: str | None = None) -> StoredImage:
        partition = system_partition(target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if expected and digest != expected:
            raise SiteError(f"{source}: its content has digest {digest}, expected {expected}; copy or pull it again")
        unpacked = unpacked_bytes(target, partition)
        return self._publish(target, f"{digest}.sif", target.stat().st_size, unpacked, partition.inodes, source)

    def add_layered(self, layered: LayeredImage, source: str) -> StoredImage:
        """Adds an image whose base and layers are already in a store.

        Base and layers of another store are symlinked. The recorded sizes exclude the base, because images share it.
        """
        with self.changing(), work_directory(self.root / "work", "add") as directory:
            for layer in layered.layers:
                self.layers.adopt(layer.digest)
            if layered.base is not None and layered.base.digest:
                self._adopt_base(layered.base.path, layered.base.digest)
            target = directory / "document"
            with open(target, "wb") as file:
                file.write(layered.document())
                file.flush()
                os.fsync(file.fileno())
            return self._publish(
                target,
                f"{layered.digest}{SUFFIX}",
                sum(layer.bytes for layer in layered.layers),
                sum(layer.unpacked_bytes for layer in layered.layers),
                sum(layer.inodes for layer in layered.layers),
                source,
            )

    def _adopt_base(self, path: str, digest: str) -> None:
        own = self.root / "sha256" / f"{digest}.sif"
        if not os.path.exists(path):
            raise SiteError(f"{path}: removed while an image was built on it; build or pull it again")
        if not own.exists():
            link_record(own, Path(path))

    def _publish(
        self, target: Path, name: str, size: int, unpacked_bytes: int, inodes: int, source: str
    ) -> StoredImage:
        """Writes an image's record, then moves its file into the store."""
        final = self.root / "sha256" / name
        image = StoredImage(str(final), final.stem, size, unpacked_bytes, inodes, source, time.time())
        target.chmod(0o444)
        write_record(final.with_suffix(".json"), {field: getattr(image, field) for field in _FACTS})
        os.rename(target, final)
        return image

    def name(self, key: str, source: str, digest: str) -> None:
        """Records the image ``digest`` as the result for ``key``."""
        write_record(self.root / "names" / f"{key}.json", {"digest": digest, "source": source})

    def remove(self, digest: str) -> int:
        """Removes an image and its names from the first store. Returns the number of bytes freed.

        Layers are kept, because other images may share them (pruning.py).
        """
        for name in (self.root / "names").glob("*.json"):
            record = read_record(name)
            if record and record.get("digest") == digest:
                name.unlink(missing_ok=True)
        freed = 0
        for path in _files(self.root, digest):
            with suppress(FileNotFoundError):
                freed += path.lstat().st_size
                path.unlink()
        (self.root / "sha256" / f"{digest}.json").unlink(missing_ok=True)
        return freed

    def changing(self) -> AbstractContextManager[None]:
        """Returns the lock that keeps a concurrent prune from removing a new image's layers. Hold it only briefly."""
        return locked(self.root / "work" / "store.lock")

    def leftovers(self) -> list[Path]:
        """Returns the unfinished files of killed builders."""
        return [path for path in (self.root / "work").glob("*") if abandoned(path)]

    def prepare(self, source: str) -> None:
        """Creates the store's directories and removes leftover files.

        Raises:
            SiteError: Another user owns the store, or it is almost full. The message names ``source``.
        """
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
            directory = self.root / name
            if not directory.is_dir():
                directory.mkdir(exist_ok=True)
                directory.chmod(mode)
        if not self._swept:
            self._swept = True
            sweep(self.root / "work")


def _files(root: Path, digest: str) -> list[Path]:
    """Returns the paths at which a store may have an image's file."""
    return [root / "sha256" / f"{digest}.sif", root / "sha256" / f"{digest}{SUFFIX}"]


def known_size(path: str | os.PathLike[str]) -> int | None:
    """Returns the recorded unpacked size of a stored SIF in bytes, or ``None`` if there is no valid record."""
    record = read_record(Path(path).with_suffix(".json")) if digest_in(path) else None
    if record is None or record.get("bytes") != os.path.getsize(path):
        return None
    return int(record["unpacked_bytes"])
