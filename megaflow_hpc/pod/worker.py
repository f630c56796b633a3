"""A worker rank: moves parcels between rank 0 (MPI) and its runner (a socket), unopened, and watches both.

The main thread drives MPI and nothing else, so a rollout that blocks cannot delay a heartbeat.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from megaflow_hpc.host.wire import WireLink
from megaflow_hpc.pod.comm import BEAT_S, Backoff, MpiComm
from megaflow_hpc.pod.messages import BEAT, STOP
from megaflow_hpc.texts import printable

MASTER_LOST_S = 30.0
STOP_S = 20.0
"""What a runner may take to stop its sandboxes before it is killed."""

PRIVATE = ("PMI_", "PMIX_", "PMI2_", "MPI", "HYDI_", "HYDRA_", "OMPI_", "SLURM_PMI")


def start_runner() -> tuple[subprocess.Popen[bytes], WireLink]:
    """Starts the runner; call before MPI is initialised. It ends when this process does (end-of-file on its socket)."""
    ours, theirs = socket.socketpair()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
    process = subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc.pod.rollout.runner", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C and a step's signals are the master's business
    )
    theirs.close()
    return process, WireLink(ours)


def stop_runner(process: subprocess.Popen[bytes], link: WireLink) -> None:
    """Closes the runner's socket, waits :data:`STOP_S` for its end, and then kills it."""
    link.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def master_lost(comm: MpiComm, silent_s: float) -> str:
    """Returns why rank 0 is given up, silent for so many seconds; empty while it is not."""
    if 0 in comm.lost:
        return f"rank 0 is lost: {comm.lost[0]}"
    return f"nothing from rank 0 for {MASTER_LOST_S:.0f} s" if silent_s > MASTER_LOST_S else ""


def serve(comm: MpiComm, process: subprocess.Popen[bytes], link: WireLink) -> bool:
    """Runs the loop of a worker rank; returns when it has nothing more to do, and whether rank 0 is still there."""
    backoff = Backoff()
    heard = beaten = time.monotonic()
    try:
        while True:
            busy = False
            received = comm.poll_parcel()
            if received is not None:
                heard = time.monotonic()
                if received[1] != BEAT:  # with nothing else to do a rank sleeps on
                    busy = True
                    link.send_parcel(bytes(received[1]))
                if received[1] == STOP:
                    return True
            parcel = link.receive_parcel()
            if parcel is not None:
                busy = True
                comm.send(0, parcel)
            now = time.monotonic()
            if now - beaten > BEAT_S:
                comm.send(0, BEAT)
                beaten = now
            comm.push()
            if why := master_lost(comm, now - heard):
                print(f"worker {comm.rank}: {why}; leaving", file=sys.stderr)
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
