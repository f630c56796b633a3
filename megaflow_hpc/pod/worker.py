"""Main loops of the ranks other than rank 0. Their main thread only handles MPI, so nothing delays a heartbeat.

A *worker rank* forwards parcels between rank 0 (over MPI) and its runner (over a socket) without unpacking them, and
monitors both.

An *engine rank* exists if engines and pod share one MPI world in a heterogeneous job. It runs an ordinary engine
server, which registers itself and serves gateways over its own port. If the engine ends, rank 0 learns of it
immediately, and the engine ends with the pod. Because they share a job, neither waits in Slurm's queue for the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from megaflow_hpc.host.process import node_name
from megaflow_hpc.host.wire import WireLink
from megaflow_hpc.pod.comm import BEAT, BEAT_S, STOP, Backoff, MpiComm
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.texts import printable

MASTER_LOST_S = 30.0
"""Rank 0 counts as lost after this many seconds without a message from it."""
RUNNER_STOP_S = 20.0
"""Seconds that a runner may take to stop its sandboxes before it is killed."""
SERVER_STOP_S = 30.0
"""Seconds that an engine server may take to stop before it is killed."""
MPI_VARIABLES = ("PMI_", "PMIX_", "PMI2_", "MPI", "HYDI_", "HYDRA_", "OMPI_", "SLURM_PMI")
"""Prefixes of environment variables that child processes must not inherit."""


def start_runner() -> tuple[subprocess.Popen[bytes], WireLink]:
    """Starts the runner. Call it before MPI is initialised. When this process ends, the runner reads end-of-file on its
    socket and ends too."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    process = _start("megaflow_hpc.pod.rollout.runner", [str(number)], pass_fds=[number])
    theirs.close()
    return process, WireLink(ours)


def start_server(run: RunDir, index: int) -> subprocess.Popen[bytes]:
    """Starts the engine server with this index in ``run.json``. Call it before MPI is initialised."""
    return _start("megaflow_hpc.model.server", [str(run), "--index", str(index)])


def _start(module: str, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith(MPI_VARIABLES)},
        start_new_session=True,  # so that signals to the terminal or the step do not reach the child
    )


def stop_runner(process: subprocess.Popen[bytes], link: WireLink) -> None:
    """Stops a runner by closing its socket. Kills it if it takes longer than :data:`RUNNER_STOP_S`."""
    link.close()
    _await_end(process, RUNNER_STOP_S)


def _await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Heart:
    """Sends heartbeats to rank 0, and detects when rank 0 is lost."""

    def __init__(self, comm: MpiComm, name: str) -> None:
        self._comm, self._name = comm, name
        self._heard_at = self._beaten_at = time.monotonic()

    def heard(self) -> None:
        """Records a parcel from rank 0."""
        self._heard_at = time.monotonic()

    def beat(self) -> None:
        """Sends a heartbeat if one is due."""
        if time.monotonic() - self._beaten_at > BEAT_S:
            self._beaten_at = time.monotonic()
            self._comm.send(0, BEAT)

    def master_lost(self) -> bool:
        """Returns true if rank 0 is lost, and reports the loss on stderr."""
        if 0 in self._comm.lost:
            why = f"rank 0 is lost: {self._comm.lost[0]}"
        elif time.monotonic() - self._heard_at > MASTER_LOST_S:
            why = f"nothing from rank 0 for {MASTER_LOST_S:.0f} s"
        else:
            return False
        print(f"{self._name} {self._comm.rank}: {why}; leaving", file=sys.stderr)
        return True


def serve(comm: MpiComm, process: subprocess.Popen[bytes], link: WireLink) -> bool:
    """Runs a worker rank until the pod or its runner ends. Returns true if rank 0 is still alive."""
    backoff, heart = Backoff(), _Heart(comm, "worker")
    try:
        while True:
            busy = False
            received = comm.poll_parcel()
            if received is not None:
                heart.heard()
                if received[1] != BEAT:  # a heartbeat must not reset the backoff of an idle rank
                    busy = True
                    link.send_parcel(bytes(received[1]))
                if received[1] == STOP:
                    return True
            parcel = link.receive_parcel()
            if parcel is not None:
                busy = True
                comm.send(0, parcel)
            heart.beat()
            comm.push()
            if heart.master_lost():
                return False
            if busy:
                backoff.reset()
            else:
                backoff.sleep(link)
    except (EOFError, OSError) as error:
        print(printable(f"worker {comm.rank}: the runner ended: {error!r}"), file=sys.stderr)
        comm.send(0, {"op": "left", "why": f"its runner process ended ({error})"})
        comm.push()
        return True
    finally:
        stop_runner(process, link)


def keep_server(comm: MpiComm, server: subprocess.Popen[bytes]) -> bool:
    """Runs an engine rank until the pod or its server ends. Returns true if rank 0 is still alive."""
    backoff, heart = Backoff(), _Heart(comm, "engine rank")
    comm.send(0, {"op": "engine", "node": node_name()})
    try:
        while True:
            comm.push()
            received = comm.poll_parcel()
            if received is None:
                backoff.sleep()
            else:
                heart.heard()
                if received[1] == STOP:
                    return True
            heart.beat()
            if heart.master_lost():
                return False
            if server.poll() is not None:
                comm.send(0, {"op": "left", "why": f"its engine server ended with {server.returncode}"})
                comm.push()
                return True
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            _await_end(server, SERVER_STOP_S)
