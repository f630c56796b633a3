"""Workspace of a build: its sandboxes and user namespace, and the trees and listings that all builds share.

::

    DIRECTORY/trees/<key>        a base, or a layer in the form of an overlay's upper directory
    DIRECTORY/partial/<n>        an unfinished tree

Files keep their owners from the image. When scratch space runs low, unused trees are removed, least recently used
first. All trees are removed when the process exits, or by the janitor if it is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from megaflow_hpc.environments.builds.script import KEEP, STEPS_DIR
from megaflow_hpc.environments.builds.tree import facts_of, run_tree
from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layered import Base, LayeredImage
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.environments.images.layers.view import Layer, LayerView, Tree, of_blob, of_sif
from megaflow_hpc.environments.images.store import LayerStore
from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.scratch import workplace
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import last_line, unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.subordinate import all_ids, namespace

MIN_FREE_SHARE, MIN_FREE_BYTES = 0.25, 20 * 10**9
"""Unused trees are removed while the file system's free space is below both limits."""
MAX_LISTED_INODES = 1_000_000
"""Maximum number of files in all cached listings. This many files use about 200 MB of memory."""
_BASE_INODES = 50_000
"""Estimated number of files in a base image."""

Make = Callable[[Path], None]
Hold = Callable[[str, Make], Path]
"""Function that returns the tree for a key. It calls ``make(directory)`` to create a missing tree, and blocks while
another thread creates the tree."""


class Trees:
    """Unpacked images and layers in one directory, shared by all builds. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._users: dict[str, int] = {}
        """Maps each key to the number of builds that use its tree. Ordered by last use."""
        self._numbers = itertools.count()

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yields a :data:`Hold` function. The trees it returns are kept until the context exits."""
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
    """Unpacks a SIF to ``target``. Owners are preserved if ``namespace`` maps their ids. Raises :class:`SiteError` on
    failure."""
    options = ["-n", "-q", "-no-xattrs", "-d", str(target)]
    done = sif.run_unsquashfs(sif.system_partition(image), [*options, image], namespace)
    if done.returncode not in (0, 2):  # 2: a device could not be created
        raise SiteError(f"{image}: {last_line(done.stderr.decode('utf-8', 'replace'))}")


class Listings:
    """Cached file listings of bases and layers, shared by all builds. Thread-safe."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers
        self._cached: dict[str, tuple[Layer, int]] = {}
        """Maps a digest or path to a listing and its number of files. Ordered by last use."""
        self._guard = threading.Lock()

    def view(self, image: LayeredImage) -> LayerView:
        """Returns a view of all files of an image. Reads the listings that are not cached yet."""
        layers: list[Layer] = []
        for layer in reversed(image.layers):
            make = partial(of_blob, self._layers.path(layer.digest))
            layers.append(self._get(layer.digest, make, layer.inodes))
        if image.base is not None:
            layers.append(self._base(image.base))
        return LayerView(layers)

    def _base(self, base: Base) -> Layer:
        if os.path.isdir(base.path):
            return Tree(base.path)
        return self._get(base.identity, partial(of_sif, base.path), _BASE_INODES)

    def _get(self, key: str, make: Callable[[], Layer], inodes: int) -> Layer:
        with self._guard:
            cached = self._cached.pop(key, None)
            if cached is None:
                cached = (make(), inodes)
            self._cached[key] = cached
            while len(self._cached) > 1 and sum(size for _, size in self._cached.values()) > MAX_LISTED_INODES:
                del self._cached[next(iter(self._cached))]
        return cached[0]


_ROOT = SandboxSpec("", nested=True)
"""Spec for mounting and reading layers as the namespace's uid 0."""
_RESOLVER = "/etc/resolv.conf"
_HOSTS = "etc/hosts"


