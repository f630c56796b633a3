"""Unpacks each image once per node, verifies it, and keeps the unpacked files within a disk budget. Prefetches images.

The cache stores an image as one entry for each layer and the base, or as a single entry with a flat tree.

====================  ==========================================  ====================================
entry                 contents                                    made from
====================  ==========================================  ====================================
``<key>-tree``        ``rootfs/``, the image's files              a SIF, or a base and all its layers
``<digest>-layer``    ``rootfs/``, an overlay's upper directory   a layer's blob
====================  ==========================================  ====================================

Images share the entries of their common layers. When a source file is unpacked, it is verified against the digest in
its name. Existing entries are not verified again. An image outside of stores, such as a SIF that a campaign maps, is
identified by path, size and mtime.

Leased entries are never removed (:mod:`.index`). A process reserves space for all missing entries of an image at once.
A process reserves nothing while it waits, so two processes cannot deadlock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.apptainer_client import build
from megaflow_hpc.environments.images.cache.index import NOTHING, CacheClaim, CacheIndex, DiskUsage
from megaflow_hpc.environments.images.image_file import ImageFacts, ImageFiles, read_checked, stamp
from megaflow_hpc.environments.images.layered import layer_path
from megaflow_hpc.environments.images.layers.blob import BLOCK, LayerFacts
from megaflow_hpc.environments.images.layers.merging import put_over
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.errors import MegaflowError, SandboxError, SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host import child
from megaflow_hpc.host.files import remove_tree

TREE_EXTRA_INODES = 64
LAYER_EXTRA_INODES = 8
"""Number of inodes, with a margin, that a cache entry needs in addition to its files."""


@dataclass(frozen=True)
class CachedTree:
    """One entry of the cache. ``make(directory)`` writes it to ``directory/rootfs`` and returns the number of bytes
    read."""

    name: str
    source: str
    """Path of the file that the entry is made from."""
    size: DiskUsage
    make: Callable[[Path], int]


@dataclass(frozen=True)
class ImagePlan:
    """The trees that make up an image: ``artifacts``, topmost first, and optionally a ``directory`` below them."""

    image: str
    artifacts: tuple[CachedTree, ...]
    directory: str | None = None
    """Path of an already unpacked base, which is used in place. ``None`` if the base is among the artifacts."""

    @property
    def names(self) -> list[str]:
        return [artifact.name for artifact in self.artifacts]

    @property
    def sizes(self) -> dict[str, DiskUsage]:
        """Sizes of the image's cache entries, by name."""
        return {artifact.name: artifact.size for artifact in self.artifacts}


def plan(facts: ImageFacts, apptainer: str, *, flat: bool = False) -> ImagePlan:
    """Returns the trees that this node needs to run an image.

    Args:
        flat: Merge a layered image into one tree, for nodes that cannot stack layers with an overlay.
    """
    if not facts.is_layered:
        return ImagePlan(facts.path, (_sif_artifact(facts, apptainer),))
    if flat:
        return ImagePlan(facts.path, (_flat_artifact(facts, apptainer),))
    artifacts = [_layer_artifact(facts, layer) for layer in reversed(facts.layers)]
    if facts.base is not None and os.path.isdir(facts.base.path):
        return ImagePlan(facts.path, tuple(artifacts), facts.base.path)
    if facts.base is not None:
        artifacts.append(_sif_artifact(facts.base, apptainer))
    return ImagePlan(facts.path, tuple(artifacts))


def _sif_artifact(facts: ImageFacts, apptainer: str) -> CachedTree:
    size = DiskUsage(facts.unpacked_bytes, facts.inodes + TREE_EXTRA_INODES)
    return CachedTree(f"{facts.key}-tree", facts.path, size, lambda at: _unpack_sif(facts, at / "rootfs", apptainer))


def _layer_artifact(facts: ImageFacts, layer: LayerFacts) -> CachedTree:
    blob = str(layer_path(facts.path, layer.digest))
    size = DiskUsage(layer.unpacked_bytes, layer.inodes + LAYER_EXTRA_INODES)
    return CachedTree(f"{layer.digest[:40]}-layer", blob, size, lambda at: _unpack_layer(blob, layer, at / "rootfs"))


