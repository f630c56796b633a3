"""Message passing between the ranks of a pod. The only importer of mpi4py.

A :class:`Comm` sends messages to ranks and yields what has come in; it never blocks in MPI, because a blocking
receive spins a core, and of a rank that dies inside a large message it waits for ever. Messages to one rank are
gathered until :meth:`Comm.push` and leave as one: what MPI costs is paid by the turn of a loop and not by the message.
No collectives, no pickle, no message to a rank known dead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mpi import network_variables
from megaflow_hpc.host.process import mapped_files
from megaflow_hpc.host.wire import Message, WireLink, pack, packer, unpack_all

TAG = 77
SWEEP = 1024
"""Messages on their way at which all of them are looked at, not only the oldest."""
BEAT_S = 5.0
"""How often each side sends a heartbeat."""
FIRST_S, SHORT_S, LONG_S = 5e-5, 1e-3, 0.08
"""Sleeps of a rank to which nothing happens."""
PUSH_BYTES = 1 << 20
"""Gathered bytes that leave without waiting for a push."""
INIT_S = 120
"""Seconds that starting MPI may take."""


class Comm(Protocol):
    """The world of a pod as rank 0 uses it: messages to ranks and from them. No method waits."""

    rank: int
    size: int

    @property
    def link(self) -> WireLink | None:
        """Where there is one, ``select`` can wait by it for messages."""

    def send(self, rank: int, message: Message | bytes) -> None:
        """Hands over a message, or a packed one; it leaves with the next push at the latest."""

    def push(self) -> None:
        """Sends what was handed over."""

    def poll(self) -> tuple[int, Message] | None:
        """Returns the next message with its sender, or ``None``. One known to be gone sends ``{"op": "left"}``."""


def world_hint() -> tuple[int, int]:
    """Returns (rank, size) as the launcher's environment gives them, before MPI is initialised; (0, 1) without one."""
    pairs = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMIX_RANK", "SLURM_NTASKS"))
    for rank, size in (*pairs, ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ and ("SLURM" not in rank or "SLURM_STEP_ID" in os.environ):
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def unlink_shared_memory() -> None:
    """Unlinks the shared-memory files of MPI that this process has mapped; call when every rank has them mapped.

    They stay mapped and vanish with the last rank. A rank that is killed, or leaves by ``os._exit`` as ours do, would
    leave them on the node; MPICH names them by job and step, so a requeued job would even attach to the old ones.
    """
    for path in mapped_files(os.getpid()):
        if path.startswith("/dev/shm/") and not path.endswith("(deleted)"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def check_shared_memory() -> None:
    """Raises :class:`SiteError` if a stranger shares memory with this rank; call before any rank unlinks its files.

    MPICH takes whatever file has its name, which every user of the node can work out from the numbers of job and step.
    """
    for path in mapped_files(os.getpid()):
        if path.startswith("/dev/shm/mpich"):
            try:
                owner = os.lstat(path).st_uid
            except OSError:  # taken away: none of ours does that yet
                owner = -1
            if owner != os.getuid():
                raise SiteError(
                    f"{path}: MPI's shared memory is another user's, who was there first; run the job again, on nodes "
                    "of its own if need be (slurm.pods.extra: {exclusive: true})"
                )


class MpiComm:
    """Point-to-point messages over MPI_COMM_WORLD; a :class:`Comm`.

    Making one initialises MPI and waits for every rank; the process is ended by SIGALRM after :data:`INIT_S`.
    """

    link: WireLink | None = None

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # MPI_Finalize would wait for a rank that is dead
        # One rank that dies in MPI_Init leaves the others waiting in it for ever; SIGALRM ends them.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(INIT_S)
        from mpi4py import MPI

        os.environ.update(network_variables(MPI.Get_library_version()))
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        self._mpi: Any = MPI
        self._world = MPI.COMM_WORLD
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self._status = MPI.Status()
        self.lost: dict[int, str] = {}
        """Ranks with which MPI could not exchange a message, and what it said."""
        self._outgoing: deque[tuple[Any, bytes, int]] = deque()
        self._arriving: dict[int, deque[tuple[Any, bytearray]]] = {}
        """By rank, what it has announced and what is not here whole, in the order in which it was sent."""
        self._lost: list[int] = []
        """Those of them that were not reported yet."""
        self._said = False
        self._gathered: dict[int, list[bytes]] = {}
        self._pack = packer()
        self._incoming: deque[tuple[int, Message]] = deque()
        self._look_at = SWEEP
        self._world.Barrier()
        check_shared_memory()
        self._world.Barrier()
        signal.alarm(0)
        unlink_shared_memory()

    def send(self, rank: int, message: Message | bytes) -> None:
        parts = self._gathered.setdefault(rank, [])
        parts.append(message if isinstance(message, bytes) else self._pack(message))
        if len(parts[-1]) > PUSH_BYTES:
            self._pack = packer()  # it keeps what its longest message took
            self.push()

    def push(self) -> None:
        if not self._gathered:
            return
        for rank, parts in self._gathered.items():
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            try:
                self._outgoing.append((self._world.Isend([data, self._mpi.BYTE], dest=rank, tag=TAG), data, rank))
            except self._mpi.Exception as error:
                self._lose(rank, error)
        self._gathered.clear()
        while self._outgoing and self._has_left(self._outgoing[0]):
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
            try:
                self._incoming.extend([(source, message) for message in unpack_all(parcel)])
            except ValueError as error:  # Intel MPI over TCP calls whole what a rank was killed within
                self._lose(source, error)
                return None
        return self._incoming.popleft()

    def poll_parcel(self) -> tuple[int, bytes | bytearray] | None:
        """Returns a rank and what it sent in one go, unopened, or ``None``.

        Of a rank that MPI reports as failed comes ``{"op": "left"}``, once; of one that dies or stops inside a message,
        nothing: its silence tells.
        """
        if self._lost:
            rank = self._lost.pop()
            return rank, pack({"op": "left", "why": f"MPI: {self.lost[rank]}"})
        message = self._probe() or self._probe()  # the first may take a message in without showing it (MPICH)
        if message is not None:
            source = self._status.Get_source()
            data = bytearray(self._status.Get_count(self._mpi.BYTE))
            try:
                request = message.Irecv([data, self._mpi.BYTE])
                if source not in self._arriving and request.Test():
                    return source, data
            except self._mpi.Exception as error:
                self._lose(source, error)
                return None
            self._arriving.setdefault(source, deque()).append((request, data))
        return self._arrived() if self._arriving else None

    def _arrived(self) -> tuple[int, bytearray] | None:
        """Returns the next whole parcel of those that took longer than a look."""
        for source, parcels in self._arriving.items():
            try:
                if not parcels[0][0].Test():
                    continue
            except self._mpi.Exception as error:
                self._lose(source, error)
                return None
            _, data = parcels.popleft()
            if not parcels:
                del self._arriving[source]
            return source, data
        return None

    def _probe(self) -> Any:
        try:
            return self._world.Improbe(source=self._mpi.ANY_SOURCE, tag=TAG, status=self._status)
        except self._mpi.Exception as error:  # nobody's in particular: a rank that is gone is known by its silence
            if not self._said:
                self._said = True
                print(f"rank {self.rank}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return None

    def _lose(self, rank: int, error: Exception) -> None:
        self._arriving.pop(rank, None)
        if rank not in self.lost:
            self.lost[rank] = str(error).splitlines()[-1]
            self._lost.append(rank)

    def flush(self, seconds: float) -> None:
        """Sends what was handed over, and waits at most ``seconds`` until it has left."""
        self.push()
        end = time.monotonic() + seconds
        while self._outgoing and time.monotonic() < end:
            self._sweep()
            time.sleep(0.001)

    def leave(self, seconds: int = 0) -> None:
        """Ends MPI where a rank that just ends is taken for a lost one, for which the launcher ends all others (PMIx).

        That waits for the other ranks, at most so many seconds if any are given: SIGALRM ends the process then. Under
        other launchers nothing is done: MPI_Finalize would wait for a rank that is dead.
        """
        if "PMIX_NAMESPACE" in os.environ:
            signal.alarm(seconds)
            self._mpi.Finalize()
            signal.alarm(0)

    def _sweep(self) -> None:
        self._outgoing = deque(parcel for parcel in self._outgoing if not self._has_left(parcel))

    def _has_left(self, parcel: tuple[Any, bytes, int]) -> bool:
        """Whether nothing of a parcel is to be done any more."""
        try:
            left: bool = parcel[0].Test()
        except self._mpi.Exception as error:
            self._lose(parcel[2], error)
            return True
        return left


class ChildComm:
    """A world of two without MPI; a :class:`Comm`. This process is rank 0, the runner behind ``link`` is rank 1.

    Args:
        clock: seconds of a clock that never jumps.
    """

    rank = 0
    size = 2

    def __init__(self, link: WireLink, clock: Callable[[], float] = time.monotonic) -> None:
        self.link, self._clock = link, clock
        self._gone = False
        self._beaten = clock()

    def send(self, rank: int, message: Message | bytes) -> None:
        try:
            self.link.send_parcel(message if isinstance(message, bytes) else pack(message))
        except OSError:
            pass  # poll reports it

    def push(self) -> None:
        """Does nothing: messages leave at once here."""

    def poll(self) -> tuple[int, Message] | None:
        if self._gone:
            return None
        try:
            message = self.link.receive()
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

    The first sleep is :data:`FIRST_S`, each one after it twice as long up to :data:`SHORT_S`; from then on a sleep is a
    fiftieth of the time for which nothing has happened: that much later at most is noticed what comes.

    Args:
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sleep_s = 0.0
        self._since = 0.0

    def reset(self) -> None:
        """Notes that something happened: the next sleep is short."""
        self._sleep_s = 0.0

    def next_s(self) -> float:
        """Returns how long to sleep now, in seconds."""
        if not self._sleep_s:
            self._since, self._sleep_s = self._clock(), FIRST_S
        elif self._sleep_s < SHORT_S:
            self._sleep_s = min(SHORT_S, 2 * self._sleep_s)
        else:
            self._sleep_s = min(LONG_S, max(SHORT_S, (self._clock() - self._since) / 50))
        return self._sleep_s

    def sleep(self, link: WireLink | None = None) -> None:
        """Sleeps; returns at once when ``link`` has data."""
        select.select([link] if link else [], [], [], self.next_s())
