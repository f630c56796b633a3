"""The ranks of a pod with empty rollouts: rank 0 is real, and workers answer at once.

``mpiexec -n 3 python -m tests.bench.dispatch_ranks RUN SLOTS``: every rank leaves
``RUN/report/<rank>.json``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout

if TYPE_CHECKING:
    from megaflow_hpc.pod.comm import Comm
    from megaflow_hpc.pod.master.pod import Pod


def plan(path: Path, count: int) -> None:
    """Makes a run directory with ``count`` empty rollouts."""
    from megaflow_hpc.ledger import Ledger, write_blocks

    run = RunDir(path)
    run.create()
    Ledger(run).create()
    write_blocks(run, [Rollout(f"task{n // 8:06d}", "empty", n % 8, "nop") for n in range(count)], pods=1)
    write_json(run.run_json, {"rollouts": count})


def make_pod(run: RunDir, comm: Comm, start: str = "0", **more: Any) -> Pod:
    """Returns a pod with the real ledger and journal of a run directory that :func:`plan` made."""
    from megaflow_hpc.host.process import Identity
    from megaflow_hpc.ledger import Ledger, PodIdentity, read_blocks
    from megaflow_hpc.ledger.tasks import PlannedTask
    from megaflow_hpc.pod.master.pod import Pod
    from megaflow_hpc.rundir.events import EventWriter
    from megaflow_hpc.trajectories.journal.writer import JournalWriter

    tasks = {r.task_id: {"id": r.task_id, "image": "none"} for b in read_blocks(run) for r in b.rollouts}
    me = Identity.of(os.getpid())
    assert me is not None
    return Pod(
        run=run,
        comm=comm,
        ledger=Ledger(run, PodIdentity("bench", start, "", os.uname().nodename, me.pid, me.start)),
        journal=JournalWriter(run.journal_file("bench", start)),
        events=EventWriter(run.event_file("bench", start)),
        init={"op": "init"},
        tasks={name: PlannedTask(task, {}, len(tasks)) for name, task in tasks.items()},
        servers={},
        **more,
    )


def lead(run: RunDir) -> dict[str, Any]:
    """Runs the real rank 0. Returns its seconds and the bytes of its journal."""
    from megaflow_hpc.pod.comm import MpiComm
    from megaflow_hpc.pod.master.assembly import tune
    from megaflow_hpc.pod.master.loop import Master

    comm = MpiComm()
    pod = make_pod(run, comm)
    tune()
    began, cpu = time.monotonic(), time.process_time()
    state = Master(pod).run()
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    pod.journal.commit()
    comm.flush(5.0)
    assert state == "done", state
    size = sum(file.stat().st_size for file in run.journal.glob("*.journal"))
    return {"seconds": seconds, "cpu_s": cpu, "journal_bytes": size}


def follow(slots: int) -> dict[str, Any]:
    """Runs a worker rank that answers at once. Returns the milliseconds that it waited for each next start."""
    from megaflow_hpc.pod.comm import Backoff, MpiComm
    from megaflow_hpc.pod.outcome import Outcome
    from megaflow_hpc.trajectory import Trajectory

    comm = MpiComm()
    backoff, answered = Backoff(), 0.0
    waits: list[float] = []
    while True:
        received = comm.poll()
        if received is None:
            comm.push()
            backoff.sleep()
            continue
        backoff.reset()
        message = received[1]
        if message["op"] == "stop":
            comm.flush(5.0)
            return {"waits_ms": [round(wait * 1000, 4) for wait in waits]}
        if message["op"] == "init":
            comm.send(0, {"op": "ready", "slots": slots, "node": os.uname().nodename})
        elif message["op"] == "start":
            if answered:
                waits.append(time.monotonic() - answered)
            rollout = Rollout(**message["rollout"])
            messages = [{"role": "user", "content": "x" * 300}]
            trajectory = Trajectory.begin(rollout, message["attempt"], "completed", reward=0.0, messages=messages)
            comm.send(0, Outcome.of(trajectory).to_message())
            answered = time.monotonic()


if __name__ == "__main__":
    from megaflow_hpc.pod.comm import world_hint

    rank, size = world_hint()
    run = RunDir(sys.argv[1])
    write_json(run.report / f"{rank}.json", lead(run) if rank == 0 else follow(int(sys.argv[2])))
    # mpiexec ends all ranks when the first one leaves without MPI_Finalize.
    deadline = time.monotonic() + 10
    while len(list(run.report.glob("*.json"))) < size and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)
