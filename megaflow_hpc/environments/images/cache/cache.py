"""Brings images to this node: once each, checked, in the order they will be needed, within a budget.

A copy has a *form*: ``tree``, the image's files unpacked, or ``sif``, the file itself. The third form, ``direct``,
copies nothing: the image is used where it lies. An image of a store bears its digest in its name, and its content is
compared with it while it is read for the copy; a copy that is there was compared, so nobody reads the image again.
Images of no store (a SIF that the campaign file names) are known by path, size and time of change.

What is used is leased and never removed; :mod:`.cache` keeps the books.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.cache.shelf import POLL_S, Room, Shelf
from megaflow_hpc.environments.images.image_file import ImageFacts, ImageFiles, read_checked, stamp
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host.files import remove_tree

Form = Literal["tree", "sif", "direct"]

SHARE_OF_DISK = 0.8
"""The default budget: this part of what is free on scratch and what the cache has already."""
MARGIN_INODES = 64

_MARKED: dict[str, int] = {}
"""Copy → leases that are out or waited for. A process has one mark on disk for all, whichever cache object it was."""
_HELD: dict[str, int] = {}
"""Copy → leases that are out: while there are any, the copy is here for sure."""
_GUARD = threading.Lock()


class Lease:
    """The right to use an image on this node until :meth:`release`. ``path``: its tree or its SIF file."""

    def __init__(self, path: str, cache: ImageCache | None = None, name: str = "") -> None:
        self.path = path
        self._cache, self._name = cache, name

    def release(self) -> None:
        """Gives the right back. Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._give_back(self._name)