class BuildWorkspace:
    """Workspace of one build. Use it as an async context manager and create its contents with :meth:`open`."""

    def __init__(self, layers: LayerStore, trees: Trees, scratch: str | os.PathLike[str] | None) -> None:
        self._layers = layers
        self._trees = trees
        self._scratch = scratch
        self._stack = AsyncExitStack()
        self._provider: ApptainerProvider | None = None

    async def __aenter__(self) -> BuildWorkspace:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self) -> None:
        """Creates the provider, namespace and directories. Later calls do nothing."""
        if self._provider is not None:
            return
        provider = self._provider = await self._stack.enter_async_context(ApptainerProvider(self._scratch))
        self._work = workplace(provider.scratch, "w")
        self._stack.push_async_callback(asyncio.to_thread, remove_tree, self._work)
        for name in ("items", "uppers"):
            (self._work / name).mkdir()
        # Without other uids, fakeroot only simulates them, so a step must not really change its uid.
        if not self.pretends_owners and not helper_python.why_not():
            interpreter = await asyncio.to_thread(helper_python.prepare, provider.scratch)
            await asyncio.to_thread(helper_python.link_into, interpreter, self.items)
        self._hold: Hold = self._stack.enter_context(self._trees.holding())
        self.namespace: Sequence[str] = self._stack.enter_context(namespace())
        scratch = str(provider.scratch)
        self._copies = os.geteuid() == 0 or provider.images.writes == "copy" or not overlay.works(scratch)
        self._number = 0
        self._merged: dict[Path, list[Path]] = {}
        """Maps each merged tree to the trees it contains, lowest first."""

    @property
    def items(self) -> Path:
        """Directory mounted in the steps' sandboxes as :data:`.script.STEPS_DIR`."""
        return self._work / "items"

    @property
    def pretends_owners(self) -> bool:
        """True if uid 0 is the only mapped uid. The host's fakeroot, if installed, then simulates other owners of
        files."""
        return all_ids() == unshare()

    def new_path(self, kind: str) -> Path:
        """Returns an unused path for a file or directory, which is removed at the end of the build."""
        self._number += 1
        return self._work / "uppers" / f"{kind}{self._number}"

    async def trees(self, image: LayeredImage) -> list[Path]:
        """Returns the unpacked trees of an image's layers and base, topmost first. Unpacks missing trees."""
        trees = [await asyncio.to_thread(self._layer, layer) for layer in reversed(image.layers)]
        if image.base is not None:
            path, key = image.base.path, hashlib.sha256(os.fsencode(image.base.identity)).hexdigest()
            make = partial(_link, path) if os.path.isdir(path) else partial(unpack_sif, path, self.namespace)
            trees.append(await asyncio.to_thread(self._hold, key, make))
        return trees

    def _layer(self, layer: LayerFacts) -> Path:
        blob = self._layers.path(layer.digest)
        return self._hold(layer.digest, lambda target: unpack(blob, layer, target, self.namespace))

    async def start(self, image: LayeredImage, spec: SandboxSpec, view: LayerView) -> ApptainerSandbox:
        """Starts a sandbox over an image's trees. Provides ``/dev/full`` and an ``/etc/hosts``, as Docker does.

        Args:
            view: Merged view of the image's files.
        """
        assert self._provider is not None
        lowers = await self._lowers(image)
        binds = [f"{self.items}:{STEPS_DIR}:ro", "/dev/full:/dev/full", *spec.binds]
        if spec.network == "host" and not os.path.lexists(lowers[-1] / _RESOLVER.lstrip("/")):
            binds += [f"{_RESOLVER}:{_RESOLVER}:ro"]  # If the image has the file, Apptainer mounts it.
        hosts = self._hosts(view)
        if hosts is not None and self._copies:
            binds += [f"{hosts}/{_HOSTS}:/{_HOSTS}:ro"]
        elif hosts is not None:  # Use a lower layer, because a bind's mount point would end up in the step's layer.
            lowers = [hosts, *lowers]
        spec = replace(spec, image=str(lowers[-1]), binds=tuple(binds), fakeroot=self.pretends_owners)
        rootfs = Rootfs(
            str(lowers[-1]),
            lambda: None,
            copies=self._copies,
            namespace=self.namespace,
            layers=tuple(map(str, lowers[:-1])),
            settings=image.settings + KEEP,
        )
        return await self._provider.start(spec, rootfs=rootfs)

    def _hosts(self, view: LayerView) -> Path | None:
        """Creates a tree with an ``/etc/hosts``. Returns ``None`` if root does not own the image's ``/etc``, or if its
        ``/etc/hosts`` is not a regular file."""
        etc, hosts = view.entry("etc"), view.entry(_HOSTS)
        if etc is None or not etc.is_directory or etc.attributes.uid or etc.attributes.gid:
            return None
        if hosts is not None and not stat.S_ISREG(hosts.kind):
            return None
        tree = self.new_path("points")
        file = tree / _HOSTS
        file.parent.mkdir(parents=True)
        file.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
        file.chmod(0o644)
        tree.chmod(0o755)
        file.parent.chmod(etc.attributes.mode | 0o700)
        os.utime(file.parent, (etc.attributes.mtime, etc.attributes.mtime))
        return tree

    async def _lowers(self, image: LayeredImage, top: Sequence[Path] = ()) -> list[Path]:
        """Returns the trees of an image, topmost first. Merges them into a single tree if an overlay cannot stack
        them."""
        lowers = [*top, *await self.trees(image)]
        fits = len(lowers) < overlay.MAX_LOWERS  # The tree with /etc/hosts adds one.
        if len(lowers) == 1 or (fits and not self._copies):
            return lowers
        # A step's layer is applied to the tree that the step ran on, so a chain is merged only once, not once per step.
        wanted = lowers[::-1]
        tree, merged = None, list[Path]()
        for candidate, parts in self._merged.items():
            if parts == wanted[: len(parts)] and len(parts) > len(merged):
                tree, merged = candidate, parts
        if tree is None:
            tree = self.new_path("laid")
        else:
            del self._merged[tree]
        if merged != wanted:
            await run_tree(self.namespace, "lay", str(tree), *map(str, wanted[len(merged) :]))
        self._merged[tree] = wanted
        return [tree]

    async def layer_of(self, sandbox: ApptainerSandbox, file: Path) -> tuple[LayerFacts, bool]:
        """Stops a sandbox and writes its changes to ``file`` as a layer. Returns the layer's facts and whether the step
        changed ``/etc/hosts``."""
        upper = self.new_path("upper")
        await sandbox.finish(upper)
        marks = "marks" if self._copies else ""
        facts, *changed = (await run_tree(self.namespace, "layer", str(file), str(upper), marks)).splitlines()
        return facts_of(facts), bool(changed)

    async def copy_out(self, image: LayeredImage, sources: Sequence[str], target: Path) -> None:
        """Copies ``sources`` from an image to ``target/<number>/<name>``, preserving owners.

        Raises:
            SiteError: A source is missing or cannot be copied.
        """
        async with self.merged(image) as (prefix, root):
            await run_tree(prefix, "copy", root, str(target), *sources)

    @asynccontextmanager
    async def merged(self, image: LayeredImage, top: Sequence[Path] = ()) -> AsyncIterator[tuple[Sequence[str], str]]:
        """Yields an argv prefix and a directory that shows all files of the image to programs run with the prefix.

        The programs must not change the files.

        Args:
            top: Additional trees to put on top of the image's trees.
        """
        lowers = [str(path) for path in await self._lowers(image, top)]
        if len(lowers) == 1:
            yield self.namespace, lowers[0]
            return
        layer = self.new_path("view")
        layer.mkdir()
        mounted = overlay.prepare(lowers, str(layer), f"{layer}.root")
        if mounted is None:
            raise SiteError(f"{layer}: no overlay can be mounted there; set TMPDIR to another local directory")
        yield overlay.argv_prefix(mounted, _ROOT, self.namespace), mounted.merged

    async def placed(self, image: LayeredImage, items: Path, how: Mapping[str, object], file: Path) -> LayerFacts:
        """Creates ``file``, a layer on top of ``image`` that contains items copied from another image."""
        request = {"how": how, "layers": [str(path) for path in await self.trees(image)]}
        return facts_of(await run_tree(self.namespace, "place", str(file), str(items), request=request))


def _link(path: str, target: Path) -> None:
    target.symlink_to(path)
