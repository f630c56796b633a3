"""Puts what a ``COPY`` or ``ADD`` brings into a layer, as Docker puts it into an image; nothing is started for it.

What is there already is told by a view of the layers below. Links in a target are followed within the image; within a
tree that is copied they are not. A directory that leads to what is copied is part of the layer with the attributes it
has below: the uppermost layer's are the ones seen.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaflow_hpc.environments.images.layers.listing import LayerListing
from megaflow_hpc.environments.images.layers.packing import Attributes, Packer, attributes_of
from megaflow_hpc.environments.images.layers.view import LayerView, ViewEntry
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.unpack import DEEPEST

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Placement:
    """How items are put in place."""

    target: str
    """Absolute path in the image."""
    into: bool = False
    """``target`` is a directory, also where it is not there yet."""
    owner: tuple[int, int] | None = None
    """``--chown``: of what is copied and of directories made for it."""
    mode: str = ""
    """``--chmod``: of files and directories (:class:`Mode`)."""
    own_owner: bool = False
    """Without ``--chown``, the owners that the items have; else root's."""
    replaces: bool = False
    """An archive's entries take the place of whatever is there."""
    known: Mapping[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """Device and inode of an item → mode, uid and gid as its archive has them, which ``--chmod`` does not change."""


class Placer:
    """Writes items into ``packer``, over what ``below`` shows."""

    def __init__(self, packer: Packer, below: LayerView) -> None:
        self._packer = packer
        self._made = LayerListing(lambda path, limit: b"")
        self._added: set[str] = set()
        self._view = LayerView([self._made, *below.layers])

    def place(self, items: Path, how: Placement) -> None:
        """Puts ``items/<number>/<name>`` in place: of a directory its contents, a file under its name in a directory.

        Raises:
            ConfigError: a directory is in the way of a file, or something else in that of a directory.
        """
        for item in sorted(items.glob("*/*"), key=lambda path: (_order(path.parent.name), path.name)):
            found = item.lstat()
            target = self._view.resolve(how.target)
            if stat.S_ISDIR(found.st_mode):
                directory = os.open(item, _DIRECTORY)
                try:
                    self._tree(directory, found, target, how, top=True)
                finally:
                    os.close(directory)
                continue
            known = self._view.entry(target)
            if how.into and known is not None and not known.is_directory:
                raise ConfigError(f"{how.target}: not a directory in the image")
            if how.into or (known is not None and known.is_directory):
                target = posixpath.join(target, item.name)
            parent = os.open(item.parent, _DIRECTORY)
            try:
                self._entry(parent, item.name, found, target, how)
            finally:
                os.close(parent)

    def directory(self, path: str, owner: tuple[int, int]) -> None:
        """Makes a directory and those that lead to it where they are missing, as ``WORKDIR`` does."""
        self._lead_to(self._view.resolve(path), Attributes(0o755, *owner))

    def _tree(self, directory: int, found: os.stat_result, target: str, how: Placement, *, top: bool) -> None:
        if target.count("/") > DEEPEST:
            raise ConfigError(f"{how.target}: more than {DEEPEST} directories in one another")
        attributes = self._attributes(found, how)
        known = self._view.entry(target)
        if known is not None and known.kind == stat.S_IFLNK and how.replaces and not top and not _archived(found, how):
            # The archive has no entry for it: what is below goes where the link leads.
            target = self._view.resolve(target)
            known = self._view.entry(target)
            if known is None or not known.is_directory:
                raise ConfigError(f"/{target}: not a directory in the image, and a link in the way leads there")
        elif known is not None and not known.is_directory and (top or not how.replaces):
            raise ConfigError(f"{target}: a directory cannot be copied over a file or a link")
        if top and known is not None:
            self._lead_to(target, attributes)
        elif target:
            mode = attributes.mode if (how.mode and not _archived(found, how)) or not top else 0o755
            self._lead_to(posixpath.dirname(target), self._parent_attributes(how, attributes, found))
            self._add(target, ViewEntry(stat.S_IFDIR, replace(attributes, mode=mode)))
        with os.scandir(directory) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        for entry in inside:
            status = entry.stat(follow_symlinks=False)
            place = posixpath.join(target, entry.name)
            if stat.S_ISDIR(status.st_mode):
                below = os.open(entry.name, _DIRECTORY, dir_fd=directory)
                try:
                    self._tree(below, status, place, how, top=False)
                finally:
                    os.close(below)
            else:
                self._entry(directory, entry.name, status, place, how)

    def _entry(self, parent: int, name: str, found: os.stat_result, target: str, how: Placement) -> None:
        attributes = self._attributes(found, how)
        known = self._view.entry(target)
        if known is not None and known.is_directory and not (how.replaces and not self._view.names(target)):
            raise ConfigError(f"{target}: a file cannot be copied over a directory")
        self._lead_to(posixpath.dirname(target), self._parent_attributes(how, attributes, found))
        if stat.S_ISLNK(found.st_mode):
            self._add(target, ViewEntry(stat.S_IFLNK, attributes, os.readlink(name, dir_fd=parent)))
        elif stat.S_ISREG(found.st_mode):
            file = os.open(name, _FILE, dir_fd=parent)
            try:
                self._made.add(target, ViewEntry(stat.S_IFREG, attributes))
                self._packer.file(target, file, attributes)
            finally:
                os.close(file)
        elif stat.S_ISFIFO(found.st_mode):
            self._made.add(target, ViewEntry(stat.S_IFIFO, attributes))
            self._packer.fifo(target, attributes)

    def _attributes(self, found: os.stat_result, how: Placement) -> Attributes:
        known = attributes_of(found)
        if archived := _archived(found, how):
            uid, gid = how.owner or archived[1:]
            return Attributes(archived[0], uid, gid, known.mtime)
        uid, gid = how.owner or ((known.uid, known.gid) if how.own_owner else (0, 0))
        mode = known.mode
        if how.mode and not stat.S_ISLNK(found.st_mode):
            mode = Mode(how.mode).of(mode, is_directory=stat.S_ISDIR(found.st_mode))
        return Attributes(mode, uid, gid, known.mtime)

    def _parent_attributes(self, how: Placement, item: Attributes, found: os.stat_result) -> Attributes:
        """Of a directory that has to be made; the time is the item's, so that the same copy gives the same layer."""
        uid, gid = how.owner or (0, 0)
        mode = Mode(how.mode).of_parents if how.mode and not _archived(found, how) else 0o755
        return Attributes(mode, uid, gid, item.mtime)

    def _lead_to(self, path: str, missing: Attributes) -> None:
        """Adds a directory and those that lead to it, with their own attributes or those of ``missing``."""
        parts = [part for part in path.split("/") if part]
        for depth in range(1, len(parts) + 1):
            place = "/".join(parts[:depth])
            if place in self._added:
                continue
            known = self._view.entry(place)
            if known is not None and not known.is_directory:
                raise ConfigError(f"{place}: not a directory in the image")
            self._add(place, known or ViewEntry(stat.S_IFDIR, missing))

    def _add(self, path: str, entry: ViewEntry) -> None:
        self._added.add(path)
        self._made.add(path, replace(entry, opaque=False))
        if entry.is_directory:
            self._packer.directory(path, entry.attributes)
        else:
            self._packer.link(path, entry.target, entry.attributes)


def _archived(found: os.stat_result, how: Placement) -> tuple[int, int, int] | None:
    return how.known.get((found.st_dev, found.st_ino))


def _order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 30, name)


