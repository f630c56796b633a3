"""The image store: SIF files on the shared file system, each under the digest of its content.

::

    STORE/
      sha256/<digest>.sif  <digest>.json     an image, never changed once there, and what is known of it
      names/<key>.json                       what was asked for, by its key → digest
      work/<key>.lock  <key>.<host>-<pid>-<start>/     of who builds

Everything appears by rename, whole. Who owns a store writes to it; for others it is read-only, and several stores are
looked through in order: one's own, then the group's. A store keeps no state that a reader would have to change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.sif import system_partition, unpacked_bytes
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

VARIABLE = "MEGAFLOW_IMAGE_STORE"
"""Directories, separated by colons; the first is the one written to."""
STALE_S = 7 * 86400.0
"""A builder's directory that another host left is rubbish after so long."""


@dataclass(frozen=True)
class StoredImage:
    """One image of a store: ``bytes`` of the SIF, ``unpacked_bytes`` and ``inodes`` of its files."""

    path: str
    digest: str
    bytes: int
    unpacked_bytes: int
    inodes: int
    source: str
    created_at: float


def default_stores() -> list[Path]:
    """Returns the directories of ``MEGAFLOW_IMAGE_STORE``, else ``~/.megaflow-hpc/images``."""
    named = [Path(part) for part in os.environ.get(VARIABLE, "").split(":") if part]
    return named or [Path.home() / ".megaflow-hpc" / "images"]


def digest_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_in(path: str | os.PathLike[str]) -> str | None:
    """Returns the digest that a store's file name states; ``None`` for a file that is in no store."""
    found = Path(path)
    return found.stem if re.fullmatch(r"[0-9a-f]{64}\.sif", found.name) and found.parent.name == "sha256" else None


