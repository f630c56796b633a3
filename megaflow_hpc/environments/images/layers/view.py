"""Provides a merged view of a layered image's files, as an overlay would show them.

Each layer implements :class:`Layer`: a directory (:class:`Tree`), or a listing of a packed layer
(:class:`LayerListing`, about 200 bytes of memory per file). Nothing is mounted or unpacked. Links are resolved in
Python, never by the kernel.
"""

from __future__ import annotations

import calendar
import os
import posixpath
import re
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, Union

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layers.blob import OPEN_FILE, Attributes, LayerStream, attributes_of
from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, is_opaque
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember, plain

_MAX_LINKS = 40


@dataclass(frozen=True)
class ViewEntry:
    """One layer's entry at a path."""

    kind: int
    """File type as returned by ``stat.S_IFMT``. An entry of type 0 hides the path in lower layers."""
    attributes: Attributes
    target: str = ""
    """Target of a symbolic link."""
    opaque: bool = False
    """True if a directory hides the same directory in lower layers."""

    @property
    def is_directory(self) -> bool:
        return self.kind == stat.S_IFDIR

    @property
    def is_link(self) -> bool:
        return self.kind == stat.S_IFLNK


HIDDEN = ViewEntry(0, Attributes(0))


class Layer(Protocol):
    """One layer of an image.

    Paths are relative to the root, which is the empty path. Callers ensure that a path's parents are directories in
    this layer.
    """

    def entry(self, path: str) -> ViewEntry | None:
        """Returns the layer's entry at ``path``, or ``None`` if it has none."""

    def names(self, path: str) -> Iterator[str]:
        """Yields the names in a directory, including names for which this layer has a whiteout."""

    def read(self, path: str, limit: int) -> bytes:
        """Returns up to ``limit`` bytes of a regular file. Returns ``b""`` if it cannot be read."""


class LayerView:
    """Merged view of an image's layers, given topmost first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def entry(self, path: str) -> ViewEntry | None:
        """Returns the entry at ``path``, or ``None`` if missing. Does not follow links."""
        entry, _ = self._look_up([part for part in path.split("/") if part])
        return entry

    def names(self, path: str) -> set[str]:
        """Returns the names in a directory, or an empty set if ``path`` is not a directory."""
        parts = [part for part in path.split("/") if part]
        _, layers = self._look_up(parts)
        directory = "/".join(parts)
        shown: set[str] = set()
        hidden: set[str] = set()
        for layer in layers:
            hidden_here = set()
            for name in layer.names(directory):
                entry = layer.entry(posixpath.join(directory, name))
                if entry is not None and not entry.kind:
                    hidden_here.add(name)
                elif name not in hidden:
                    shown.add(name)
            hidden |= hidden_here
        return shown

    def resolve(self, path: str) -> str:
        """Resolves the links in ``path`` to a path relative to the root. Missing components are kept.

        Raises:
            OSError: There are too many levels of links.
        """
        waiting = deque(part for part in path.split("/") if part)
        names: list[str] = []
        links = 0
        while waiting:
            name = waiting.popleft()
            if name == ".":
                continue
            if name == "..":
                names = names[:-1]
                continue
            entry, _ = self._look_up([*names, name])
            if entry is None or not entry.is_link:
                names.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(f"{path}: too many levels of links")
            if entry.target.startswith("/"):
                names = []
            waiting.extendleft(reversed([part for part in entry.target.split("/") if part]))
        return "/".join(names)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Returns up to ``limit`` bytes of a regular file, or no bytes if it is missing. Follows links."""
        resolved = self.resolve(path)
        entry, layers = self._look_up(resolved.split("/"))
        return layers[0].read(resolved, limit) if entry and entry.kind == stat.S_IFREG else b""

    def _look_up(self, parts: Sequence[str]) -> tuple[ViewEntry | None, list[Layer]]:
        """Returns the entry at a path and the layers that contribute to it. Several layers contribute to a merged
        directory."""
        layers = list(self.layers)
        visible: ViewEntry | None = None
        for depth in range(len(parts) + 1):
            if depth and (visible is None or not visible.is_directory):
                return None, []
            path = "/".join(parts[:depth])
            visible = None
            merged: list[Layer] = []
            for layer in layers:
                entry = layer.entry(path)
                if entry is None:
                    continue
                if visible is None and entry.kind:
                    visible = entry
                elif not entry.is_directory:  # The path is hidden below, or the merge ends here.
                    break
                merged.append(layer)
                if not entry.is_directory or (entry.opaque and depth):
                    break
            layers = merged
        return visible, layers