def _flat_artifact(facts: ImageFacts, apptainer: str) -> CachedTree:
    bytes_, inodes = facts.unpacked_bytes, facts.inodes
    if facts.base is not None and os.path.isdir(facts.base.path):
        base = _measure(facts.base.path)
        bytes_, inodes = bytes_ + base.bytes, inodes + base.inodes
    size = DiskUsage(bytes_, inodes + TREE_EXTRA_INODES)
    return CachedTree(f"{facts.key}-tree", facts.path, size, lambda at: _lay_out(facts, at, apptainer))


def _unpack_sif(facts: ImageFacts, target: Path, apptainer: str) -> int:
    before = stamp(facts.path)
    source = Path(facts.path)
    if facts.digest:  # verify and unpack a private copy, because the store's owner may change the file
        source = target.with_name("image.sif")
        read_checked(facts, source)
    try:
        if not sif.unpack(source, target, sif.system_partition(source)):
            build(apptainer, target, str(source), "--fix-perms", sandbox=True, timeout_s=1800)
    except SiteError as error:
        raise SandboxError(f"{facts.path}: cannot be unpacked: {error}") from error
    if facts.digest:
        source.unlink()
    elif stamp(facts.path) != before:
        raise SandboxError(f"{facts.path}: was replaced while it was being unpacked; try again")
    return facts.bytes


def _unpack_layer(blob: str, layer: LayerFacts, target: Path, *, marks: bool = False) -> int:
    try:
        os.stat(blob)
    except OSError as error:
        raise SandboxError(f"{blob}: the layer is missing ({error.strerror}); build or pull its image again") from None
    unpack(blob, layer, target, marks=marks)
    return layer.bytes


def _lay_out(facts: ImageFacts, directory: Path, apptainer: str) -> int:
    """Copies the base's files to ``directory`` and merges each layer into them, as an overlay would. Returns the number
    of bytes read."""
    root, above = directory / "rootfs", directory / "layer"
    count = 0
    if facts.base is None:
        root.mkdir()
    elif os.path.isdir(facts.base.path):
        _copy_tree(facts.base.path, root)
    else:
        count = _unpack_sif(facts.base, root, apptainer)
    mode = root.stat().st_mode & 0o7777 | 0o700
    for layer in facts.layers:
        count += _unpack_layer(str(layer_path(facts.path, layer.digest)), layer, above, marks=True)
        put_over(str(above), str(root))
        remove_tree(above)
        root.chmod(mode)
    return count


def _copy_tree(source: str, target: Path) -> None:
    # Inside a user namespace, root can read all files of the user, regardless of their modes.
    inside = runtime.unshare() if os.geteuid() else ()
    if why := child.cp(source, target, prefix=inside):
        raise SandboxError(f"{source}: cannot be copied: {why}")


def _measure(directory: str) -> DiskUsage:
    bytes_ = inodes = 0
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            status = os.lstat(os.path.join(parent, name))
            bytes_ += max(BLOCK, status.st_blocks * 512)
            inodes += 1
    return DiskUsage(bytes_, inodes)


POLL_INTERVAL_S = (0.005, 0.1)
"""First and longest pause in seconds between polls for free space or for another process."""


