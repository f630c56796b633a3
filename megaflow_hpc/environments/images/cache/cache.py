"""Caches images on this node: each unpacked once, verified, within a budget, and prefetched in the order of use.

An image consists of one or more copies (:mod:`.artifacts`). While a copy is made, its source is verified against the
digest in the source's name. An existing copy is not read again. An image outside of stores, such as a SIF that a
campaign maps, is identified by path, size and mtime.

Copies in use are leased and never removed (:mod:`.index`). A process reserves space for all missing copies of an image
in one step. While waiting it holds none of them, so two processes cannot deadlock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megaflow_hpc.environments.images.cache.artifacts import ImagePlan, plan
from megaflow_hpc.environments.images.cache.index import NOTHING, CacheClaim, CacheIndex, DiskUsage
from megaflow_hpc.environments.images.image_file import ImageFacts, ImageFiles
from megaflow_hpc.errors import MegaflowError, SandboxError

POLL_INTERVAL_S = (0.005, 0.1)
"""First and longest pause between two polls for space or for another process."""


class ImageLease:
    """Right to use an image on this node until :meth:`release`.

    ``path`` is the bottom tree. ``layers`` are the trees above it, topmost first.
    """

    def __init__(
        self, path: str, layers: Sequence[str] = (), index: CacheIndex | None = None, copies: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.layers = tuple(layers)
        self._index, self._copies = index, copies

    def release(self) -> None:
        """Ends the lease. Idempotent."""
        index, self._index = self._index, None
        if index is not None:
            index.release(self._copies)


class ImageCache:
    """This node's images, as used by one process. All processes of the user share the copies.

    Args:
        root: Private directory on local scratch.
        budget_bytes: Maximum total size of all copies. Default: ``MEGAFLOW_CACHE_GB`` (in 10^9 bytes), else 80 % of the
            free space on scratch.
        budget_inodes: Maximum number of inodes of all copies. Default: 80 % of the free inodes on scratch.
    """

    def __init__(
        self, root: Path, apptainer: str, *, budget_bytes: int | None = None, budget_inodes: int | None = None
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.apptainer = apptainer
        self.copied_bytes = 0
        """Bytes that this process has read from stores to make copies."""
        self._index = CacheIndex(root, budget_bytes, budget_inodes)
        self._files = ImageFiles()
        self._plans: dict[tuple[str, bool], tuple[ImageFacts, ImagePlan]] = {}
        self._claiming = threading.Lock()
        """Held by the thread of this process that is requesting or waiting for space."""
        self._guard = threading.Lock()

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(self, image: str, *, flat: bool = False, timeout_s: float = 1800.0) -> ImageLease:
        """Returns a lease on an image, unpacking the image first if necessary.

        Blocks while another process unpacks the image, or while there is no space because all removable copies are in
        use.

        Args:
            flat: Use the image as one tree, for nodes that cannot stack layers with an overlay.

        Raises:
            SandboxError: The image is missing, its content does not match the digest in its name, or there is no space.
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
        """Returns a lease if the image is cached, else ``None``. Never waits."""
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
        """Unpacks ``images``, given in order of use, as long as there is space. Blocks.

        Until the next call, the copies of these images are evicted last. Therefore put images that are in use and will
        be needed again first. Only copies that no process uses or requested are evicted.

        Args:
            flat: Returns whether an image is used as one tree on this node.
            until: Polled between images. The call returns once it is true.

        Returns:
            The number of leading ``images`` that are cached or being unpacked by another process.
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
        """Returns the facts of an image; see :meth:`.ImageFiles.facts`."""
        return self._files.facts(image)

    # --- images commands ----------------------------------------------------------------------------------------

    @property
    def budget(self) -> DiskUsage:
        """Maximum bytes and inodes of all copies together."""
        return self._index.budget

    def list(self) -> list[dict[str, object]]:
        """Returns a row for each copy: ``name``, ``bytes``, ``inodes``, ``image`` (its source), ``ahead`` (prefetched),
        ``made_at`` and ``used_at`` (Unix seconds), and ``in_use``.
        """
        used = self._index.in_use()
        return [
            {
                "name": entry.name,
                "bytes": entry.size.bytes,
                "inodes": entry.size.inodes,
                "image": entry.image,
                "ahead": entry.ahead,
                "made_at": entry.made_at,
                "used_at": entry.used_at,
                "in_use": entry.name in used,
            }
            for entry in self._index.entries()
        ]

    def clear(self) -> int:
        """Removes every copy that is not in use. Returns the number of bytes freed."""
        freed = 0
        for entry in self._index.entries():
            if self._index.remove(entry.name):
                freed += entry.size.bytes
        return freed

    # --- making copies ------------------------------------------------------------------------------------------

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
        """Makes the missing copies of an image that no other thread or process is making.

        Returns:
            True if all copies exist and are marked as used. If false, a process that was making one has exited: try
            again.
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
        """Waits for space, behind processes and threads that started waiting earlier.

        Returns:
            ``None`` if other threads or processes have made, or are making, all missing copies.
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
        """Waits until other threads or processes have made copies. They have reserved their space, so they never
        wait."""
        missing = [name for name in names if not self._index.has(name)]
        for name, maker in self._index.makers(missing).items():
            for _ in _polls(deadline, "another process that stages it does not finish"):
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
        """Stops the thread. Waits at most ``timeout_s`` seconds for the copy in progress."""
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