class Tree:
    """A layer, or a whole image, unpacked in a local directory."""

    def __init__(self, root: str) -> None:
        self.root = root

    def entry(self, path: str) -> ViewEntry | None:
        file = os.path.join(self.root, path) if path else self.root
        try:
            status = os.lstat(file) if path else os.stat(file)
        except OSError:
            parent, _, name = path.rpartition("/")
            mark = os.path.join(self.root, parent, DELETED + name)
            return HIDDEN if path and os.path.lexists(mark) else None
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            return HIDDEN
        target = ""
        if kind == stat.S_IFLNK:
            with suppress(OSError):
                target = os.readlink(file)
        opaque = kind == stat.S_IFDIR and bool(path) and is_opaque(file)
        return ViewEntry(kind, _in_image(attributes_of(status)), target, opaque)

    def names(self, path: str) -> Iterator[str]:
        with suppress(OSError):
            for name in os.listdir(os.path.join(self.root, path)):
                yield name.removeprefix(DELETED)

    def read(self, path: str, limit: int) -> bytes:
        return read_regular(os.path.join(self.root, path), limit)


def _in_image(attributes: Attributes) -> Attributes:
    """Returns the attributes as seen inside the image, where root owns the caller's files."""
    uid = 0 if attributes.uid == os.geteuid() else attributes.uid
    gid = 0 if attributes.gid == os.getegid() else attributes.gid
    return replace(attributes, uid=uid, gid=gid)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Returns up to ``limit`` bytes of a file, or no bytes if it is a link or cannot be read."""
    with suppress(OSError), open(os.open(path, OPEN_FILE), "rb") as file:
        return file.read(limit)
    return b""


_Node: TypeAlias = dict[str, Union[ViewEntry, "_Node"]]
_SELF = ""
"""Key under which a directory's node stores its own entry."""
_KINDS = {"-": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK}
_MEMBERS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
_IMPLICIT = ViewEntry(stat.S_IFDIR, Attributes(0o755))
"""Entry for a directory that the layer contains only as the parent of other entries."""
_LINE = re.compile(r"(\S)(\S{9}) (\d+)/(\d+) +(?:\d+|\d+, *\d+) (\S+ \S+) squashfs-root(.*)", re.DOTALL)


class LayerListing:
    """A layer's entries, held in memory as a tree. Implements :class:`Layer`.

    Args:
        reader: Called as ``reader(path, limit)``. Returns up to ``limit`` bytes of a file in the layer.
    """

    def __init__(self, reader: Callable[[str, int], bytes]) -> None:
        self._root: _Node = {_SELF: _IMPLICIT}
        self._reader = reader

    def add(self, path: str, entry: ViewEntry) -> None:
        """Adds an entry. Missing parents are added as directories."""
        node = self._root
        parts = [part for part in path.split("/") if part]
        for part in parts[:-1]:
            child = node.get(part)
            if not isinstance(child, dict):
                child = node[part] = {_SELF: _IMPLICIT}
            node = child
        if not parts:
            node[_SELF] = entry
        elif entry.is_directory:
            previous = node.get(parts[-1])
            content = previous if isinstance(previous, dict) else {}
            node[parts[-1]] = content | {_SELF: entry}
        else:
            node[parts[-1]] = entry

    def entry(self, path: str) -> ViewEntry | None:
        node = self._at(path)
        if isinstance(node, dict):
            own = node[_SELF]
            assert isinstance(own, ViewEntry)
            return own
        return node

    def names(self, path: str) -> Iterator[str]:
        node = self._at(path)
        if isinstance(node, dict):
            yield from (name for name in node if name != _SELF)

    def read(self, path: str, limit: int) -> bytes:
        return self._reader(path, limit)

    def _at(self, path: str) -> ViewEntry | _Node | None:
        node: ViewEntry | _Node | None = self._root
        for part in path.split("/") if path else ():
            if not isinstance(node, dict):
                return None
            node = node.get(part)
        return node


