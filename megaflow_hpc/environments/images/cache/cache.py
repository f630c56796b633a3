"""Brings images to this node: once each, checked, in the order they will be needed, within a budget.

An image is one copy or several (:mod:`.parts`): of layers, its base and each layer are copies of their own, which other
images share. In the form ``direct`` a SIF is used where it lies. An image of a store bears its digest in its name, and
so do layers: content is compared with it while it is read for the copy; a copy that is there was compared, so nobody
reads the image again. Images of no store (a SIF that the campaign file names) are known by path, size and time of
change.

What is used is leased and never removed; :mod:`.shelf` keeps the books. Room for all that an image lacks is made at
once, for one waiting process after the other, and who waits keeps nothing: so two that have half of what they need
cannot wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from megaflow_hpc.environments.images.cache.budget import budget
from megaflow_hpc.environments.images.cache.parts import Form, Part, Plan, plan
from megaflow_hpc.environments.images.cache.queue import Queue, Turn
from megaflow_hpc.environments.images.cache.shelf import Room, Shelf
from megaflow_hpc.environments.images.image_file import ImageFacts, ImageFiles
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree

_MARKED: dict[str, int] = {}
"""Copy → leases that are out or waited for. A process has one mark on disk for all, whichever cache object it was."""
_HELD: dict[str, int] = {}
"""Copy → leases that are out: while there are any, the copy is here for sure."""
_GUARD = threading.Lock()


class Lease:
    """The right to use an image on this node until :meth:`release`. ``path``: its tree or its SIF file; ``layers``:
    directories that lie over it, the topmost first."""

    def __init__(
        self, path: str, layers: Sequence[str] = (), cache: ImageCache | None = None, parts: Sequence[Part] = ()
    ) -> None:
        self.path = path
        self.layers = tuple(layers)
        self._cache, self._parts = cache, parts

    def release(self) -> None:
        """Gives the right back. Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._give_back(self._parts)


