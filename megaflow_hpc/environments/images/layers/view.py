"""What an image of several layers holds at a path, as an overlay of them would show it.

Each layer answers for itself (:class:`Layer`): a directory does (:class:`Tree`), or a listing of one that is not
unpacked (:mod:`.listing`). Nothing is mounted, and no link is ever followed by the kernel.
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
from megaflow_hpc.environments.images.layers.packing import Attributes, attributes_of

_MAX_LINKS = 40


@dataclass(frozen=True)
class ViewEntry:
    """What one layer says of a name."""

    kind: int
    """As ``stat.S_IFMT`` has it; 0 for what hides the name in the layers below."""
    attributes: Attributes
    target: str = ""
    """Of a symbolic link."""
    opaque: bool = False
    """A directory that hides what is below in it."""

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.kind == stat.S_IFDIR

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == stat.S_IFLNK


HIDDEN = ViewEntry(0, Attributes(0))


class Layer(Protocol):
    """One layer. ``path`` is relative to the root, empty for the root; its parents are directories of this layer."""

    def entry(self, path: str) -> ViewEntry | None:
        """Returns what the layer has at ``path``; ``None`` if it says nothing of it."""

    def names(self, path: str) -> Iterator[str]:
        """Yields the names in a directory, those that it hides included."""

    def read(self, path: str, limit: int) -> bytes:
        """Returns the first ``limit`` bytes of a regular file; empty if it cannot be read."""


class LayerView:
    """The layers of an image, the topmost first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def entry(self, path: str) -> ViewEntry | None:
        """Returns what is at ``path``, no link in it followed: ``None`` where a component is no directory."""
        found, _ = self._look([part for part in path.split("/") if part])
        return found

    def names(self, path: str) -> set[str]:
        """Returns the names in the directory at ``path``; empty where there is none."""
        parts = [part for part in path.split("/") if part]
        _, layers = self._look(parts)
        inside = "/".join(parts)
        shown: set[str] = set()
        hidden: set[str] = set()
        for layer in layers:
            gone = set()
            for name in layer.names(inside):
                entry = layer.entry(f"{inside}/{name}" if inside else name)
                if entry is None or entry.kind:
                    shown |= {name} - hidden
                else:
                    gone.add(name)
            hidden |= gone
        return shown

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Returns where ``path`` leads, relative to the root and without links; what is missing is taken as named.

        Args:
            follow: a link that is the last component too.

        Raises:
            OSError: links lead in a circle.
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
            found, _ = self._look([*names, name])
            if found is not None and found.is_link and (follow or waiting):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(f"{path}: too many links in one another")
                if found.target.startswith("/"):
                    names = []
                waiting.extendleft(reversed([part for part in found.target.split("/") if part]))
                continue
            names.append(name)
        return "/".join(names)

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Returns the first ``limit`` bytes of a regular file, links followed; empty where there is none."""
        place = self.resolve(path)
        found, layers = self._look(place.split("/"))
        return layers[0].read(place, limit) if found and found.kind == stat.S_IFREG else b""

    def _look(self, parts: Sequence[str]) -> tuple[ViewEntry | None, list[Layer]]:
        """What is at a path, and the layers that show through there: of a directory those that it is merged from."""
        layers = list(self.layers)
        found: ViewEntry | None = None
        for depth in range(len(parts) + 1):
            path = posixpath.join(*parts[:depth]) if depth else ""
            if depth and (found is None or not found.is_directory):
                return None, []
            merged: list[Layer] = []
            found = None
            for layer in layers:
                entry = layer.entry(path)
                if entry is None:
                    continue
                if found is None:
                    if not entry.kind:
                        break
                    found = entry
                elif not entry.is_directory:
                    break
                merged.append(layer)
                if not entry.is_directory or (entry.opaque and depth):
                    break
            layers = merged
        return found, layers


def _in_image(attributes: Attributes) -> Attributes:
    """The caller's own files are root's in an image."""
    uid = 0 if attributes.uid == os.geteuid() else attributes.uid
    return replace(attributes, uid=uid, gid=0 if attributes.gid == os.getegid() else attributes.gid)


class Tree:
    """A layer, or a whole image, that is a directory of this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def entry(self, path: str) -> ViewEntry | None:
        """See :class:`Layer`."""
        place = os.path.join(self.root, path) if path else self.root
        parent, _, name = path.rpartition("/")
        mark = os.path.join(self.root, parent, DELETED + name)
        try:
            found = os.lstat(place) if path else os.stat(place)
        except OSError:
            return HIDDEN if path and os.path.lexists(mark) else None
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFCHR and found.st_rdev == 0:
            return HIDDEN
        target = ""
        if kind == stat.S_IFLNK:
            with suppress(OSError):
                target = os.readlink(place)
        opaque = kind == stat.S_IFDIR and bool(path) and is_opaque(place)
        return ViewEntry(kind, _in_image(attributes_of(found)), target, opaque)

    def names(self, path: str) -> Iterator[str]:
        """See :class:`Layer`."""
        with suppress(OSError):
            for name in os.listdir(os.path.join(self.root, path)):
                yield name.removeprefix(DELETED)

    def read(self, path: str, limit: int) -> bytes:
        """See :class:`Layer`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(os.path.join(self.root, path), flags), "rb") as file:
            return file.read(limit)
        return b""
