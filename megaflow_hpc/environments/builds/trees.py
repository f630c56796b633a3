"""Unpacked bases and layers, and listings of their files, shared by all builds of one process.

::

    DIRECTORY/trees/<key>        a base, or a layer in the form of an overlay's upper directory
    DIRECTORY/partial/<n>        an unfinished tree

Files keep their owners from the image. When scratch runs out of space, unused trees are removed, least recently used
first. All trees are removed when the process exits, or by the janitor if it is killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import Base, LayeredImage
from megaflow_hpc.environments.images.layers import listing
from megaflow_hpc.environments.images.layers.view import Layer, LayerView, Tree
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import last_line
from megaflow_hpc.host.files import remove_tree

MIN_FREE_SHARE, MIN_FREE_BYTES = 0.25, 20 * 10**9
"""Unused trees are removed if the free space of the file system is below both limits."""
MAX_LISTED_INODES = 1_000_000
"""Maximum number of files in cached listings, which use about 200 MB."""
_BASE_INODES = 50_000
"""Estimated number of files in a base image."""

Make = Callable[[Path], None]
Hold = Callable[[str, Make], Path]
"""Returns the tree of a key. If it is missing, calls ``make(directory)``. Blocks while another thread is making it."""


class Trees:
    """The trees in one directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._users: dict[str, int] = {}
        """Key → number of builds that use the tree, in order of last use."""
        self._numbers = itertools.count()

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yields a function that returns trees. They are kept until the context exits."""
        held: list[str] = []

        def get(key: str, make: Make) -> Path:
            path = self._get(key, make)
            held.append(key)
            return path

        try:
            yield get
        finally:
            with self._guard:
                for key in held:
                    self._users[key] -= 1
            self._free_space()

    def _get(self, key: str, make: Make) -> Path:
        path = self._directory / "trees" / key
        with self._guard:
            self._users[key] = self._users.pop(key, 0) + 1
            lock = self._locks.setdefault(key, threading.Lock())
        try:
            with lock:
                if not os.path.lexists(path):
                    self._make(path, make)
        except BaseException:
            with self._guard:
                self._users[key] -= 1
            raise
        return path

    def _make(self, path: Path, make: Make) -> None:
        unfinished = self._directory / "partial" / str(next(self._numbers))
        for directory in (path.parent, unfinished.parent):
            directory.mkdir(mode=0o700, exist_ok=True)
        try:
            make(unfinished)
            os.rename(unfinished, path)
        finally:
            remove_tree(unfinished)

    def _free_space(self) -> None:
        while True:
            disk = shutil.disk_usage(self._directory)
            with self._guard:
                idle = next((key for key, users in self._users.items() if not users), None)
                if idle is None or disk.free > min(MIN_FREE_SHARE * disk.total, MIN_FREE_BYTES):
                    return
                del self._users[idle]
                removed = self._directory / "partial" / str(next(self._numbers))
                try:
                    os.rename(self._directory / "trees" / idle, removed)
                except FileNotFoundError:
                    continue
            remove_tree(removed, ignore_errors=True)


def unpack_sif(image: str, namespace: Sequence[str], target: Path) -> None:
    """Unpacks a SIF. Owners are preserved if the namespace maps their ids. Raises :class:`SiteError` on failure."""
    options = ["-n", "-q", "-no-xattrs", "-d", str(target)]
    done = sif.run_unsquashfs(sif.system_partition(image), [*options, image], namespace)
    if done.returncode not in (0, 2):  # 2: a device could not be created
        raise SiteError(f"{image}: {last_line(done.stderr.decode('utf-8', 'replace'))}")


class Listings:
    """Listings of bases and layers, cached for all builds. Thread-safe."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers
        self._cached: dict[str, tuple[Layer, int]] = {}
        """Digest or path → listing and number of files, in order of last use."""
        self._guard = threading.Lock()

    def view(self, image: LayeredImage) -> LayerView:
        """Returns a view of all files of an image. Lists layers that are not cached yet."""
        layers: list[Layer] = []
        for layer in reversed(image.layers):
            make = partial(listing.of_blob, self._layers.path(layer.digest))
            layers.append(self._get(layer.digest, make, layer.inodes))
        if image.base is not None:
            layers.append(self._base(image.base))
        return LayerView(layers)

    def _base(self, base: Base) -> Layer:
        if os.path.isdir(base.path):
            return Tree(base.path)
        return self._get(base.identity, partial(listing.of_sif, base.path), _BASE_INODES)

    def _get(self, key: str, make: Callable[[], Layer], inodes: int) -> Layer:
        with self._guard:
            cached = self._cached.pop(key, None)
            if cached is None:
                cached = (make(), inodes)
            self._cached[key] = cached
            while len(self._cached) > 1 and sum(size for _, size in self._cached.values()) > MAX_LISTED_INODES:
                del self._cached[next(iter(self._cached))]
        return cached[0]
