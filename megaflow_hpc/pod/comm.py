"""Message passing between the ranks of a pod. The only importer of mpi4py.

A :class:`Comm` sends messages to ranks and yields what has come in; it never blocks in MPI, because a blocking
receive spins a core. Messages to one rank are gathered until :meth:`Comm.push` and leave as one: what MPI costs is
paid by the turn of a loop and not by the message. No collectives, no pickle, no message to a rank known dead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from megaflow_hpc.host.wire import Link, Message, pack, unpack_all

TAG = 77
SWEEP = 1024
"""Messages on their way at which all of them are looked at, not only the oldest."""
BEAT_S = 5.0
"""How often each side sends a heartbeat."""
PUSH_BYTES = 1 << 20
"""Gathered bytes that leave without waiting for a push."""
INIT_S = 120
"""Seconds that starting MPI may take."""


class Comm(Protocol):
    """The world of a pod as rank 0 uses it: messages to ranks and from them. No method waits."""

    rank: int
    size: int

    def send(self, rank: int, message: Message | bytes) -> None:
        """Hands over a message, or a packed one; it leaves with the next push at the latest."""

    def push(self) -> None:
        """Sends what was handed over."""

    def poll(self) -> tuple[int, Message] | None:
        """Returns the next message with its sender, or ``None``. One known to be gone sends ``{"op": "left"}``."""


def world_hint() -> tuple[int, int]:
    """Returns (rank, size) as the launcher's environment gives them, before MPI is initialised; (0, 1) without one."""
    pairs = (("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    for rank, size in (*pairs, ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ and ("SLURM" not in rank or "SLURM_STEP_ID" in os.environ):
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def unlink_shared_memory() -> None:
    """Unlinks the shared-memory files of MPI that this process has mapped; call when every rank has them mapped.

    They stay mapped and vanish with the last rank. A rank that is killed, or leaves by ``os._exit`` as ours do, would
    leave them on the node; MPICH names them by job and step, so a requeued job would even attach to the old ones.
    """
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}
    for path in mapped:
        if not path.endswith("(deleted)"):
            with contextlib.suppress(OSError):
                os.unlink(path)


class MpiComm:
    """Point-to-point messages over MPI_COMM_WORLD; a :class:`Comm`.

    Making one initialises MPI and waits for every rank; the process is ended by SIGALRM after :data:`INIT_S`.
    """

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        mpi4py.rc.finalize = False  # MPI_Finalize would wait for a rank that is dead
        # One rank that dies in MPI_Init leaves the others waiting in it for ever; SIGALRM ends them.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(INIT_S)
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world = MPI.COMM_WORLD
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self._status = MPI.Status()
        self._outgoing: deque[tuple[Any, bytes]] = deque()
        self._gathered: dict[int, list[bytes]] = {}
        self._incoming: deque[tuple[int, Message]] = deque()
        self._look_at = SWEEP
        self._world.Barrier()
        signal.alarm(0)
        unlink_shared_memory()

    def send(self, rank: int, message: Message | bytes) -> None:
        parts = self._gathered.setdefault(rank, [])
        parts.append(message if isinstance(message, bytes) else pack(message))
        if len(parts[-1]) > PUSH_BYTES:
            self.push()

    def push(self) -> None:
        if not self._gathered:
            return
        for rank, parts in self._gathered.items():
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            self._outgoing.append((self._world.Isend([data, self._mpi.BYTE], dest=rank, tag=TAG), data))
        self._gathered.clear()
        while self._outgoing and self._outgoing[0][0].Test():
            self._outgoing.popleft()
        if len(self._outgoing) > self._look_at:  # one to a dead rank may stand before many that have left
            self._sweep()
            self._look_at = 2 * len(self._outgoing) + SWEEP

    def poll(self) -> tuple[int, Message] | None:
        if not self._incoming:
            received = self.poll_parcel()
            if received is None:
                return None
            source, parcel = received
            self._incoming.extend((source, message) for message in unpack_all(parcel))
        return self._incoming.popleft()

    def poll_parcel(self) -> tuple[int, bytearray] | None:
        """Returns a rank and what it sent in one go, unopened, or ``None``."""
        if not self._probe() and not self._probe():  # the first may take a message in without showing it (MPICH)
            return None
        source = self._status.Get_source()
        data = bytearray(self._status.Get_count(self._mpi.BYTE))
        self._world.Recv([data, self._mpi.BYTE], source=source, tag=TAG)
        return source, data

    def _probe(self) -> bool:
        found: bool = self._world.Iprobe(source=self._mpi.ANY_SOURCE, tag=TAG, status=self._status)
        return found

    def flush(self, seconds: float) -> None:
        """Sends what was handed over, and waits at most ``seconds`` until it has left."""
        self.push()
        end = time.monotonic() + seconds
        while self._outgoing and time.monotonic() < end:
            self._sweep()
            time.sleep(0.001)

    def _sweep(self) -> None:
        self._outgoing = deque((request, data) for request, data in self._outgoing if not request.Test())


class ChildComm:
    """A world of two without MPI; a :class:`Comm`. This process is rank 0, the runner behind ``link`` is rank 1.

    Args:
        clock: seconds of a clock that never jumps.
    """

    rank = 0
    size = 2

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._gone = False
        self._beaten = clock()

    def send(self, rank: int, message: Message | bytes) -> None:
        try:
            self._link.send_parcel(message if isinstance(message, bytes) else pack(message))
        except OSError:
            pass  # poll reports it

    def push(self) -> None:
        """Does nothing: messages leave at once here."""

    def poll(self) -> tuple[int, Message] | None:
        if self._gone:
            return None
        try:
            message = self._link.receive()
        except EOFError:
            self._gone = True
            return 1, {"op": "left", "why": "the runner process ended"}
        if message is None and self._clock() - self._beaten > BEAT_S:
            # No rank stands between us and the runner to beat for it: an open socket says that it lives.
            self._beaten = self._clock()
            message = {"op": "beat"}
        return None if message is None else (1, message)

    def flush(self, seconds: float) -> None:
        """Does nothing: messages leave at once here."""


class Backoff:
    """Sleeps longer the longer nothing happens, so that an idle rank costs little and a busy one adds no latency.

    Args:
        first_s: the first sleep; each is twice as long as the one before.
        last_s: the longest.
    """

    def __init__(self, first_s: float = 5e-5, last_s: float = 1e-3) -> None:
        self._first, self._last, self._now = first_s, last_s, first_s

    def reset(self) -> None:
        """Notes that something happened: the next sleep is short."""
        self._now = self._first

    def sleep(self, link: Link | None = None) -> None:
        """Sleeps; returns at once when ``link`` has data."""
        select.select([link] if link else [], [], [], self._now)
        self._now = min(self._last, self._now * 2)
