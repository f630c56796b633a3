"""Shows the merged files of a multi-layer image, as an overlay would.

Each layer implements :class:`Layer`: a directory (:class:`Tree`), or a listing of a packed layer (:mod:`.listing`).
Nothing is mounted, and links are resolved here, never by the kernel.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from megaflow_hpc.environments.images.layers.merging import DELETED, is_opaque
from megaflow_hpc.environments.images.layers.packing import OPEN_FILE, Attributes, attributes_of

_MAX_LINKS = 40


@dataclass(frozen=True)
class ViewEntry:
    """One layer's entry for a path."""

    kind: int
    """File type as returned by ``stat.S_IFMT``. 0 hides the path in lower layers."""
    attributes: Attributes
    target: str = ""
    """Target of a symbolic link."""
    opaque: bool = False
    """Whether a directory hides the same directory in lower layers."""

    @property
    def is_directory(self) -> bool:
        return self.kind == stat.S_IFDIR

    @property
    def is_link(self) -> bool:
        return self.kind == stat.S_IFLNK


HIDDEN = ViewEntry(0, Attributes(0))


class Layer(Protocol):
    """One layer. Each ``path`` is relative to the root (empty for the root), and its parents are directories in this
    layer."""

    def entry(self, path: str) -> ViewEntry | None:
        """Returns the layer's entry for ``path``, or ``None``."""

    def names(self, path: str) -> Iterator[str]:
        """Yields the names in a directory, including names that this layer marks as deleted."""

    def read(self, path: str, limit: int) -> bytes:
        """Returns up to ``limit`` bytes of a regular file, or no bytes if it cannot be read."""


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

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Resolves the links in ``path``. The result is relative to the root. Missing components are kept.

        Args:
            follow: Also resolve a link in the last component.

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
            if entry is None or not entry.is_link or not (follow or waiting):
                names.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(f"{path}: too many links in one another")
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
        """Returns the entry at a path and the layers that contribute to it, several for a merged directory."""
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
        """See :class:`Layer`."""
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
        """See :class:`Layer`."""
        with suppress(OSError):
            for name in os.listdir(os.path.join(self.root, path)):
                yield name.removeprefix(DELETED)

    def read(self, path: str, limit: int) -> bytes:
        """See :class:`Layer`."""
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