def of_blob(blob: str | os.PathLike[str]) -> LayerListing:
    """Lists the files of a layer blob. Raises :class:`SandboxError` if it is not a layer."""
    listing = LayerListing(lambda path, limit: _read_blob(blob, path, limit))
    opaque = []
    with open(blob, "rb", buffering=0) as file:
        try:
            for member in LayerStream.of_file(file).members():
                parts = [os.fsdecode(part) for part in plain(member.name)]
                path = "/".join(parts)
                attributes = Attributes(member.mode, member.uid, member.gid, member.mtime)
                if parts and parts[-1] == OPAQUE_MARK:
                    opaque.append("/".join(parts[:-1]))
                elif parts and parts[-1].startswith(DELETED):
                    listing.add("/".join([*parts[:-1], parts[-1].removeprefix(DELETED)]), HIDDEN)
                elif member.kind == "hardlink":
                    target = listing.entry("/".join(os.fsdecode(part) for part in plain(member.target)))
                    listing.add(path, target or ViewEntry(stat.S_IFREG, attributes))
                elif member.kind in _MEMBERS:
                    listing.add(path, ViewEntry(_MEMBERS[member.kind], attributes, os.fsdecode(member.target)))
        except RefusedMember as error:
            raise SandboxError(f"{os.fspath(blob)}: not a layer of an image: {error}") from error
    for path in opaque:
        directory = listing.entry(path) or _IMPLICIT
        listing.add(path, ViewEntry(stat.S_IFDIR, directory.attributes, opaque=True))
    return listing


def _read_blob(blob: str | os.PathLike[str], path: str, limit: int) -> bytes:
    with suppress(OSError, RefusedMember), open(blob, "rb", buffering=0) as file:
        reader = LayerStream.of_file(file).members()
        for member in reader:
            if member.kind == "file" and b"/".join(plain(member.name)) == os.fsencode(path):
                return b"".join(reader.content())[:limit] if member.size <= limit else b""
    return b""


def of_sif(image: str) -> LayerListing:
    """Lists a SIF's files with ``unsquashfs``.

    Raises:
        SandboxError: The file is not a SIF or cannot be listed.
        SiteError: ``unsquashfs`` is missing.
    """
    partition = sif.system_partition(image)
    listing = LayerListing(lambda path, limit: _read_sif(image, partition, path, limit))
    done = sif.run_unsquashfs(partition, ["-lln", os.path.abspath(image)])
    if done.returncode:
        raise SandboxError(f"{image}: its files cannot be listed: {done.stderr.decode('utf-8', 'replace')[-300:]}")
    for line in os.fsdecode(done.stdout).split("\n"):
        if match := _LINE.fullmatch(line):
            letter, bits, uid, gid, moment, path = match.groups()
            target = ""
            if letter == "l":
                path, _, target = path.partition(" -> ")
            kind = _KINDS.get(letter, stat.S_IFREG)
            listing.add(path, ViewEntry(kind, Attributes(_mode(bits), int(uid), int(gid), _seconds(moment)), target))
    return listing


def _seconds(moment: str) -> int:
    """Parses a UTC time without seconds to Unix seconds. Returns 0 if it is invalid."""
    try:
        return max(0, calendar.timegm(time.strptime(moment, "%Y-%m-%d %H:%M")))
    except ValueError:
        return 0


def _mode(bits: str) -> int:
    mode = 0
    for number, letter in enumerate(bits):
        if letter in "rwxst":
            mode |= 0o400 >> number
    for number, letters, bit in ((2, "sS", stat.S_ISUID), (5, "sS", stat.S_ISGID), (8, "tT", stat.S_ISVTX)):
        if bits[number] in letters:
            mode |= bit
    return mode


def _read_sif(image: str, partition: sif.SifPartition, path: str, limit: int) -> bytes:
    directory = Path(tempfile.mkdtemp(prefix="megaflow-"))
    try:
        options = ["-n", "-q", "-no-xattrs", "-d", str(directory / "out")]
        sif.run_unsquashfs(partition, [*options, os.path.abspath(image), path])
        return read_regular(directory / "out" / path, limit)
    finally:
        remove_tree(directory, ignore_errors=True)