class ImageCache:
    """The images of this node that one process uses; all processes of the user share the copies.

    Args:
        root: a private directory on local scratch.
        budget_bytes, budget_inodes: what all copies together may take; ``None``: ``MEGAFLOW_CACHE_GB`` (10^9 bytes) and
            ``MEGAFLOW_CACHE_INODES``, else four fifths of what scratch has free.
    """

    def __init__(
        self, root: Path, apptainer: str, *, budget_bytes: int | None = None, budget_inodes: int | None = None
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.apptainer = apptainer
        self.copied_bytes = 0
        """Bytes this process has read from where images lie, for copies."""
        self._shelf = Shelf(root, Room(0, 0))
        self._shelf.budget = _budget(root, self._shelf, budget_bytes, budget_inodes)
        self._files = ImageFiles()
        self._shelf.tidy()

    # --- use ----------------------------------------------------------------------------------------------------

    def acquire(self, image: str, form: Form = "tree", *, timeout_s: float = 1800.0) -> Lease:
        """Returns a lease on ``image``, staged now if it is not here yet. Blocks while another process stages it, and
        while everything that would have to go is in use.

        Raises:
            SandboxError: there is no such image, its content is not what its name says, or there is no room for it.
        """
        if os.path.isdir(image):
            return Lease(os.path.realpath(image))
        if form == "direct":
            return Lease(self.facts(image).path)  # its header was read, not its content: only parts of it will be
        facts = self.facts(image)
        name = _name(facts, form)
        deadline = time.monotonic() + timeout_s
        self._mark(name)
        try:
            if lease := self._lease(name, form, sure=False):
                return lease
            with self._shelf.locked(name, exclusive=False, deadline=deadline):
                if lease := self._lease(name, form, sure=self._shelf.here(name)):
                    return lease
            began = time.time()
            with self._shelf.locked(name, exclusive=True, deadline=deadline):
                if not self._shelf.here(name):
                    self._stage(facts, form, name, deadline)
                    self._shelf.log.add(name, facts.path, began, self._shelf.identity, ahead=False)
                lease = self._lease(name, form, sure=True)
                assert lease is not None
                return lease
        except TimeoutError as error:
            self._unmark(name)
            why = str(error) or "another process that stages it does not get on"
            raise SandboxError(f"{image}: not staged within {timeout_s:g} s: {why}") from None
        except BaseException:
            self._unmark(name)
            raise

    def ready(self, image: str, form: Form = "tree") -> Lease | None:
        """Returns a lease if the image is here already, else ``None``. Never waits; takes some tens of microseconds."""
        if os.path.isdir(image):
            return Lease(os.path.realpath(image))
        if form == "direct":
            return None
        name = _name(self.facts(image), form)
        self._mark(name)
        lease = self._lease(name, form, sure=False)
        try:
            if lease is None:
                with self._shelf.locked(name, exclusive=False, deadline=0.0):
                    lease = self._lease(name, form, sure=self._shelf.here(name))
        except TimeoutError:
            pass  # somebody is staging or removing it
        if lease is None:
            self._unmark(name)
        return lease

    def prefetch(
        self,
        images: Sequence[str],
        form: Form | Callable[[str], Form] = "tree",
        until: Callable[[], bool] = lambda: False,
    ) -> int:
        """Stages ``images`` in the order in which they will be used, while there is room; returns how many of them are
        here.

        What is named is kept until the next call names something else, before all that nobody named: name what is in
        use and will be again first. Only copies that nobody uses or named are removed. What somebody else is staging
        is left to them. Blocks.

        Args:
            form: that of all, or the form of each.
            until: asked between copies; once it is true nothing more is staged.
        """
        wanted = [
            (facts := self.facts(image), each, _name(facts, each))
            for image in images
            if not os.path.isdir(image) and (each := form(image) if callable(form) else form) != "direct"
        ]
        self._shelf.announce([name for _, _, name in wanted])
        for number, (facts, each, name) in enumerate(wanted):
            if until():
                return number
            if self._shelf.here(name):
                continue
            began = time.time()  # before the lock: whoever finds it taken begins with the next one later
            try:
                with self._shelf.locked(name, exclusive=True, deadline=0.0):
                    if not self._shelf.here(name):
                        if not self._stage_ahead(facts, each, name):
                            return number
                        self._shelf.log.add(name, facts.path, began, self._shelf.identity, ahead=True)
            except TimeoutError:
                continue
        return len(images)

    def facts(self, image: str) -> ImageFacts:
        """Returns what is known of an image; see :meth:`.ImageFiles.facts`."""
        return self._files.facts(image)

    def room(self) -> Room:
        """Returns what would be left of the budget if everything that nobody uses were removed."""
        entries = self._shelf.entries()
        used = self._shelf.taken([entry for entry in entries if self._shelf.leased(entry.name)])
        return self._shelf.budget - used

    # --- what the verbs show and do -----------------------------------------------------------------------------

    @property
    def budget(self) -> Room:
        """Bytes and inodes that all copies together may take."""
        return self._shelf.budget

    def list(self) -> list[dict[str, object]]:
        """Returns every copy: ``name``, ``bytes``, ``inodes``, ``used_at`` (seconds UTC), ``in_use``; of the log:
        ``image``, ``ahead`` (of its use, the last time it was made), ``made`` (how often)."""
        history = self._shelf.log.lines()
        last = {str(made["name"]): made for made in history}
        times = Counter(str(made["name"]) for made in history)
        return [
            {
                "name": entry.name,
                "bytes": entry.size.bytes,
                "inodes": entry.size.inodes,
                "used_at": entry.used_at,
                "in_use": self._shelf.leased(entry.name),
                "image": last.get(entry.name, {}).get("image"),
                "ahead": last.get(entry.name, {}).get("ahead"),
                "made": times[entry.name],
            }
            for entry in self._shelf.entries()
        ]

    def clear(self) -> int:
        """Removes every copy that nobody uses; returns the bytes that were freed."""
        freed = 0
        for entry in self._shelf.entries():
            if place := self._shelf.withdraw(entry.name):
                remove_tree(place, ignore_errors=True)
                freed += entry.size.bytes
        return freed

    # --- staging ------------------------------------------------------------------------------------------------

    def _mark(self, name: str) -> None:
        path = str(self._shelf.path(name))
        with _GUARD:
            if not _MARKED.get(path):
                self._shelf.mark(name)
            _MARKED[path] = _MARKED.get(path, 0) + 1

    def _unmark(self, name: str) -> None:
        path = str(self._shelf.path(name))
        with _GUARD:
            _MARKED[path] -= 1
            if not _MARKED[path]:
                del _MARKED[path]
                self._shelf.release(name)

    def _lease(self, name: str, form: Form, *, sure: bool) -> Lease | None:
        """A lease on a copy this process has marked: if it is ``sure`` to be here, or another lease proves that."""
        path = self._shelf.path(name)
        with _GUARD:
            held = _HELD.get(str(path), 0)
            if not (held or sure):
                return None
            _HELD[str(path)] = held + 1
        if not held:
            self._shelf.touch(name)
        return Lease(str(path / ("rootfs" if form == "tree" else "image.sif")), self, name)

    def _give_back(self, name: str) -> None:
        path = str(self._shelf.path(name))
        with _GUARD:
            _HELD[path] -= 1
            if not _HELD[path]:
                del _HELD[path]
        self._unmark(name)

    def _stage(self, facts: ImageFacts, form: Form, name: str, deadline: float) -> None:
        """Makes a copy that somebody waits for, as soon as there is room. Its lock is held exclusively."""
        size = self._size(facts, form)
        if not size <= self.budget:
            raise SandboxError(
                f"{facts.path}: needs {size.bytes / 1e9:.3g} GB and {size.inodes} files on this node, the cache may "
                f"take {self.budget.bytes / 1e9:.3g} GB and {self.budget.inodes}; raise MEGAFLOW_CACHE_GB and "
                "MEGAFLOW_CACHE_INODES, or set MEGAFLOW_SCRATCH to a larger place"
            )
        ticket = self._shelf.queue_up()
        pause = POLL_S[0]
        try:
            while self._shelf.first_in_queue() != ticket or not self._shelf.reserve(name, size, ahead=False):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"everything in {self._shelf.root} is in use; raise MEGAFLOW_CACHE_GB, or run fewer slots"
                    )
                time.sleep(pause)
                pause = min(2 * pause, POLL_S[1])
        finally:
            self._shelf.leave_queue(ticket)
        self._make(facts, form, name, size)

    def _stage_ahead(self, facts: ImageFacts, form: Form, name: str) -> bool:
        """Makes a copy if there is room that nobody waits for. Its lock is held exclusively."""
        size = self._size(facts, form)
        if self._shelf.first_in_queue() is not None or not self._shelf.reserve(name, size, ahead=True):
            return False
        self._make(facts, form, name, size)
        return True

    def _size(self, facts: ImageFacts, form: Form) -> Room:
        return Room(facts.bytes, 4) if form == "sif" else Room(facts.unpacked_bytes, facts.inodes + MARGIN_INODES)

    def _make(self, facts: ImageFacts, form: Form, name: str, size: Room) -> None:
        try:
            make = self._copy if form == "sif" else self._unpack
            self._shelf.put(name, lambda place: make(facts, place, size))
        finally:
            self._shelf.unreserve(name)

    def _copy(self, facts: ImageFacts, place: Path, size: Room) -> Room:
        read_checked(facts, place / "image.sif")
        self.copied_bytes += facts.bytes
        return size

    def _unpack(self, facts: ImageFacts, place: Path, size: Room) -> Room:
        before = stamp(facts.path)
        if facts.digest:
            read_checked(facts, None)  # what is unpacked next is read from memory, where there is enough
        self.copied_bytes += facts.bytes
        target = place / "rootfs"
        try:
            partition = sif.Partition(facts.squashfs_offset, facts.bytes - facts.squashfs_offset, facts.inodes)
            if not sif.unpack(Path(facts.path), target, partition):
                runtime.build(self.apptainer, target, facts.path, "--sandbox", "--fix-perms", timeout_s=1800)
        except SiteError as error:
            raise SandboxError(f"{facts.path}: cannot be unpacked: {error}") from error
        if stamp(facts.path) != before:
            raise SandboxError(f"{facts.path}: was replaced while it was being unpacked; start again")
        return size


def _name(facts: ImageFacts, form: Form) -> str:
    return f"{facts.key}-{form}"


def _budget(root: Path, shelf: Shelf, bytes_: int | None, inodes: int | None) -> Room:
    disk = os.statvfs(root)
    have = sum((entry.size for entry in shelf.entries()), Room(0, 0))
    if bytes_ is None:
        gigabytes = _number("MEGAFLOW_CACHE_GB")
        free = disk.f_bavail * disk.f_frsize + have.bytes
        bytes_ = int(SHARE_OF_DISK * free) if gigabytes is None else int(gigabytes * 1e9)
    if inodes is None:
        count = _number("MEGAFLOW_CACHE_INODES")
        # Some file systems have no fixed number of inodes, and say 0.
        free = disk.f_favail + have.inodes if disk.f_files else 1 << 62
        inodes = int(SHARE_OF_DISK * free) if count is None else int(count)
    return Room(bytes_, inodes)


def _number(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise ConfigError(f"{variable}={text}: expected a number above 0; unset it for the default")
