"""Writes the files of a ``COPY`` or ``ADD`` to a layer following Docker's rules, without starting a process.

A view of the lower layers shows the existing files of the image. Symlinks in the target path are followed inside the
image. Symlinks in a copied tree are not followed. The layer also contains the parent directories of copied files. They
keep the attributes that they have in the image, because an overlay shows the attributes of the uppermost layer.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaflow_hpc.environments.images.layers.blob import (
    OPEN_DIRECTORY,
    OPEN_FILE,
    Attributes,
    Packer,
    attributes_of,
    opened,
    scan,
)
from megaflow_hpc.environments.images.layers.view import LayerListing, LayerView, ViewEntry
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import MAX_DEPTH


@dataclass(frozen=True)
class Placement:
    """Target and options of a ``COPY`` or ``ADD``."""

    target: str
    """Absolute path in the image."""
    into: bool = False
    """True if ``target`` is a directory, even if it does not exist yet."""
    owner: tuple[int, int] | None = None
    """Value of ``--chown``: owner of the copied files and of directories created for them."""
    mode: str = ""
    """Value of ``--chmod`` (:class:`Mode`) for copied files and directories. Empty without ``--chmod``."""
    own_owner: bool = False
    """True if copied items keep their owners when there is no ``--chown``. If false, they belong to root."""
    replaces: bool = False
    """True if entries of an archive may replace the image's files and empty directories."""
    archived: Mapping[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """Maps (device, inode) of an extracted item to (mode, uid, gid) in its archive. ``--chmod`` does not apply to these
    items."""


class Placer:
    """Writes copied items to the layer of ``packer``, on top of the image ``below``."""

    def __init__(self, packer: Packer, below: LayerView) -> None:
        self._packer = packer
        self._layer = LayerListing(lambda path, limit: b"")
        self._directories: set[str] = set()
        self._view = LayerView([self._layer, *below.layers])

    def place(self, items: Path, how: Placement) -> None:
        """Copies each ``items/<number>/<name>`` to the target. For a directory, copies only the contents.

        Raises:
            ConfigError: A directory would replace a file, or a file a directory.
        """
        for item in sorted(items.glob("*/*"), key=_item_order):
            status = item.lstat()
            target = self._view.resolve(how.target)
            if stat.S_ISDIR(status.st_mode):
                with opened(item, OPEN_DIRECTORY) as directory:
                    self._tree(directory, status, target, how, top=True)
                continue
            existing = self._view.entry(target)
            if how.into and existing is not None and not existing.is_directory:
                raise ConfigError(f"{how.target}: not a directory in the image")
            if how.into or (existing is not None and existing.is_directory):
                target = posixpath.join(target, item.name)
            with opened(item.parent, OPEN_DIRECTORY) as parent:
                self._file(parent, item.name, status, target, how)

    def directory(self, path: str, owner: tuple[int, int]) -> None:
        """Adds a directory and its missing parents to the layer, all owned by ``owner``."""
        self._lead_to(self._view.resolve(path), Attributes(0o755, *owner))

    def _tree(self, directory: int, status: os.stat_result, target: str, how: Placement, *, top: bool) -> None:
        if target.count("/") > MAX_DEPTH:
            raise ConfigError(f"{how.target}: directories nested more than {MAX_DEPTH} deep")
        attributes = self._attributes(status, how)
        archived = _archived(status, how)
        existing = self._view.entry(target)
        if existing is not None and existing.is_link and how.replaces and not top and not archived:
            # The archive has no entry for this directory, so its files go to the target of the image's symlink.
            target = self._view.resolve(target)
            existing = self._view.entry(target)
            if existing is None or not existing.is_directory:
                raise ConfigError(f"/{target}: not a directory in the image, but a link in the target path leads there")
        elif existing is not None and not existing.is_directory and (top or not how.replaces):
            raise ConfigError(f"{target}: a directory cannot be copied over a file or a link")
        if top and existing is not None:
            self._lead_to(target, attributes)
        elif target:
            if top and not (how.mode and not archived):
                attributes = replace(attributes, mode=0o755)
            self._lead_to(posixpath.dirname(target), self._parent_attributes(how, status))
            self._add(target, ViewEntry(stat.S_IFDIR, attributes))
        for entry in scan(directory):
            entry_status = entry.stat(follow_symlinks=False)
            path = posixpath.join(target, entry.name)
            if stat.S_ISDIR(entry_status.st_mode):
                with opened(entry.name, OPEN_DIRECTORY, directory) as below:
                    self._tree(below, entry_status, path, how, top=False)
            else:
                self._file(directory, entry.name, entry_status, path, how)

    def _file(self, parent: int, name: str, status: os.stat_result, target: str, how: Placement) -> None:
        attributes = self._attributes(status, how)
        existing = self._view.entry(target)
        if existing is not None and existing.is_directory and not (how.replaces and not self._view.names(target)):
            raise ConfigError(f"{target}: a file cannot be copied over a directory")
        self._lead_to(posixpath.dirname(target), self._parent_attributes(how, status))
        if stat.S_ISLNK(status.st_mode):
            self._add(target, ViewEntry(stat.S_IFLNK, attributes, os.readlink(name, dir_fd=parent)))
        elif stat.S_ISREG(status.st_mode):
            with opened(name, OPEN_FILE, parent) as file:
                self._layer.add(target, ViewEntry(stat.S_IFREG, attributes))
                self._packer.file(target, file, attributes)
        elif stat.S_ISFIFO(status.st_mode):
            self._layer.add(target, ViewEntry(stat.S_IFIFO, attributes))
            self._packer.fifo(target, attributes)

    def _attributes(self, status: os.stat_result, how: Placement) -> Attributes:
        own = attributes_of(status)
        if archived := _archived(status, how):
            mode, *archived_owner = archived
            uid, gid = how.owner or archived_owner
            return Attributes(mode, uid, gid, own.mtime)
        if how.owner is not None:
            uid, gid = how.owner
        else:
            uid, gid = (own.uid, own.gid) if how.own_owner else (0, 0)
        mode = own.mode
        if how.mode and not stat.S_ISLNK(status.st_mode):
            mode = Mode(how.mode).of(mode, is_directory=stat.S_ISDIR(status.st_mode))
        return Attributes(mode, uid, gid, own.mtime)

    def _parent_attributes(self, how: Placement, status: os.stat_result) -> Attributes:
        """Returns the attributes for missing parent directories. Their mtime is the copied item's, so that identical
        copies produce identical layers."""
        uid, gid = how.owner or (0, 0)
        mode = Mode(how.mode).of_parents if how.mode and not _archived(status, how) else 0o755
        return Attributes(mode, uid, gid, attributes_of(status).mtime)

    def _lead_to(self, path: str, missing: Attributes) -> None:
        """Adds a directory and its parents to the layer. Directories missing from the image get the attributes
        ``missing``."""
        parts = [part for part in path.split("/") if part]
        for depth in range(1, len(parts) + 1):
            parent = "/".join(parts[:depth])
            if parent in self._directories:
                continue
            existing = self._view.entry(parent)
            if existing is not None and not existing.is_directory:
                raise ConfigError(f"{parent}: not a directory in the image")
            self._add(parent, existing or ViewEntry(stat.S_IFDIR, missing))

    def _add(self, path: str, entry: ViewEntry) -> None:
        self._layer.add(path, replace(entry, opaque=False))
        if entry.is_directory:
            self._directories.add(path)
            self._packer.directory(path, entry.attributes)
        else:
            self._packer.link(path, entry.target, entry.attributes)


def _archived(status: os.stat_result, how: Placement) -> tuple[int, int, int] | None:
    return how.archived.get((status.st_dev, status.st_ino))


def _item_order(item: Path) -> tuple[int, str, str]:
    """Returns a sort key that orders items by directory number, here-documents last."""
    directory = item.parent.name
    return (int(directory), "", item.name) if directory.isdecimal() else (1 << 30, directory, item.name)


@dataclass(frozen=True)
class Mode:
    """Parsed value of ``--chmod``: an octal number, or clauses such as ``u=rwX,go=rX``. Raises ConfigError if
    invalid."""

    text: str

    def __post_init__(self) -> None:
        if not _OCTAL.fullmatch(self.text) and not all(_CLAUSE.fullmatch(each) for each in self.text.split(",")):
            raise ConfigError(
                f"--chmod={self.text}: expected an octal number such as 755, or clauses such as u=rwX,go=rX"
            )

    def of(self, mode: int, *, is_directory: bool) -> int:
        """Returns the new permission bits of a file or directory whose current mode is ``mode``."""
        if _OCTAL.fullmatch(self.text):
            return int(self.text, 8)
        for who, sign, letters in _CLAUSE.findall(self.text):
            bits = sum(_BITS[letter] for letter in set(letters) - {"X"})
            if "X" in letters and (is_directory or mode & 0o111):
                bits |= 1
            classes = set("ugo" if who in ("", "a") else who.replace("a", "ugo"))
            shifted = sum(bits << _SHIFT[each] for each in classes)
            if sign == "=":
                mode &= ~sum(7 << _SHIFT[each] for each in classes)
            mode = mode & ~shifted if sign == "-" else mode | shifted
        return mode

    @property
    def of_parents(self) -> int:
        """Permission bits of missing parent directories that are created for the copied files."""
        return int(self.text, 8) & 0o777 if _OCTAL.fullmatch(self.text) else 0o755


_OCTAL = re.compile(r"[0-7]{1,4}")
_CLAUSE = re.compile(r"([ugoa]*)([-+=])([rwxX]*)")
_BITS = {"r": 4, "w": 2, "x": 1}
_SHIFT = {"u": 6, "g": 3, "o": 0}