class ImageLease:
    """Right to use an image on this node until :meth:`release`.

    ``path`` is the bottom tree. ``layers`` are the trees above it, topmost first.
    """

    def __init__(
        self, path: str, layers: Sequence[str] = (), index: CacheIndex | None = None, entries: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.layers = tuple(layers)
        self._index, self._entries = index, entries

    def release(self) -> None:
        """Ends the lease. Idempotent."""
        index, self._index = self._index, None
        if index is not None:
            index.release(self._entries)


class ImageCache:
    """This process's access to the node's image cache. All processes of the user share the entries.

    Args:
        root: Private directory on local scratch.
        apptainer: Path of the Apptainer program.
        budget_bytes: Maximum total size of all entries. Default: ``MEGAFLOW_CACHE_GB`` (in 10^9 bytes), else 80 % of
            the free space on scratch.
        budget_inodes: Maximum number of inodes of all entries. Default: 80 % of the free inodes on scratch.
    """

    def __init__(
        self, root: Path, apptainer: str, *, budget_bytes: int | None = None, budget_inodes: int | None = None
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.apptainer = apptainer
        self.copied_bytes = 0
        """Number of bytes that this process has read from stores to make entries."""
        self._index = CacheIndex(root, budget_bytes, budget_inodes)
        self._files = ImageFiles()
        self._plans: dict[tuple[str, bool], tuple[ImageFacts, ImagePlan]] = {}
        self._claiming = threading.Lock()
        """Held by the thread that requests or waits for space, so that only one thread per process does."""
        self._guard = threading.Lock()

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(self, image: str, *, flat: bool = False, timeout_s: float = 1800.0) -> ImageLease:
        """Returns a lease on an image, unpacking the image first if necessary.

        Blocks while another process unpacks the image, or while all entries are in use and leave no space.

        Args:
            flat: Use the image as one tree, for nodes that cannot stack layers with an overlay.

        Raises:
            SandboxError: The image is missing, is too large, or does not match the digest in its name. Also raised if
                it was not unpacked within ``timeout_s`` seconds.
        """
        if os.path.isdir(image):
            return ImageLease(os.path.realpath(image))
        wanted = self._plan(image, flat)
        deadline = time.monotonic() + timeout_s
        try:
            while not self._index.use(wanted.names):
                if not self._index.unclaimed(wanted.names):
                    self._wait_for(wanted.names, deadline)
                elif self._make_missing(wanted, deadline):
                    break
        except TimeoutError as error:
            raise SandboxError(f"{image}: not staged within {timeout_s:g} s: {error}") from None
        return self._lease(wanted)

    def ready(self, image: str, *, flat: bool = False) -> ImageLease | None:
        """Returns a lease on an image if it is cached, else ``None``. Never waits."""
        if os.path.isdir(image):
            return ImageLease(os.path.realpath(image))
        wanted = self._plan(image, flat)
        return self._lease(wanted) if self._index.use(wanted.names, wait=False) else None

    def prefetch(
        self,
        images: Sequence[str],
        flat: Callable[[str], bool] = lambda image: False,
        until: Callable[[], bool] = lambda: False,
    ) -> int:
        """Unpacks ``images``, soonest needed first, until the cache is full. Blocks.

        Until the next call, these images are evicted after all other images. To protect images that are in use and will
        be
        needed again, list them first. Prefetching never evicts an image that a process uses or has listed.

        Args:
            flat: Returns whether an image is used as one tree on this node.
            until: Polled between images. The call returns once it is true.

        Returns:
            Number of leading ``images`` that are cached or that another process is unpacking.
        """
        plans = [self._plan(image, flat(image)) for image in images if not os.path.isdir(image)]
        self._index.want(list(dict.fromkeys(name for wanted in plans for name in wanted.names)))
        for number, wanted in enumerate(plans):
            if until():
                return number
            if not self._index.unclaimed(wanted.names):
                continue
            claim = self._index.claim(wanted.sizes, ahead=True)
            if claim is None:
                return number
            self._make(wanted, claim.own, ahead=True)
        return len(images)

    def facts(self, image: str) -> ImageFacts:
        """Returns the sizes and layers of an image. See :meth:`.ImageFiles.facts`."""
        return self._files.facts(image)

    # --- images commands ----------------------------------------------------------------------------------------

    @property
    def budget(self) -> DiskUsage:
        """Maximum total bytes and inodes of all entries in the cache."""
        return self._index.budget

    def list(self) -> list[dict[str, object]]:
        """Returns a row for each entry.

        The columns are ``name``, ``bytes``, ``inodes``, ``image`` (its source), ``ahead`` (prefetched), ``made_at`` and
        ``used_at`` (Unix seconds), and ``in_use``.
        """
        used = self._index.in_use()
        rows = []
        for entry in self._index.entries():
            row = asdict(entry)
            size = row.pop("size")
            rows.append({**row, **size, "in_use": entry.name in used})
        return rows

    def clear(self) -> int:
        """Removes every entry that is not in use. Returns the number of bytes freed."""
        freed = 0
        for entry in self._index.entries():
            if self._index.remove(entry.name):
                freed += entry.size.bytes
        return freed

    # --- making entries -----------------------------------------------------------------------------------------

    def _plan(self, image: str, flat: bool) -> ImagePlan:
        facts = self.facts(image)
        cached = self._plans.get((image, flat))
        if cached is None or cached[0] != facts:
            cached = self._plans[image, flat] = (facts, plan(facts, self.apptainer, flat=flat))
        return cached[1]

    def _lease(self, wanted: ImagePlan) -> ImageLease:
        trees = [str(self._index.path(artifact.name) / "rootfs") for artifact in wanted.artifacts]
        if wanted.directory is not None:
            trees.append(wanted.directory)
        return ImageLease(trees[-1], trees[:-1], self._index, wanted.names)

    def _make_missing(self, wanted: ImagePlan, deadline: float) -> bool:
        """Makes the missing entries of an image that no other thread or process is making.

        Returns:
            True if all entries exist and are marked as used. False if another process exited before it had made its
            entries. The caller must then try again.
        """
        self._check_size(wanted)
        claim = self._claim(wanted, deadline)
        if claim is None:
            return False
        try:
            self._make(wanted, claim.own, ahead=False)
            self._wait_for(claim.others, deadline)
            complete = self._index.has_all(wanted.names)
        except BaseException:
            self._index.release(wanted.names)
            raise
        if not complete:
            self._index.release(wanted.names)
        return complete

    def _check_size(self, wanted: ImagePlan) -> None:
        size = sum(wanted.sizes.values(), NOTHING)
        if not size <= self.budget:
            raise SandboxError(
                f"{wanted.image}: needs {size.bytes / 1e9:.3g} GB and {size.inodes} files on this node, the cache may "
                f"take {self.budget.bytes / 1e9:.3g} GB and {self.budget.inodes}; raise MEGAFLOW_CACHE_GB, "
                "or set MEGAFLOW_SCRATCH to a larger place"
            )

    def _claim(self, wanted: ImagePlan, deadline: float) -> CacheClaim | None:
        """Reserves space for an image's missing entries, after all processes and threads that started waiting earlier.

        Returns:
            The claim, or ``None`` if other threads or processes have made, or are making, all missing entries.

        Raises:
            TimeoutError: The deadline has passed.
        """
        full = f"everything in {self._index.root} is in use; raise MEGAFLOW_CACHE_GB, or run fewer slots"
        # One thread at a time, because the samples of a task request the same image simultaneously.
        while not self._claiming.acquire(timeout=POLL_INTERVAL_S[1]):
            if not self._index.unclaimed(wanted.names):
                return None
            if time.monotonic() >= deadline:
                raise TimeoutError(full)
        try:
            if not self._index.unclaimed(wanted.names):
                return None
            claim = self._index.claim(wanted.sizes)
            if claim is not None:
                return claim
            with self._index.waiting():
                for _ in _polls(deadline, full):
                    claim = self._index.claim(wanted.sizes, queued=True)
                    if claim is not None:
                        break
            return claim
        finally:
            self._claiming.release()

    def _make(self, wanted: ImagePlan, names: Sequence[str], *, ahead: bool) -> None:
        try:
            for artifact in wanted.artifacts:
                if artifact.name not in names:
                    continue
                count = self._index.put(artifact.name, artifact.size, artifact.source, artifact.make, ahead=ahead)
                with self._guard:
                    self.copied_bytes += count
        finally:
            self._index.give_up(names)

    def _wait_for(self, names: Sequence[str], deadline: float) -> None:
        """Waits until other threads or processes have made entries. They hold reserved space, so they cannot be waiting
        for this process."""
        missing = [name for name in names if not self._index.has(name)]
        for name, maker in self._index.makers(missing).items():
            for _ in _polls(deadline, "another process is still unpacking it"):
                if self._index.has(name) or not self._index.makes(maker, name):
                    break


def _polls(deadline: float, message: str) -> Iterator[None]:
    """Yields at increasing intervals. Raises :class:`TimeoutError` with ``message`` at the deadline."""
    pause = POLL_INTERVAL_S[0]
    while True:
        yield
        if time.monotonic() >= deadline:
            raise TimeoutError(message)
        time.sleep(pause)
        pause = min(2 * pause, POLL_INTERVAL_S[1])


class Prefetcher:
    """Unpacks upcoming images in a background thread, as long as there is space.

    Args:
        is_flat: Returns whether an image is used as one tree on this node.
    """

    def __init__(self, images: ImageCache, is_flat: Callable[[str], bool]) -> None:
        self._images = images
        self._is_flat = is_flat
        self._order: Sequence[str] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def order(self, images: Sequence[str]) -> None:
        """Sets the images that are in use or needed next, soonest first. Replaces the previous order."""
        with self._changed:
            self._order = list(images)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops the thread. Waits at most ``timeout_s`` seconds for the image that is being unpacked."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._order is not None)
                if self._closed:
                    return
                order, self._order = self._order or [], None
            try:
                self._images.prefetch(order, self._is_flat, until=lambda: self._closed or self._order is not None)
            except (MegaflowError, OSError) as error:
                # Only log it: a sandbox that needs the image reports the same error.
                print(f"staging ahead: {error}", file=sys.stderr, flush=True)
