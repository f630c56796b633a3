"""A rank beside an engine server, where engines and pod are one heterogeneous job and one MPI world.

The server registers as any other does and answers gateways over its own port; the rank only shares the pod's life. Rank
0 hears at once that an engine has ended, the engine ends with the pod, and nobody waits in a queue for the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from megaflow_hpc.host.process import node_name
from megaflow_hpc.pod.comm import BEAT_S, Backoff, MpiComm
from megaflow_hpc.pod.messages import BEAT, STOP
from megaflow_hpc.pod.worker import PRIVATE, master_lost
from megaflow_hpc.rundir.layout import RunDir

STOP_S = 30.0
"""What a server may take to leave before it is killed."""


def start_server(run: RunDir, index: int) -> subprocess.Popen[bytes]:
    """Starts engine server ``index`` of ``run.json``; call before MPI is initialised."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
    return subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc.model.server", str(run), "--index", str(index)],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # it ends when we say so, not with a signal to the step
    )


def accompany(comm: MpiComm, server: subprocess.Popen[bytes]) -> bool:
    """Runs the loop of such a rank; returns when the pod ends, rank 0 is silent, or the server has ended.

    Returns:
        Whether rank 0 is still there.
    """
    backoff = Backoff()
    heard = beaten = time.monotonic()
    comm.send(0, {"op": "engine", "node": node_name()})
    try:
        while True:
            comm.push()
            received = comm.poll_parcel()
            now = time.monotonic()
            if received is None:
                backoff.sleep()
            else:
                heard = now
                if received[1] == STOP:
                    return True
            if now - beaten > BEAT_S:
                comm.send(0, BEAT)
                beaten = now
            if why := master_lost(comm, now - heard):
                print(f"engine rank {comm.rank}: {why}; leaving", file=sys.stderr)
                return False
            if server.poll() is not None:
                comm.send(0, {"op": "left", "why": f"its engine server ended with {server.returncode}"})
                comm.push()
                return True
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
