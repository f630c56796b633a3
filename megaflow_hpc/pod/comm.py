"""Message passing between the ranks of a pod. Only this module imports mpi4py.

A :class:`Comm` never blocks in MPI, because a blocking receive spins on a core, and hangs if the sender dies while
sending a large message. :meth:`Comm.push` sends all messages queued for a rank as one parcel, so MPI's overhead is paid
once per iteration of the loop. There are no collective operations except barriers at the start, and no pickle.

Each message has the key ``op`` and is packed by :mod:`megaflow_hpc.host.wire`. Rank 0 sends ``init``, ``start``,
``cancel``, ``endpoints``, ``images``, ``suspend``, ``mirror``, ``beat`` and ``stop``. A worker sends ``ready``,
``result``, ``activity``, ``transcript``, ``beat`` and ``left``. A rank with an engine server sends ``engine`` instead
of ``ready``.
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

BEAT, STOP = pack({"op": "beat"}), pack({"op": "stop"})
"""Packed messages that are sent as separate parcels, so that a rank can recognise them without unpacking."""
TAG = 77
BEAT_S = 5.0
"""Interval between heartbeats of a rank, in seconds."""
FIRST_S, SHORT_S, LONG_S = 5e-5, 1e-3, 0.08
"""Sleep times of an idle rank, in seconds. See :class:`Backoff`."""
PUSH_BYTES = 1 << 20
"""Messages larger than this many bytes are sent immediately, without waiting for a push."""
INIT_S = 120
"""Timeout for initialising MPI in seconds."""


class Comm(Protocol):
    """Exchanges messages between rank 0 and the other ranks of a pod. No method blocks."""

    rank: int
    size: int

    @property
    def link(self) -> WireLink | None:
        """The link on which ``select`` can wait for a message. ``None`` under MPI."""

    def send(self, rank: int, message: Message | bytes) -> None:
        """Queues a message, packed or unpacked. It is sent with the next push at the latest."""

    def push(self) -> None:
        """Sends the queued messages."""

    def poll(self) -> tuple[int, Message] | None:
        """Returns (sender's rank, next message), or ``None`` if there is no message. If a rank was lost, returns the
        message ``{"op": "left"}`` from that rank."""


def world_hint() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks, as reported by the launcher's environment variables.

    Returns (0, 1) without a launcher. Works before MPI is initialised.
    """
    pairs = [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMIX_RANK", "SLURM_NTASKS")]
    if "SLURM_STEP_ID" in os.environ:
        pairs.append(("SLURM_PROCID", "SLURM_NTASKS"))
    for rank, size in pairs:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def unlink_shared_memory() -> None:
    """Unlinks MPI's shared-memory files that this process has mapped. Call it once every rank has mapped them.

    The mappings stay valid until the last rank ends. Ranks end with ``os._exit`` or are killed, so the files would
    otherwise remain on the node. MPICH names them by job and step, so a requeued job would attach to the old files.
    """
    for path in mapped_files(os.getpid()):
        if path.startswith("/dev/shm/") and not path.endswith("(deleted)"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def check_shared_memory() -> None:
    """Checks that all of MPI's shared-memory files belong to this user. Call it before any rank unlinks them.

    MPICH opens an existing file if it has the expected name, and any user of the node can derive that name from job and
    step.

    Raises:
        SiteError: A shared-memory file belongs to another user.
    """
    for path in mapped_files(os.getpid()):
        if path.startswith("/dev/shm/mpich"):
            try:
                owner = os.lstat(path).st_uid
            except OSError:  # another user has removed it, since our ranks do not unlink files yet
                owner = -1
            if owner != os.getuid():
                raise SiteError(
                    f"{path}: MPI's shared memory belongs to another user, who created it first; run the job again, on "
                    "nodes of its own if need be (slurm.pods.exclusive: true)"
                )


class MpiComm:
    """A :class:`Comm` that sends point-to-point messages over MPI_COMM_WORLD.

    The constructor initialises MPI and waits for every rank. If that takes longer than :data:`INIT_S` seconds, SIGALRM
    ends the process.
    """

    link: WireLink | None = None

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # MPI_Finalize would wait for a dead rank
        # If a rank dies in MPI_Init, the others would wait there forever. SIGALRM ends them.
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
        """Maps each lost rank to MPI's error message."""
        self._unreported: list[int] = []
        """Lost ranks that :meth:`poll_parcel` has not returned yet."""
        self._queued: dict[int, list[bytes]] = {}
        """Maps each rank to the messages queued for its next parcel."""
        self._outgoing: list[tuple[Any, bytes, int]] = []
        """Parcels being sent, as (request, data, receiver)."""
        self._arriving: dict[int, deque[tuple[Any, bytearray]]] = {}
        """Maps each rank to its partially received parcels, in sending order."""
        self._incoming: deque[tuple[int, Message]] = deque()
        self._pack = packer()
        self._reported_error = False
        self._world.Barrier()
        check_shared_memory()
        self._world.Barrier()
        signal.alarm(0)
        unlink_shared_memory()

    def send(self, rank: int, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else self._pack(message)
        self._queued.setdefault(rank, []).append(data)
        if len(data) > PUSH_BYTES:
            self._pack = packer()  # releases the buffer of the large message
            self.push()

    def push(self) -> None:
        if not self._queued:
            return
        for rank, messages in self._queued.items():
            data = b"".join(messages)
            try:
                request = self._world.Isend([data, self._mpi.BYTE], dest=rank, tag=TAG)
            except self._mpi.Exception as error:
                self._lose(rank, error)
            else:
                self._outgoing.append((request, data, rank))
        self._queued.clear()
        self._forget_sent()

    def poll(self) -> tuple[int, Message] | None:
        if not self._incoming:
            received = self.poll_parcel()
            if received is None:
                return None
            source, parcel = received
            try:
                self._incoming.extend([(source, message) for message in unpack_all(parcel)])
            except ValueError as error:  # Intel MPI over TCP delivers half a parcel if its sender is killed
                self._lose(source, error)
                return None
        return self._incoming.popleft()

    def poll_parcel(self) -> tuple[int, bytes | bytearray] | None:
        """Returns (sender's rank, next parcel), or ``None`` if there is no parcel. The parcel is still packed.

        If MPI reports that a rank failed, this is returned once as ``{"op": "left"}``. If a rank dies or hangs while it
        sends a message, MPI reports no error. Only the rank's heartbeats stop.
        """
        if self._unreported:
            rank = self._unreported.pop()
            return rank, pack({"op": "left", "why": f"MPI: {self.lost[rank]}"})
        message = self._probe() or self._probe()  # MPICH's first probe may receive a message without reporting it
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
        """Returns the next parcel that has arrived completely since it was first polled."""
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
        except self._mpi.Exception as error:  # the error names no rank; the heartbeats show which rank is lost
            if not self._reported_error:
                self._reported_error = True
                print(f"rank {self.rank}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return None

    def _lose(self, rank: int, error: Exception) -> None:
        self._arriving.pop(rank, None)
        if rank not in self.lost:
            self.lost[rank] = str(error).splitlines()[-1]
            self._unreported.append(rank)

    def flush(self, seconds: float) -> None:
        """Sends the queued messages, and waits up to ``seconds`` until MPI has sent them."""
        self.push()
        end = time.monotonic() + seconds
        while self._outgoing and time.monotonic() < end:
            self._forget_sent()
            time.sleep(0.001)

    def leave(self, seconds: int = 0) -> None:
        """Leaves the MPI world before this process exits. Calls MPI_Finalize under PMIx, and does nothing otherwise.

        Under PMIx, the launcher treats a rank that exits without MPI_Finalize as lost, and kills the job. Under other
        launchers, a call of MPI_Finalize could wait forever for a dead rank.

        Args:
            seconds: MPI_Finalize waits for the other ranks. After this many seconds, SIGALRM ends the process. 0 means
                no limit.
        """
        if "PMIX_NAMESPACE" in os.environ:
            signal.alarm(seconds)
            self._mpi.Finalize()
            signal.alarm(0)

    def _forget_sent(self) -> None:
        self._outgoing = [parcel for parcel in self._outgoing if not self._is_sent(parcel)]

    def _is_sent(self, parcel: tuple[Any, bytes, int]) -> bool:
        """Returns true if a parcel was sent or can no longer be sent."""
        request, _, rank = parcel
        try:
            sent: bool = request.Test()
        except self._mpi.Exception as error:
            self._lose(rank, error)
            return True
        return sent


class ChildComm:
    """A :class:`Comm` without MPI. This process is rank 0, and its runner at the other end of ``link`` is rank 1.

    Args:
        clock: A monotonic clock, in seconds.
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
            pass  # poll() reports the lost runner

    def push(self) -> None:
        """Does nothing, because messages are sent immediately."""

    def poll(self) -> tuple[int, Message] | None:
        if self._gone:
            return None
        try:
            message = self.link.receive()
        except EOFError:
            self._gone = True
            return 1, {"op": "left", "why": "the runner process ended"}
        if message is None and self._clock() - self._beaten > BEAT_S:
            # A runner sends no heartbeats. Its open socket shows that it is alive.
            self._beaten = self._clock()
            message = {"op": "beat"}
        return None if message is None else (1, message)


class Backoff:
    """Sleep times that increase while a rank is idle, so that polling uses little CPU time.

    The first sleep takes :data:`FIRST_S`. Each further sleep takes twice as long, up to :data:`SHORT_S`. After that,
    each sleep takes a fiftieth of the idle time so far, up to :data:`LONG_S`.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sleep_s = 0.0
        self._since = 0.0

    def reset(self) -> None:
        """Starts again with the shortest sleep, after activity."""
        self._sleep_s = 0.0

    def next_s(self) -> float:
        """Returns the next sleep time in seconds, and increases the one after it."""
        if not self._sleep_s:
            self._since, self._sleep_s = self._clock(), FIRST_S
        elif self._sleep_s < SHORT_S:
            self._sleep_s = min(SHORT_S, 2 * self._sleep_s)
        else:
            self._sleep_s = min(LONG_S, max(SHORT_S, (self._clock() - self._since) / 50))
        return self._sleep_s

    def sleep(self, link: WireLink | None = None) -> None:
        """Sleeps for the next sleep time, or until ``link`` has data."""
        select.select([link] if link else [], [], [], self.next_s())
