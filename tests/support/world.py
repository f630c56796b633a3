"""A pod under mpiexec whose rank 0 is real and whose workers play what the task ids say.

``mpiexec -n N python -m tests.support.world RUN``: ``RUN/world.json`` holds the sections ``scheduling`` and ``limits``,
the samples a group wants, as ``start`` which start of the pod it is, and as ``drain`` how its supervisor ends it.
Rank 0 leaves its last word in ``RUN/report/state``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.config.sections import LimitsConfig, SchedulingConfig
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.mpi import mpiexec
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.lease import Times
from megaflow_hpc.pod.comm import Backoff, Comm, MpiComm
from megaflow_hpc.pod.master import coordination, ranks, results, run_io
from megaflow_hpc.pod.master import drain as drain_rules
from megaflow_hpc.pod.master.loop import Master
from megaflow_hpc.pod.master.walltime import Walltime
from megaflow_hpc.pod.messages import BEAT
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.worker import MASTER_LOST_S
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectory import Attempt, Trajectory
from megaflow_hpc.types import Rollout
from tests.bench.dispatch_ranks import make_pod

SLOTS = 4
HASTY = Times(renew_s=0.5, commit_s=3.0, lease_s=6.0)
GONE = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
KINDS = {"sandbox-start": "sandbox", "sandbox-lost": "sandbox"}


def launcher(ranks: int) -> list[str]:
    """Returns the words that start so many ranks: mpiexec's, or srun's with the type in ``MEGAFLOW_TEST_SRUN``."""
    if kind := os.environ.get("MEGAFLOW_TEST_SRUN"):
        return ["srun", f"--mpi={kind}", "--kill-on-bad-exit=0", "--overcommit", "--nodes=1", "-n", str(ranks)]
    return mpiexec(ranks)


def lead(run: RunDir, comm: Comm) -> str:
    coordination.SOON_S = coordination.SELDOM_S = 0.3
    said = json.loads((run.path / "world.json").read_text())
    ranks.LOST_S = said.pop("lost_s", ranks.LOST_S)
    hangs, open_s = said.pop("hangs", False), said.pop("open_s", None)
    hangs_s = said.pop("hangs_s", run_io.LOOP_HANGS_S)
    results.MAX_INTERRUPTIONS = said.pop("max_interruptions", 16)
    said["scheduling"] = SchedulingConfig(**said.get("scheduling", {}))
    said["limits"] = LimitsConfig(**said.get("limits", {}))
    results.SYSTEMATIC_LAST = said.pop("systematic_last", 10**6)
    drain = said.pop("drain", None)
    if drain is not None:
        drain_rules.DRAIN_S, drain_rules.DRAIN_NOW_S = 0.2, 0.1
        said["walltime"] = Walltime(drain["whole_s"], time.monotonic() + drain["whole_s"])
    pod = make_pod(run, comm, **said)
    if drain is not None:
        pod.drain_file = run.path / "drain"
        pod.drain_file.unlink(missing_ok=True)
        threading.Timer(drain["whole_s"], write_atomic, (pod.drain_file, drain["word"])).start()
    run_io.LOOP_HANGS_S = 1.0 if hangs else hangs_s
    if hangs:
        pod.ledger = Ledger(run, pod.ledger.identity, times=HASTY)
        pod.drain_file = drain_file(run)
    if open_s is not None:
        pod.ledger = Ledger(run, pod.ledger.identity, times=Times(open_s=open_s))
    return Master(pod).run()


def drain_file(run: RunDir) -> Path:
    return run.path / "drain"


class Player:
    """Answers ``start`` as the task's id says: ``<behaviour>-<anything>``."""

    def __init__(self, rank: int, run: RunDir) -> None:
        self.rank, self.run = rank, run
        self.slow: dict[str, dict[str, Any]] = {}
        self.goes: signal.Signals | None = None
        """How this rank goes once its last message is on its way."""

    def answer(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["op"] == "init":
            return [{"op": "ready", "slots": SLOTS, "node": f"node{self.rank}"}]
        if message["op"] == "start":
            return self.play(message)
        if message["op"] == "cancel" and message["id"] in self.slow:
            return [self.result(self.slow.pop(message["id"]), "cancelled")]
        return []

    def play(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        rollout = Rollout(**start["rollout"])
        behaviour, _, rest = rollout.task_id.partition("_")
        once = self.run.path / "gone"
        if behaviour in GONE and self.rank == 1 and not once.exists():
            once.touch()
            self.goes = GONE[behaviour]
            return [self.result(start, "completed", reward=1.0, text="x" * int(rest))]
        if behaviour == "fails":
            return [self.result(start, "failed", rest.partition("_")[0])]
        if behaviour == "badnode" and self.rank == 1:
            return [self.result(start, "failed", "sandbox-start")]
        if behaviour == "hangs":
            os.mkfifo(drain_file(self.run))  # rank 0's loop reads it and waits for ever
            return []
        if behaviour == "late" and rollout.sample_index == 0:
            self.slow[rollout.id] = start
            return []
        if behaviour == "cut" and start["attempt"] < 2:
            return [self.result(start, "cancelled", partial=f"kept.{start['attempt']}")]
        if behaviour == "cut":
            return [self.result(start, "completed", reward=float(start["partial"] == "kept.1"))]
        reward = {"mixed": float(rollout.sample_index % 2), "solved": 1.0}.get(behaviour, 0.0)
        return [self.result(start, "completed", reward=reward)]

    @staticmethod
    def result(
        start: dict[str, Any],
        status: str,
        cause: str = "",
        reward: float | None = None,
        partial: str = "",
        text: str = "",
    ) -> dict[str, Any]:
        rollout = Rollout(**start["rollout"])
        trajectory = Trajectory.begin(
            rollout,
            start["attempt"],
            status,
            error_kind="walltime" if partial else KINDS.get(cause, cause),
            error=cause,
            reward=reward,
            started_at=time.time() - 0.01,
            messages=[{"role": "user", "content": text}],
        )
        return Outcome.of(trajectory, [Attempt(**before) for before in start["attempts"]], cause, partial).to_message()


def follow(comm: MpiComm, run: RunDir) -> None:
    player, backoff = Player(comm.rank, run), Backoff()
    beaten = heard = time.monotonic()
    while time.monotonic() - heard < MASTER_LOST_S:
        if time.monotonic() - beaten > 1.0:
            beaten = time.monotonic()
            comm.send(0, BEAT)
        received = comm.poll()
        if received is None:
            comm.push()
            backoff.sleep()
            continue
        backoff.reset()
        heard = time.monotonic()
        if received[1]["op"] == "stop":
            return
        for message in player.answer(received[1]):
            comm.send(0, message)
        if player.goes is not None:
            comm.push()
            os.kill(os.getpid(), player.goes)


if __name__ == "__main__":
    run = RunDir(Path(sys.argv[1]))
    comm = MpiComm()
    write_atomic(run.report / f"{comm.rank}.pid", str(os.getpid()))
    if comm.rank == 0:
        write_atomic(run.report / "state", lead(run, comm))
    else:
        follow(comm, run)
    comm.flush(5.0)
    # The first rank that leaves without MPI_Finalize takes the others with it, as mpiexec sees it.
    deadline = time.monotonic() + 10
    while not (run.report / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)
