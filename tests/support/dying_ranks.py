"""Ranks that die, or stop for ever, inside a large message. Rank 0 and the last rank continue.

``mpiexec -n N sh -c SHELL python -m tests.support.dying_ranks PLACE kill|stop|garble SIZE...``: ranks 1 to ``N - 2``
each announce a message of one of the sizes (bytes), or that many zeros, and are gone before it is received. Then rank 0
has the last rank send back each size, and writes what it received to ``PLACE/report.json``. Every rank leaves its pid
in ``PLACE/<rank>.pid``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.host.atomic import write_atomic, write_json
from megaflow_hpc.pod.comm import TAG, MpiComm
from tests.support.processes import kill

SHELL = """\
"$0" "$@"
[ "${PMI_RANK:-${PMIX_RANK:-$SLURM_PROCID}}" != 0 ] || : > "$3/over"
until [ -e "$3/over" ]; do sleep 0.1; done
"""
"""Keeps each rank's shell until rank 0 has ended. So mpiexec does not end the other ranks."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "garble": signal.SIGKILL}


def is_gone(pid: int) -> bool:
    """Tells whether a process has ended or was stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZTXt"


def wait(comm: MpiComm, op: str) -> int:
    """Waits for a message. Returns its sender."""
    while (received := comm.poll()) is None:
        comm.push()
        time.sleep(0.001)
    assert received[1]["op"] == op
    return received[0]


def lead(comm: MpiComm, place: Path, sizes: list[int]) -> dict[str, Any]:
    *victims, last = sorted(wait(comm, "ready") for _ in range(1, comm.size))
    for rank in victims:
        comm.send(rank, {"op": "die"})
    comm.flush(10)
    pids = [int((place / f"{rank}.pid").read_text()) for rank in victims]
    while not all(is_gone(pid) for pid in pids):
        time.sleep(0.01)
    for size in sizes:
        comm.send(last, {"op": "echo", "x": b"x" * size})
    came: dict[int, list[Any]] = {rank: [] for rank in range(1, comm.size)}
    while len(came[last]) < len(sizes):
        received = comm.poll()
        if received is not None:
            rank, message = received
            came[rank].append(message["op"] if message["op"] == "left" else len(message["x"]))
        comm.push()
        time.sleep(0.001)
    return {"came": came, "last": last}


def follow(comm: MpiComm) -> None:
    """Sends back every message until rank 0 ends it."""
    while True:
        received = comm.poll()
        if received is not None:
            comm.send(0, received[1])
        comm.push()
        time.sleep(0.001)


def die(comm: MpiComm, size: int, how: str) -> None:
    wait(comm, "die")
    if how == "garble":
        from mpi4py import MPI  # MpiComm must load it first

        MPI.COMM_WORLD.Isend([bytes(size), MPI.BYTE], dest=0, tag=TAG)
    else:
        comm.send(0, {"op": "result", "x": b"x" * size})
        comm.push()
    os.kill(os.getpid(), SIGNALS[how])


if __name__ == "__main__":
    place, how, sizes = Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]
    comm = MpiComm()
    write_atomic(place / f"{comm.rank}.pid", str(os.getpid()))
    comm.send(0, {"op": "ready"}) if comm.rank else None
    comm.push()
    if comm.rank == 0:
        write_json(place / "report.json", lead(comm, place, sizes))
        for rank in range(1, comm.size):
            kill(int((place / f"{rank}.pid").read_text()))
    elif comm.rank == comm.size - 1:
        follow(comm)
    else:
        die(comm, sizes[comm.rank - 1], how)
    os._exit(0)
