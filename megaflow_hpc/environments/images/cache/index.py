"""Index of one node's image cache: its entries, the processes that use them, and the eviction policy.

::

    CACHE/                        private, on local scratch; shared by all ranks and jobs of the user
      lock                        held to decide which entries are made and removed
      removing                    held shared to take a lease, exclusively (and briefly) to remove entries
      images/<name>/              an entry (cache.py): rootfs/, and entry.json with its size
      users/<pid>-<start>.<hex>   JSON: entries that an open cache uses, wants and makes, and whether it is waiting
      work/<pid>-<start>.<hex>    files that a process is writing or removing

An entry is an unpacked image or layer. Entries enter and leave ``images`` by rename, so they are always complete.

Locks are kernel locks (``flock``), released when their holder exits. All other files have a process identity in their
names and are ignored once that process has exited. A process killed by SIGKILL therefore never blocks another process.
The next process to open the cache removes its leftovers.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import locked
from megaflow_hpc.host.process import Identity

DEFAULT_SHARE = 0.8
"""Default budget, as a fraction of the free space on scratch plus the space that the cache already occupies."""
_SUBDIRECTORIES = ("images", "users", "work")


@dataclass(frozen=True)
class DiskUsage:
    bytes: int
    inodes: int

    def __add__(self, other: DiskUsage) -> DiskUsage:
        return DiskUsage(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: DiskUsage) -> DiskUsage:
        return DiskUsage(self.bytes - other.bytes, self.inodes - other.inodes)

    def __le__(self, other: DiskUsage) -> bool:
        return self.bytes <= other.bytes and self.inodes <= other.inodes


NOTHING = DiskUsage(0, 0)


@dataclass(frozen=True)
class CacheEntry:
    """An unpacked image or layer in the cache. Times are in Unix seconds."""

    name: str
    size: DiskUsage
    image: str
    """Path of the file that the entry was unpacked from."""
    ahead: bool
    """True if the entry was prefetched."""
    made_at: float
    used_at: float


@dataclass
class _User:
    """Entries that one open cache uses, wants and makes, as stored in its ``users`` file."""

    uses: Collection[str] = ()
    """Names of entries that must not be removed."""
    wants: Sequence[str] = ()
    """Names of entries that the cache needs next, soonest first."""
    makes: dict[str, DiskUsage] = field(default_factory=dict)
    """Maps the name of each entry being made to the space reserved for it."""
    waits_since_ns: int | None = None
    """Monotonic time in nanoseconds at which the cache started to wait for space. ``None`` if it is not waiting."""


@dataclass(frozen=True)
class CacheClaim:
    """The missing entries of an image: those that this process must make, and those that are already being made."""

    own: Sequence[str]
    """Names of the entries that this process must make."""
    others: Sequence[str]
    """Names of the entries that other threads or processes are making."""


class CacheIndex:
    """The entries of the image cache below ``root``, shared by processes and threads.

    Args:
        budget_bytes, budget_inodes: Limits on the total size of all entries. Default: ``MEGAFLOW_CACHE_GB``, else a
            fraction of the free space.
    """

    def __init__(self, root: Path, budget_bytes: int | None = None, budget_inodes: int | None = None) -> None:
        self.root = root
        own = Identity.of(os.getpid())
        assert own is not None
        self._identity = str(own)
        for name in _SUBDIRECTORIES:
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = root / "users" / self._unique_name()
        self._guard = threading.Lock()
        """Guards this cache's state, which is written to its file after each change."""
        self._uses: Counter[str] = Counter()
        self._state = _User()
        tidy(root)
        self.budget = self._budget(budget_bytes, budget_inodes)

    def _unique_name(self) -> str:
        return f"{self._identity}.{secrets.token_hex(4)}"

    def _budget(self, bytes_: int | None, inodes: int | None) -> DiskUsage:
        disk = os.statvfs(self.root)
        present = sum((entry.size for entry in self.entries()), NOTHING)
        if bytes_ is None:
            gigabytes = _positive("MEGAFLOW_CACHE_GB")
            free = disk.f_bavail * disk.f_frsize + present.bytes
            bytes_ = int(DEFAULT_SHARE * free) if gigabytes is None else int(gigabytes * 1e9)
        if inodes is None:
            # File systems without a fixed inode count report 0.
            free = disk.f_favail + present.inodes if disk.f_files else 1 << 62
            inodes = int(DEFAULT_SHARE * free)
        return DiskUsage(bytes_, inodes)

    # --- entries ------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Returns the path of an entry, whether or not the entry exists."""
        return self.root / "images" / name

    def has(self, name: str) -> bool:
        """Returns whether the cache has an entry of this name."""
        return os.path.isfile(f"{self.root}/images/{name}/entry.json")

    def has_all(self, names: Collection[str]) -> bool:
        """Returns whether the cache has all entries of these names."""
        return all(self.has(name) for name in names)

    def entries(self) -> list[CacheEntry]:
        """Returns all entries, least recently used first."""
        entries = []
        for name in _names(self.root / "images"):
            path = self.path(name) / "entry.json"
            try:
                record = json.loads(path.read_bytes())
                size = DiskUsage(record["bytes"], record["inodes"])
                used_at = path.stat().st_mtime
                entries.append(CacheEntry(name, size, record["image"], record["ahead"], record["made_at"], used_at))
            except (OSError, ValueError, KeyError):
                continue  # It was removed in the meantime.
        return sorted(entries, key=lambda entry: entry.used_at)

    def in_use(self) -> set[str]:
        """Returns the names of the entries that running processes use."""
        return {name for user in self._users().values() for name in user.uses}

    # --- leases -------------------------------------------------------------------------------------------------

    def use(self, names: Collection[str], *, wait: bool = True) -> bool:
        """Marks entries as used if all of them exist, and returns whether they do.

        An entry in use is not removed until :meth:`release`.

        Args:
            wait: Wait if another process is removing entries. If false, return false in that case.
        """
        if not self.has_all(names):
            return False
        with self._guard:
            is_marked = all(self._uses[name] for name in names)
            self._uses.update(names)
            if not is_marked:
                self._write()
        try:
            # Removers check for marks while holding this lock. They have seen ours, or the entry is already gone.
            with locked(self.root / "removing", shared=True, timeout_s=math.inf if wait else 0):
                complete = self.has_all(names)
        except TimeoutError:
            complete = False
        if not complete:
            self.release(names)
        return complete

    def release(self, names: Collection[str]) -> None:
        """Ends one use of each of these entries."""
        with self._guard:
            self._uses.subtract(names)
            ended = [name for name in names if not self._uses[name]]
            for name in ended:
                del self._uses[name]
                self._touch(name)
            if ended:
                self._write()

    def _touch(self, name: str) -> None:
        """Sets an entry's time of last use to now. The kernel's own timestamps are only accurate to a few
        milliseconds."""
        now = time.time_ns()
        with suppress(FileNotFoundError):
            os.utime(f"{self.root}/images/{name}/entry.json", ns=(now, now))

    # --- making entries -----------------------------------------------------------------------------------------

    def want(self, names: Sequence[str]) -> None:
        """Sets the entries that this cache needs next, soonest first. Replaces the previous list."""
        with self._guard:
            self._state.wants = names
            self._write()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Queues for space until the context exits. The process that has waited longest gets space first."""
        with self._guard:
            self._state.waits_since_ns = time.monotonic_ns()
            self._write()
        try:
            yield
        finally:
            with self._guard:
                self._state.waits_since_ns = None
                self._write()

    def claim(self, sizes: Mapping[str, DiskUsage], *, ahead: bool = False, queued: bool = False) -> CacheClaim | None:
        """Reserves space for the missing entries of an image that no process is making, evicting other entries if
        needed.

        The least recently used entries are evicted first. Entries in use are never evicted. Entries that a process
        wants
        next are evicted only if ``ahead`` is false, and those needed last go first.

        Args:
            sizes: Sizes of all entries of the image, by name.
            ahead: Prefetch the entries without marking them as used. Otherwise mark them, as :meth:`use` does.
            queued: The caller is :meth:`waiting`. Callers are served in the order in which they began to wait. Unqueued
                callers come last.

        Returns:
            The claim. ``None`` if there is no space for all missing entries, or if it is another caller's turn. Nothing
            is reserved or marked in that case.
        """
        with locked(self.root / "lock"):
            claim, removed = self._claim(sizes, ahead, queued)
        for directory in removed:
            remove_tree(directory, ignore_errors=True)
        return claim

    def _claim(self, sizes: Mapping[str, DiskUsage], ahead: bool, queued: bool) -> tuple[CacheClaim | None, list[Path]]:
        """Implements :meth:`claim`. Call it with the lock held.

        Also returns the paths of evicted entries, which the caller must delete.
        """
        users = list(self._users().values())
        made = {name for user in users for name in user.makes}
        missing = [name for name in sizes if not self.has(name)]
        own = [name for name in missing if name not in made]
        removed: list[Path] = []
        if own:
            if not self._is_turn(users, queued):
                return None, []
            needed = sum((sizes[name] for name in own), NOTHING)
            victims = self._victims(needed, users, sizes, ahead)
            if victims is None:
                return None, []
            removed = self._withdraw(victims)
            if len(removed) < len(victims):
                return None, removed
        with self._guard:
            self._state.makes |= {name: sizes[name] for name in own}
            if not ahead:
                self._uses.update(sizes.keys())
            self._write()
        return CacheClaim(own, [name for name in missing if name in made]), removed

    def _is_turn(self, users: Sequence[_User], queued: bool) -> bool:
        waiting = [user.waits_since_ns for user in users if user.waits_since_ns is not None]
        if queued:
            return self._state.waits_since_ns == min(waiting, default=self._state.waits_since_ns)
        return not waiting

    def _victims(
        self, needed: DiskUsage, users: Sequence[_User], keep: Collection[str], ahead: bool
    ) -> list[str] | None:
        """Chooses the entries to evict to make space for ``needed``. Returns ``None`` if there cannot be enough
        space."""
        entries = self.entries()
        sizes = {entry.name: entry.size for entry in entries}
        used = set(keep)
        rank: dict[str, int] = {}
        for user in users:
            sizes |= user.makes  # some of these may have become entries in the meantime
            used.update(user.uses)
            for position, name in enumerate(user.wants):
                rank[name] = min(position, rank.get(name, position))
        taken = sum(sizes.values(), NOTHING)
        idle = [entry for entry in entries if entry.name not in used]
        if ahead:
            idle = [entry for entry in idle if entry.name not in rank]
        else:  # The sort is stable, so unwanted entries keep their order of last use.
            idle.sort(key=lambda entry: rank.get(entry.name, len(rank)), reverse=True)
        victims = []
        for entry in idle:
            if taken + needed <= self.budget:
                break
            victims.append(entry.name)
            taken -= entry.size
        return victims if taken + needed <= self.budget else None

    def put(self, name: str, size: DiskUsage, image: str, make: Callable[[Path], int], *, ahead: bool) -> int:
        """Makes a claimed entry with ``make(directory)`` and adds it to the cache. Returns the result of ``make``."""
        directory = self.root / "work" / self._unique_name()
        try:
            directory.mkdir(mode=0o700)
            result = make(directory)
            about = {"image": image, "ahead": ahead, "made_at": time.time()}
            write_json(directory / "entry.json", {"bytes": size.bytes, "inodes": size.inodes, **about})
            remove_tree(self.path(name))  # has no entry.json: remains of an incomplete entry
            os.rename(directory, self.path(name))
            self._touch(name)
            self.give_up([name])
            return result
        except OSError as error:
            raise SandboxError(f"{self.root}: no image can be staged here: {error.strerror or error}") from error
        finally:
            remove_tree(directory)

    def give_up(self, names: Collection[str]) -> None:
        """Releases the space that is still reserved for these entries."""
        with self._guard:
            held = [name for name in names if name in self._state.makes]
            for name in held:
                del self._state.makes[name]
            if held:
                self._write()

    def unclaimed(self, names: Collection[str]) -> list[str]:
        """Returns the names of the missing entries that no process is making."""
        missing = [name for name in names if not self.has(name)]
        made = self.makers(missing)
        return [name for name in missing if name not in made]

    def makers(self, names: Collection[str]) -> dict[str, str]:
        """Returns, for each entry that is being made, the name of the ``users`` file of the cache that makes it."""
        if not names:
            return {}
        users = self._users()
        return {name: file for file, user in users.items() for name in names if name in user.makes}

    def makes(self, file: str, name: str) -> bool:
        """Returns whether the cache whose ``users`` file is ``file`` is open and is making the entry ``name``."""
        user = self._user(file)
        return user is not None and name in user.makes

    # --- removing entries ---------------------------------------------------------------------------------------

    def remove(self, name: str) -> bool:
        """Removes an entry unless a process uses it. Returns whether it was removed."""
        with locked(self.root / "lock"):
            removed = self._withdraw([name])
        for directory in removed:
            remove_tree(directory, ignore_errors=True)
        return bool(removed)

    def _withdraw(self, names: Sequence[str]) -> list[Path]:
        """Moves entries out of ``images`` unless they are in use. Returns their new paths, which the caller must
        delete."""
        if not names:
            return []
        removed = []
        with locked(self.root / "removing"):
            used = self.in_use()
            for name in names:
                if name not in used and self.has(name):
                    directory = self.root / "work" / self._unique_name()
                    os.rename(self.path(name), directory)
                    removed.append(directory)
        return removed

    # --- files --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Writes this cache's ``users`` file, or removes it if the state is empty. Call it with the guard held."""
        state = self._state
        state.uses = list(self._uses)
        if not (state.uses or state.wants or state.makes or state.waits_since_ns):
            self._file.unlink(missing_ok=True)
            return
        content = {
            "uses": state.uses,
            "wants": list(state.wants),
            "makes": {name: [size.bytes, size.inodes] for name, size in state.makes.items()},
            "waits_since_ns": state.waits_since_ns,
        }
        partial = self.root / "work" / self._unique_name()
        partial.write_text(json.dumps(content))
        os.replace(partial, self._file)

    def _users(self) -> dict[str, _User]:
        """Returns the state of each cache opened by a running process, by file name."""
        users = {}
        for file in _names(self.root / "users"):
            user = self._user(file)
            if user is not None:
                users[file] = user
        return users

    def _user(self, file: str) -> _User | None:
        if not _is_alive(file):
            return None
        try:
            content = json.loads((self.root / "users" / file).read_bytes())
        except FileNotFoundError:
            return None
        makes = {name: DiskUsage(*size) for name, size in content["makes"].items()}
        return _User(content["uses"], content["wants"], makes, content["waits_since_ns"])


def tidy(root: Path) -> int:
    """Removes the files that dead processes left in a cache. Returns the number of files and directories removed."""
    count = 0
    for subdirectory in ("work", "users"):
        for name in _names(root / subdirectory):
            if not _is_alive(name):
                with suppress(OSError):
                    remove_tree(root / subdirectory / name)
                    count += 1
    return count


def _is_alive(name: str) -> bool:
    identity = Identity.parse(name.partition(".")[0])
    return identity is not None and identity.alive()


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _positive(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise ConfigError(f"{variable}={text}: expected a number above 0; unset it for the default")