@dataclass(frozen=True)
class Mode:
    """A ``--chmod``: an octal number, or clauses such as ``u=rwX,go=rX``."""

    text: str

    def __post_init__(self) -> None:
        if not _OCTAL.fullmatch(self.text) and not all(_CLAUSE.fullmatch(each) for each in self.text.split(",")):
            raise ConfigError(
                f"--chmod={self.text}: expected an octal number such as 755, or clauses such as u=rwX,go=rX"
            )

    def of(self, mode: int, *, is_directory: bool) -> int:
        """Returns the permission bits of a file or a directory that has ``mode``."""
        if _OCTAL.fullmatch(self.text):
            return int(self.text, 8)
        for clause in self.text.split(","):
            who, sign, letters = _CLAUSE.fullmatch(clause).groups()  # type: ignore[union-attr]
            bits = sum(_BITS[letter] for letter in set(letters) - {"X"})
            bits |= 1 if "X" in letters and (is_directory or mode & 0o111) else 0
            places = [_SHIFT[each] for each in set("ugo" if who in ("", "a") else who.replace("a", "ugo"))]
            wanted = sum(bits << place for place in places)
            if sign == "=":
                mode &= ~sum(7 << place for place in places)
            mode = mode & ~wanted if sign == "-" else mode | wanted
        return mode

    @property
    def of_parents(self) -> int:
        """Permission bits of directories made for what is copied."""
        return int(self.text, 8) & 0o777 if _OCTAL.fullmatch(self.text) else 0o755


_OCTAL = re.compile(r"[0-7]{1,4}")
_CLAUSE = re.compile(r"([ugoa]*)([-+=])([rwxX]*)")
_BITS = {"r": 4, "w": 2, "x": 1}
_SHIFT = {"u": 6, "g": 3, "o": 0}