class ImageStore:
    """One or more stores. The first is written to, where it is the caller's; the others are only read."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.roots = [Path(root).absolute()] if root else [path.absolute() for path in default_stores()]
        self.root = self.roots[0]
        for path in self.roots:
            _check_safe(path)

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
        """Returns the image that was made for ``key``, from whichever store has it."""
        for root in self.roots:
            name = _read_json(root / "names" / f"{key}.json")
            if name and (image := self._image(root, str(name.get("digest")))):
                return Path(image.path)
        return None

    def image(self, digest: str) -> StoredImage | None:
        """Returns the image of a digest, of which the first characters suffice where no other begins with them."""
        found = {image.digest: image for image in self.images() if image.digest.startswith(digest)}
        if len(found) > 1:
            raise ConfigError(f"{digest}: {len(found)} images of {self.root} begin with it; write more of it")
        return next(iter(found.values()), None)

    def images(self) -> Iterator[StoredImage]:
        """Yields every image of every store, in the order of their digests."""
        for root in self.roots:
            for path in sorted((root / "sha256").glob("*.sif")):
                if image := self._image(root, path.stem):
                    yield image

    def names(self) -> dict[str, list[str]]:
        """Returns, by digest, what was asked for when the image was made."""
        found: dict[str, list[str]] = {}
        for root in self.roots:
            for path in sorted((root / "names").glob("*.json")):
                if name := _read_json(path):
                    found.setdefault(str(name["digest"]), []).append(str(name.get("source")))
        return found

    def _image(self, root: Path, digest: str) -> StoredImage | None:
        known = _read_json(root / "sha256" / f"{digest}.json")
        path = root / "sha256" / f"{digest}.sif"
        try:
            if known is None or path.stat().st_size != known["bytes"]:
                return None
            return StoredImage(str(path), digest, **{name: known[name] for name in _KNOWN})
        except (OSError, KeyError):
            return None

    # --- writing ------------------------------------------------------------------------------------------------

    def make(self, key: str, source: str, build: Callable[[Path], None]) -> Path:
        """Returns the image of ``key``; where there is none, ``build(target)`` writes it. A key has one builder at a
        time.

        Raises:
            SiteError: the store is not the caller's to write to, or what ``build`` raises.
        """
        if found := self.find(key):
            return found
        self._prepare(source)
        with _locked(self.root / "work" / f"{key}.lock"):
            if found := self.find(key):
                return found
            workplace = self._workplace(key)
            try:
                target = workplace / "image.sif"
                build(target)
                image = self._publish(target, source)
            finally:
                remove_tree(workplace)
            self.name(key, source, image.digest)
        return Path(image.path)

    def add(self, file: Path, source: str, digest: str | None = None) -> StoredImage:
        """Copies a SIF that exists into the store; ``digest`` is what its content must have."""
        self._prepare(str(file))
        workplace = self._workplace(f"add{secrets.token_hex(4)}")
        try:
            target = workplace / "image.sif"
            with open(file, "rb") as reader, open(target, "wb") as writer:
                while chunk := reader.read(1 << 22):
                    writer.write(chunk)
            return self._publish(target, source, digest)
        finally:
            remove_tree(workplace)

    def name(self, key: str, source: str, digest: str) -> None:
        """Records that ``key`` is answered by the image of ``digest``."""
        _publish_note(self.root / "names" / f"{key}.json", {"digest": digest, "source": source})

    def remove(self, digest: str) -> int:
        """Takes an image and its names out of the store that is written to; returns the bytes that were freed."""
        path = self.root / "sha256" / f"{digest}.sif"
        for name in (self.root / "names").glob("*.json"):
            if (known := _read_json(name)) and known.get("digest") == digest:
                name.unlink(missing_ok=True)
        try:
            freed = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            freed = 0
        path.with_suffix(".json").unlink(missing_ok=True)
        return freed

    def leftovers(self) -> list[Path]:
        """Returns the directories of builders that were killed."""
        return [path for path in (self.root / "work").glob("*.*/") if _abandoned(path)]

    def _prepare(self, source: str) -> None:
        if not self.writable:
            remedy = f"{VARIABLE}=~/.megaflow-hpc/images:{':'.join(map(str, self.roots))}"
            raise SiteError(
                f"{source}: not in the image store {self.root}, which is not yours to write to; "
                f"ask its owner to run megaflow-hpc images build, or put a store of yours before it: {remedy}"
            )
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.root.stat().st_mode & 0o7777
        for room in ("sha256", "names", "work"):
            place = self.root / room
            if not place.is_dir():
                place.mkdir(exist_ok=True)
                place.chmod(mode)

    def _workplace(self, key: str) -> Path:
        for left in (self.root / "work").glob(f"{key}.*/"):
            if _abandoned(left):
                remove_tree(left)
        path = self.root / "work" / f"{key}.{socket.gethostname()}-{Identity.of(os.getpid())}"
        remove_tree(path)
        path.mkdir(mode=0o700)
        return path

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
        _publish_note(final.with_suffix(".json"), known)
        os.rename(target, final)
        return image


_KNOWN = ("bytes", "unpacked_bytes", "inodes", "source", "created_at")


def _publish_note(path: Path, value: Mapping[str, Any]) -> None:
    write_json(path, value, 0o444)
    path.chmod(0o444)  # whatever the umask: the directory decides who reads


def _check_safe(root: Path) -> None:
    try:
        mode = root.stat().st_mode
    except OSError:
        return
    if mode & 0o002:
        raise SiteError(f"{root}: everybody may write to this image store; chmod o-w {root}, or use another one")


def _abandoned(path: Path) -> bool:
    """Whether the builder that made ``<key>.<host>-<pid>-<start>`` is gone; another host's is believed for a week."""
    name = re.fullmatch(r"[^.]+\.(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)", path.name)
    if name is None:
        return False
    if name["host"] == socket.gethostname():
        return not Identity(int(name["pid"]), int(name["start"])).alive()
    try:
        return time.time() - path.stat().st_mtime > STALE_S
    except OSError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file. Where the file system has no locks nobody waits: work may be done twice, nothing breaks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def known_size(path: str | os.PathLike[str]) -> int | None:
    """Returns the bytes of the unpacked files of a store's image, as its store noted; ``None`` for a file of no
    store."""
    known = _read_json(Path(path).with_suffix(".json")) if digest_in(path) else None
    return int(known["unpacked_bytes"]) if known and known.get("bytes") == os.path.getsize(path) else None
