"""A directory seen through FUSE that behaves like a network file system: late, repeated, and sometimes not at all.

Each mount has its own server and kernel cache, like a client of a file server:

* the kernel caches attributes, names and missing names for ``stale_s``; listings and leases may be that old too;
* a successful link is answered with EEXIST, and a rename in the ledger with ENOENT, as if a lost reply had made the
  client repeat the request;
* in the ledger, in the blocks, and when journals are read, opening fails with ESTALE and requests with EIO;
* a request takes longer than a lease, before or after it is carried out.

A mount is made in a user namespace (``unshare -Urm``), in which the device must be opened: ``/dev/fuse`` if users may
open it, or the device that :data:`DEVICE` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any

DEVICE = "MEGAFLOW_FUSE"
"""Environment variable with the path of a FUSE device that this user may open."""
KINDS = ("stale", "replayed", "ESTALE", "EIO", "pauses")
ERRORS = {"ESTALE": (0.015, 3), "EIO": (0.0003, 1)}
"""Chance of each error, and the number of requests in a row that fail: the kernel hides a first ESTALE."""
PAUSES = 0.002
REPLAYED, RENAMED = 0.4, 0.1
"""Chances of a link and of a rename."""
_NOSUID_NODEV = 6


def device() -> str:
    """Returns a FUSE device that this user may open, empty if there is none."""
    named = os.environ.get(DEVICE) or "/dev/fuse"
    return named if os.access(named, os.R_OK | os.W_OK) else ""


def _misbehaves(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an operation on a path late, before or after it is carried out, or makes it fail."""

    @functools.wraps(operation)
    def tried(self: Passthrough, path: str, *rest: Any) -> Any:
        self.pause()
        self.fail(path)
        found = operation(self, path, *rest)
        self.pause()
        return found

    return tried


class Passthrough:
    """The server of a mount.

    Args:
        met: counts the faults, in the order of :data:`KINDS`.
        pause_s: the longest pause; the shortest is three tenths of it.
    """

    use_ns = True

    def __init__(self, real: Path, seed: int, stale_s: float, pause_s: float, met: Any) -> None:
        self._real, self._random, self._met = str(real), random.Random(seed), met
        self._stale_s, self._pause_s = stale_s, pause_s
        self._old: dict[tuple[str, str], list[tuple[float, Any]]] = {}
        self._failing: list[str] = []

    # --- faults ---

    def count(self, kind: str) -> None:
        self._met[KINDS.index(kind)] += 1

    def pause(self) -> None:
        if self._random.random() < PAUSES:
            self.count("pauses")
            time.sleep(self._random.uniform(0.3, 1.0) * self._pause_s)

    def fail(self, path: str) -> None:
        if path.startswith(("/ledger/", "/tasks/")):
            self._fail()

    def _fail(self) -> None:
        for name, (chance, times) in ERRORS.items():
            if not self._failing and self._random.random() < chance:
                self.count(name)
                self._failing = [name] * times
        if self._failing:
            raise OSError(getattr(errno, self._failing.pop()), "as the test has it")

    def cached(self, kind: str, path: str, found: Any) -> Any:
        """Returns the current answer, or one from a moment ago."""
        now = time.monotonic()
        known = [(then, old) for then, old in self._old.get((kind, path), []) if now - then < self._stale_s]
        self._old[kind, path] = [*known, (now, found)]
        if not known or self._random.random() < 0.5:
            return found
        if known[0][1] != found:
            self.count("stale")
        return known[0][1]

    # --- names ---

    @_misbehaves
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._real + path) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        times = {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
        return {name: getattr(found, name) for name in names} | times

    @_misbehaves
    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self.cached("names", path, sorted(os.listdir(self._real + path)))]

    @_misbehaves
    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real + path, mode)

    @_misbehaves
    def unlink(self, path: str) -> None:
        os.unlink(self._real + path)

    @_misbehaves
    def rename(self, old: str, new: str) -> None:
        os.rename(self._real + old, self._real + new)
        if new.startswith("/ledger/") and self._random.random() < RENAMED:
            self.count("replayed")
            raise OSError(errno.ENOENT, "as the test has it")

    @_misbehaves
    def link(self, target: str, source: str) -> None:
        os.link(self._real + source, self._real + target)
        if self._random.random() < REPLAYED:
            self.count("replayed")
            raise OSError(errno.EEXIST, "as the test has it")

    # --- files ---

    @_misbehaves
    def open(self, path: str, flags: int) -> int:
        if path.startswith("/journal/") and flags & os.O_ACCMODE == os.O_RDONLY:
            self._fail()
        return os.open(self._real + path, flags & ~os.O_APPEND)  # the kernel says where each write goes

    @_misbehaves
    def create(self, path: str, mode: int) -> int:
        return os.open(self._real + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        found = os.pread(fh, size, offset)
        return self.cached(f"bytes {offset}", path, found) if path.startswith("/ledger/leases/") else found

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.pause()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real + path if fh is None else fh, length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self.pause()
        os.fsync(fh)
        self.pause()

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real + path, mode)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


def _serve(descriptor: int, real: Path, seed: int, stale_s: float, *more: Any) -> None:
    unpacked = Path(os.environ.get("PREFIX", "/nonexistent")).glob("usr/lib/*/libfuse3.so.3")
    os.environ.setdefault("FUSE_LIBRARY_PATH", find_library("fuse3") or str(next(unpacked, "libfuse3.so.3")))
    import mfusepy

    class Operations(Passthrough, mfusepy.Operations):
        pass

    kept = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), stale_s)
    served = Operations(real, seed, stale_s, *more)
    mfusepy.FUSE(served, f"/dev/fd/{descriptor}", foreground=True, nothreads=True, hard_remove=True, **kept)


@contextlib.contextmanager
def mounted(real: Path, places: list[Path], seed: int, stale_s: float, pause_s: float) -> Iterator[dict[str, Any]]:
    """Mounts ``real`` at each of ``places`` until the end. Yields live counts of the faults, by kind.

    Call it in a user and mount namespace of your own, which ends with its last process, as do the mounts.
    """
    context = multiprocessing.get_context("fork")
    met: dict[str, Any] = {}
    servers = []
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for number, place in enumerate(places):
            place.mkdir(exist_ok=True)
            descriptor = os.open(device(), os.O_RDWR | os.O_CLOEXEC)
            options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
            if libc.mount(b"faulty", os.fsencode(place), b"fuse.faulty", _NOSUID_NODEV, options.encode()):
                raise OSError(ctypes.get_errno(), f"{place}: FUSE cannot be mounted")
            met[str(place)] = counts = context.Array("i", len(KINDS))
            told = (descriptor, real, seed * 100 + number, stale_s, pause_s, counts)
            servers.append(context.Process(target=_serve, args=told, daemon=True))
            servers[-1].start()
            os.close(descriptor)  # with the last holder of it, its server, the mount fails instead of hanging
        yield met
    finally:
        for server in servers:
            server.kill()
            server.join()
