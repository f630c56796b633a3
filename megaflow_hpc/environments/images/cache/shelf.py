"""The images of one node: which copies there are, who uses them, what has to go to make room.

::

    CACHE/                                 private, on local scratch; shared by every rank and job of the user
      lock                                 held while sizes are added up
      removing                             shared: seeing that copies are here; exclusive: taking one away
      images/<key>-<form>/                 a copy (parts.py): rootfs/ or image.sif, and entry.json with its size
      locks/<key>-<form>                   shared: waiting for who stages it; exclusive: staging or removing
      leases/<pid>-<start>                 what a process uses or waits for; one that is dead holds nothing
      queue/<time>.<pid>-<start>           who waits for room; the first to come is served first
      orders/<pid>-<start>                 what a process will want next, in its order
      reserved/<key>-<form>.<pid>-<start>  room for what is being staged
      partial/  trash/                     what is being written or removed, by the identity of who does it
      made.jsonl                           one line for every copy that was made (copy_log.py)

A lock is the kernel's (``flock``): it ends with its holder. Every other mark bears the identity of a process, and one
whose process is gone counts for nothing. So a SIGKILL at any instant blocks nobody, and the next to come tidies up.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images.cache.copy_log import CopyLog
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import locked
from megaflow_hpc.host.process import Identity

POLL_S = (0.005, 0.1)
"""Wait for a lock or for room: first, and at most."""


@dataclass(frozen=True)
class Room:
    """An amount of disk: bytes and inodes."""

    bytes: int
    inodes: int

    def __add__(self, other: Room) -> Room:
        return Room(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: Room) -> Room:
        return Room(self.bytes - other.bytes, self.inodes - other.inodes)

    def __le__(self, other: Room) -> bool:
        return self.bytes <= other.bytes and self.inodes <= other.inodes


@dataclass(frozen=True)
class Entry:
    """A copy in the cache."""

    name: str
    size: Room
    used_at: float


class Shelf:
    """The copies below ``root``, within ``budget``. Processes share it; so do the threads of one."""

    def __init__(self, root: Path, budget: Room) -> None:
        self.root = root
        self.budget = budget
        self.log = CopyLog(root)
        own = Identity.of(os.getpid())
        assert own is not None
        self.identity = str(own)
        for room in ("images", "locks", "leases", "queue", "orders", "reserved", "partial", "trash"):
            (root / room).mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Returns where the copy ``name`` is, or would be."""
        return self.root / "images" / name

    # --- locks and leases ---------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str, *, exclusive: bool, deadline: float) -> Iterator[None]:
        """Holds the lock of one copy; raises :class:`TimeoutError` at ``deadline`` (monotonic)."""
        timeout_s = deadline - time.monotonic()
        with locked(self.root / "locks" / name, shared=not exclusive, timeout_s=timeout_s):
            yield

    def here(self, name: str) -> bool:
        """Whether the copy is there and whole."""
        return os.path.isfile(f"{self.root}/images/{name}/entry.json")

    def absent(self, names: Iterable[str], *, wait: bool = True) -> list[str]:
        """Returns those that are not here. What is, and is marked as used by this process, stays from now on.

        Raises:
            TimeoutError: a copy is being removed this instant, with ``wait`` false.
        """
        with locked(self.root / "removing", shared=True, timeout_s=math.inf if wait else 0):
            return [name for name in names if not self.here(name)]

    def mark(self, names: Collection[str]) -> None:
        """Notes all that this process uses, or waits for: from now on nobody removes it.

        Who has not looked (:meth:`absent`) since cannot know whether it was being removed already.
        """
        path = self.root / "leases" / self.identity
        if not names:
            path.unlink(missing_ok=True)
            return
        partial = self.root / "leases" / f".{self.identity}"
        partial.write_text("\n".join(names))
        os.replace(partial, path)

    def touch(self, name: str) -> None:
        """Notes that the copy was used now. Times are ours: those the kernel gives are some milliseconds coarse."""
        now = time.time_ns()
        with suppress(FileNotFoundError):
            os.utime(f"{self.root}/images/{name}/entry.json", ns=(now, now))

    def in_use(self) -> set[str]:
        """Returns what processes that live use; the marks of dead ones are removed."""
        used: set[str] = set()
        for mark in listing(self.root / "leases"):
            path = self.root / "leases" / mark
            if alive(mark):
                with suppress(FileNotFoundError):
                    used.update(path.read_text().split("\n"))
            elif not alive(mark.lstrip(".")):
                with suppress(OSError):
                    path.unlink()
        return used

    # --- what there is ------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Returns every copy, the least recently used first."""
        found = []
        for name in listing(self.root / "images"):
            path = self.path(name) / "entry.json"
            try:
                known = json.loads(path.read_bytes())
                size = Room(known["bytes"], known["inodes"])
                found.append(Entry(name, size, path.stat().st_mtime))
            except (OSError, ValueError, KeyError):
                continue
        return sorted(found, key=lambda entry: entry.used_at)

    def taken(self, entries: list[Entry]) -> Room:
        """Returns what the copies take, and what is being staged will."""
        total = sum((entry.size for entry in entries), Room(0, 0))
        for mark in listing(self.root / "reserved"):
            path = self.root / "reserved" / mark
            if not alive(mark.rpartition(".")[2]):
                path.unlink(missing_ok=True)
                continue
            with suppress(OSError, ValueError):  # gone, or not filled yet: who only looks takes no lock
                bytes_, inodes = map(int, path.read_text().split())
                total += Room(bytes_, inodes)
        return total

    # --- what will be wanted ------------------------------------------------------------------------------------

    def announce(self, names: list[str]) -> None:
        """Notes what this process will want next, in its order; replaces what it announced before."""
        write_json(self.root / "orders" / self.identity, names)

    def wanted(self) -> dict[str, int]:
        """Returns how soon each copy is wanted by some process, 0 the soonest; those that nobody announced are not in
        it."""
        found: dict[str, int] = {}
        for mark in listing(self.root / "orders"):
            path = self.root / "orders" / mark
            if not alive(mark):
                if Identity.parse(mark):  # not a file that is being written
                    path.unlink(missing_ok=True)
                continue
            with suppress(OSError, ValueError):
                for place, name in enumerate(json.loads(path.read_bytes())):
                    found[name] = min(place, found.get(name, place))
        return found

    # --- making room --------------------------------------------------------------------------------------------

    def reserve(self, sizes: Mapping[str, Room], *, ahead: bool) -> bool:
        """Makes room for copies, by name, by removing others, the least recently used first; ``False`` if there is not
        enough for all of them together.

        What is in use stays. What some process will want next goes only where someone waits for the room (``ahead`` is
        false), and first what will be wanted last.
        """
        doomed: list[Path] = []
        size = sum(sizes.values(), Room(0, 0))
        with locked(self.root / "lock"):
            entries = self.entries()
            taken = self.taken(entries)
            wanted = self.wanted()
            used = self.in_use()
            free = [entry for entry in entries if entry.name not in used]
            if ahead:
                free = [entry for entry in free if entry.name not in wanted]
            else:  # a stable sort: what nobody wants keeps its order, the least recently used first
                free.sort(key=lambda entry: -wanted.get(entry.name, len(entries) + len(wanted)))
            enough = taken - sum((entry.size for entry in free), Room(0, 0)) + size <= self.budget
            for entry in free if enough else ():  # nothing is thrown away for a copy that would not fit even so
                if taken + size <= self.budget:
                    break
                if place := self.withdraw(entry.name):
                    doomed.append(place)
                    taken -= entry.size
            enough = taken + size <= self.budget
            if enough:
                for name, each in sizes.items():
                    self._mark(name).write_text(f"{each.bytes} {each.inodes}")
        for place in doomed:
            with suppress(OSError):
                remove_tree(place)
        return enough

    def unreserve(self, name: str) -> None:
        """Gives room back that :meth:`reserve` made for one copy."""
        self._mark(name).unlink(missing_ok=True)

    def withdraw(self, name: str) -> Path | None:
        """Takes a copy that nobody uses off the shelf and returns where it lies, for the caller to remove; ``None`` if
        in use."""
        try:
            with self.locked(name, exclusive=True, deadline=0.0), locked(self.root / "removing"):
                if name in self.in_use():
                    return None
                place = self.root / "trash" / f"{self.identity}.{secrets.token_hex(4)}"
                os.rename(self.path(name), place)
                (self.root / "locks" / name).unlink(missing_ok=True)
                return place
        except (TimeoutError, FileNotFoundError):
            return None

    def put(self, name: str, size: Room, make: Callable[[Path], int]) -> int:
        """Makes a copy of a size: ``make(directory)`` writes it, and says what is returned. Call with its lock held
        exclusively."""
        place = self.root / "partial" / f"{self.identity}.{secrets.token_hex(4)}"
        place.mkdir(mode=0o700)
        try:
            found = make(place)
            write_json(place / "entry.json", {"bytes": size.bytes, "inodes": size.inodes})
            remove_tree(self.path(name))  # without entry.json: never a whole copy
            os.rename(place, self.path(name))
            self.touch(name)
            return found
        except OSError as error:
            raise SandboxError(f"{self.root}: no image can be staged here: {error.strerror or error}") from error
        finally:
            remove_tree(place)

    def tidy(self) -> int:
        """Removes what processes that are gone left half written or half removed; returns how much there was."""
        count = 0
        for room in ("partial", "trash"):
            for name in listing(self.root / room):
                if not alive(name.partition(".")[0]):
                    with suppress(OSError):
                        remove_tree(self.root / room / name)
                        count += 1
        for name in listing(self.root / "orders"):
            if not alive(name.lstrip(".").partition(".")[0]):  # with a dot: one that was being written
                (self.root / "orders" / name).unlink(missing_ok=True)
        self.in_use()
        for name in listing(self.root / "locks"):
            if not self.path(name).exists():
                with suppress(TimeoutError), self.locked(name, exclusive=True, deadline=0.0):
                    if not self.path(name).exists():
                        (self.root / "locks" / name).unlink(missing_ok=True)
        return count

    def _mark(self, name: str) -> Path:
        return self.root / "reserved" / f"{name}.{self.identity}"


def alive(name: str) -> bool:
    """Whether the process whose identity a mark bears lives."""
    identity = Identity.parse(name)
    return identity is not None and identity.alive()


def listing(path: Path) -> list[str]:
    """Returns the names in a directory; none where it is not there."""
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
