"""A pod under mpiexec whose rank 0 is real and whose workers play what the task ids say.

``mpiexec -n N python -m tests.support.world RUN``: ``RUN/world.json`` holds the sections ``scheduling`` and ``limits``,
the samples a group wants, and as ``start`` which start of the pod it is. Rank 0 leaves its last word in
``RUN/report/state``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.bench.programs.dispatch_ranks import make_pod
from megaflow_hpc.config.sections import LimitsConfig, SchedulingConfig
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.pod.comm import Backoff, Comm, MpiComm
from megaflow_hpc.pod.master.loop import Master
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.scheduling import stragglers
from megaflow_hpc.rundir import budget
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Attempt, Rollout, Trajectory

SLOTS = 4
KINDS = {"sandbox-start": "sandbox", "sandbox-lost": "sandbox"}


def lead(run: RunDir, comm: Comm) -> str:
    stragglers.AT_LEAST_S = budget.LOOK_S = 0.3
    said = json.loads((run.path / "world.json").read_text())
    said["scheduling"] = SchedulingConfig(**said.get("scheduling", {}))
    said["limits"] = LimitsConfig(**{"systematic": None, **said.get("limits", {})})
    return Master(make_pod(run, comm, **said)).run()


class Player:
    """Answers ``start`` as the task's id says: ``<behaviour>-<anything>``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slow: dict[str, dict[str, Any]] = {}

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
        if behaviour == "fails":
            return [self.result(start, "failed", rest.partition("_")[0])]
        if behaviour == "badnode" and self.rank == 1:
            return [self.result(start, "failed", "sandbox-start")]
        if (behaviour == "stuck" and start["attempt"] == 0) or (behaviour == "late" and rollout.sample_index == 0):
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
        start: dict[str, Any], status: str, cause: str = "", reward: float | None = None, partial: str = ""
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
        )
        return Outcome.of(trajectory, [Attempt(**before) for before in start["attempts"]], cause, partial).to_message()


def follow(comm: MpiComm) -> None:
    player, backoff = Player(comm.rank), Backoff()
    while True:
        received = comm.poll()
        if received is None:
            comm.push()
            backoff.sleep()
            continue
        backoff.reset()
        if received[1]["op"] == "stop":
            return
        for message in player.answer(received[1]):
            comm.send(0, message)


if __name__ == "__main__":
    run = RunDir(Path(sys.argv[1]))
    comm = MpiComm()
    if comm.rank == 0:
        write_atomic(run.report / "state", lead(run, comm))
    else:
        follow(comm)
    comm.flush(5.0)
    # The first rank that leaves without MPI_Finalize takes the others with it, as mpiexec sees it.
    deadline = time.monotonic() + 10
    while not (run.report / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)