class ImageCache:
    """The images of this node that one process uses; all processes of the user share the copies.

    Args:
        root: a private directory on local scratch.
        budget_bytes: Maximum size of all copies. Default: ``MEGAFLOW_CACHE_GB`` (10^9 bytes), else four fifths of the
            free space of scratch.
        budget_inodes: Maximum number of files of all copies. Default: four fifths of the free inodes of scratch.
    """

    def __init__(
        self, root: Path, apptainer: str, *, budget_bytes: int | None = None, budget_inodes: int | None = None
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.apptainer = apptainer
        self.copied_bytes = 0
        """Bytes this process has read from where images lie, for copies."""
        self._shelf = Shelf(root, Room(0, 0))
        self._queue = Queue(root, self._shelf.identity)
        self._shelf.budget = budget(self._shelf, budget_bytes, budget_inodes)
        self._files = ImageFiles()
        self._plans: dict[tuple[str, Form], tuple[ImageFacts, Plan]] = {}
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
        wanted = self._plan(image, form)
        if lease := self._held(wanted):
            return lease
        deadline = time.monotonic() + timeout_s
        try:
            with Turn(self._queue, deadline) as turn:
                while True:
                    self._mark(wanted.parts)
                    try:
                        if self._complete(wanted, turn):
                            return self._lease(wanted)
                    except BaseException:
                        self._unmark(wanted.parts)
                        raise
                    self._unmark(wanted.parts)
                    turn.wait(lambda: all(self._shelf.here(part.name) for part in wanted.parts))
        except TimeoutError as error:
            why = str(error) or "another process that stages it does not get on"
            raise SandboxError(f"{image}: not staged within {timeout_s:g} s: {why}") from None

    def ready(self, image: str, form: Form = "tree") -> Lease | None:
        """Returns a lease if the image is here already, else ``None``. Never waits; takes some tens of microseconds."""
        if os.path.isdir(image):
            return Lease(os.path.realpath(image))
        if form == "direct":
            return None
        wanted = self._plan(image, form)
        if lease := self._held(wanted):
            return lease
        self._mark(wanted.parts)
        with suppress(TimeoutError):  # somebody is removing something
            if not self._shelf.absent([part.name for part in wanted.parts], wait=False):
                return self._lease(wanted)
        self._unmark(wanted.parts)
        return None

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
        plans = [
            self._plan(image, form(image) if callable(form) else form) for image in images if not os.path.isdir(image)
        ]
        wanted = [each.parts for each in plans if each.parts]
        self._shelf.announce(list(dict.fromkeys(part.name for parts in wanted for part in parts)))
        for number, parts in enumerate(wanted):
            if until() or not self._stage_ahead([part for part in parts if not self._shelf.here(part.name)]):
                return number
        return len(images)

    def facts(self, image: str) -> ImageFacts:
        """Returns what is known of an image; see :meth:`.ImageFiles.facts`."""
        return self._files.facts(image)

    def room(self) -> Room:
        """Returns what would be left of the budget if everything that nobody uses were removed."""
        entries = self._shelf.entries()
        used = self._shelf.in_use()
        return self._shelf.budget - self._shelf.taken([entry for entry in entries if entry.name in used])

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
        used = self._shelf.in_use()
        return [
            {
                "name": entry.name,
                "bytes": entry.size.bytes,
                "inodes": entry.size.inodes,
                "used_at": entry.used_at,
                "in_use": entry.name in used,
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

    # --- leases -------------------------------------------------------------------------------------------------

    def _plan(self, image: str, form: Form) -> Plan:
        facts = self.facts(image)
        known = self._plans.get((image, form))
        if known is None or known[0] is not facts:
            known = self._plans[image, form] = (facts, plan(facts, form, self.apptainer))
        return known[1]

    def _key(self, part: Part) -> str:
        return f"{self._shelf.root}/{part.name}"

    def _mark(self, parts: Sequence[Part]) -> None:
        keys = [self._key(part) for part in parts]
        with _GUARD:
            new = not all(_MARKED.get(key) for key in keys)
            for key in keys:
                _MARKED[key] = _MARKED.get(key, 0) + 1
            if new:
                self._write_marks()

    def _unmark(self, parts: Sequence[Part]) -> None:
        ended = []
        with _GUARD:
            for part in parts:
                key = self._key(part)
                _MARKED[key] -= 1
                if not _MARKED[key]:
                    del _MARKED[key]
                    self._shelf.touch(part.name)
                    ended.append(part)
            if ended:
                self._write_marks()

    def _write_marks(self) -> None:
        own = f"{self._shelf.root}/"
        self._shelf.mark([key.removeprefix(own) for key in _MARKED if key.startswith(own)])

    def _held(self, wanted: Plan) -> Lease | None:
        """A lease on copies of which this process has others, which proves that they are here."""
        keys = [self._key(part) for part in wanted.parts]
        with _GUARD:
            if not all(_HELD.get(key) for key in keys):
                return None
            for key in keys:
                _HELD[key] += 1
                _MARKED[key] += 1
        return self._lease_of(wanted)

    def _lease(self, wanted: Plan) -> Lease:
        """A lease on copies that this process has marked, and that are here."""
        with _GUARD:
            for key in map(self._key, wanted.parts):
                _HELD[key] = _HELD.get(key, 0) + 1
        return self._lease_of(wanted)

    def _lease_of(self, wanted: Plan) -> Lease:
        bottom = wanted.bottom if isinstance(wanted.bottom, str) else self._place(wanted.bottom)
        return Lease(bottom, [self._place(part) for part in wanted.layers], self, wanted.parts)

    def _place(self, part: Part) -> str:
        return f"{self._shelf.root}/images/{part.name}/{part.inside}"

    def _give_back(self, parts: Sequence[Part]) -> None:
        with _GUARD:
            for part in parts:
                key = self._key(part)
                _HELD[key] -= 1
                if not _HELD[key]:
                    del _HELD[key]
        self._unmark(parts)

    # --- staging ------------------------------------------------------------------------------------------------

    def _complete(self, wanted: Plan, turn: Turn) -> bool:
        """Stages what is not here of an image whose parts are marked, and waits for what others are staging.

        Returns:
            ``False`` if something has to be staged, and either others are to come first or there is no room yet.
        """
        while True:
            with ExitStack() as locks:
                own, others = self._missing(wanted.parts, locks)
                if not own and not others:
                    return True
                if own:
                    self._check_size(wanted)
                    if not turn.come() or not self._shelf.reserve({part.name: part.size for part in own}, ahead=False):
                        return False
                    turn.leave()
                    self._make(own, ahead=False)
            for part in others:  # they have made room already, and wait for nobody
                with self._shelf.locked(part.name, exclusive=False, deadline=turn.deadline):
                    pass

    def _missing(self, parts: Sequence[Part], locks: ExitStack) -> tuple[Sequence[Part], Sequence[Part]]:
        """The parts that are not here: those whose locks are ours from now on, and those whose are others'."""
        own, others = [], []
        absent = set(self._shelf.absent(part.name for part in parts))
        for part in parts:
            if part.name not in absent:
                continue
            try:
                lock = ExitStack()
                lock.enter_context(self._shelf.locked(part.name, exclusive=True, deadline=0.0))
                if self._shelf.here(part.name):
                    lock.close()
                else:
                    locks.push(lock)
                    own.append(part)
            except TimeoutError:
                others.append(part)
        return own, others

    def _check_size(self, wanted: Plan) -> None:
        size = sum((part.size for part in wanted.parts), Room(0, 0))
        if not size <= self.budget:
            raise SandboxError(
                f"{wanted.image}: needs {size.bytes / 1e9:.3g} GB and {size.inodes} files on this node, the cache may "
                f"take {self.budget.bytes / 1e9:.3g} GB and {self.budget.inodes}; raise MEGAFLOW_CACHE_GB, "
                "or set MEGAFLOW_SCRATCH to a larger place"
            )

    def _stage_ahead(self, parts: Sequence[Part]) -> bool:
        """Makes copies if there is room that nobody waits for; what others are making is left to them."""
        with ExitStack() as locks:
            own, _ = self._missing(parts, locks)
            if own:
                sizes = {part.name: part.size for part in own}
                if self._queue.first_in_queue() is not None or not self._shelf.reserve(sizes, ahead=True):
                    return False
                self._make(own, ahead=True)
        return True

    def _make(self, parts: Sequence[Part], *, ahead: bool) -> None:
        """Makes copies for which there is room. Their locks are held exclusively."""
        try:
            for part in parts:
                began = time.time()
                count = self._shelf.put(part.name, part.size, part.make)
                with _GUARD:  # other threads make other copies meanwhile
                    self.copied_bytes += count
                self._shelf.unreserve(part.name)
                self._shelf.log.add(part.name, part.source, began, self._shelf.identity, ahead=ahead)
        finally:
            for part in parts:
                self._shelf.unreserve(part.name)
