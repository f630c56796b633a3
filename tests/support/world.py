"""A pod under mpiexec with a real rank 0, whose workers behave as the task ids say.

``mpiexec -n N python -m tests.support.world RUN`` reads ``RUN/world.json``: the sections ``scheduling`` and ``limits``,
the samples that a group wants, the number of the ``start``, and how the supervisor ends it (``drain``). Rank 0 leaves
its last word in ``RUN/report/state``.
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

import msgspec

from megaflow_hpc.config.sections import LimitsConfig, SchedulingConfig
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.mpi import mpiexec
from megaflow_hpc.ledger import Ledger, write_blocks
from megaflow_hpc.ledger.lease import Times
from megaflow_hpc.pod.comm import BEAT, Backoff, Comm, MpiComm
from megaflow_hpc.pod.master import coordination, ranks, results, run_io
from megaflow_hpc.pod.master import drain as drain_rules
from megaflow_hpc.pod.master.loop import Master
from megaflow_hpc.pod.master.pod import Walltime
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.worker import MASTER_LOST_S
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectory import Attempt, Trajectory
from megaflow_hpc.types import Rollout
from tests.bench.dispatch_ranks import make_pod
from tests.support.ledgers import prepared

SLOTS = 4
HASTY = Times(renew_s=0.5, commit_s=3.0, lease_s=6.0)
GONE = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
KINDS = {"sandbox-start": "sandbox", "sandbox-lost": "sandbox"}


def launcher(ranks: int) -> list[str]:
    """Returns the command that starts ranks: mpiexec, or srun with the type in ``MEGAFLOW_TEST_SRUN``."""
    if kind := os.environ.get("MEGAFLOW_TEST_SRUN"):
        return ["srun", f"--mpi={kind}", "--kill-on-bad-exit=0", "--overcommit", "--nodes=1", "-n", str(ranks)]
    return mpiexec(ranks)


def prepare(path: Path, rollouts: list[Rollout], **settings: Any) -> RunDir:
    """Makes a run directory with these rollouts in one block, and settings for the world."""
    run = prepared(path)
    write_blocks(run, rollouts, pods=1)
    configure(run, **settings)
    return run


def configure(run: RunDir, **settings: Any) -> None:
    (run.path / "world.json").write_text(json.dumps(settings))


def events(run: RunDir, kind: str = "") -> list[dict[str, Any]]:
    """Returns the events of all pods, or those of one kind. Condensed starts have only their failed attempts."""
    lines = [line for file in run.events.glob("*.jsonl") for line in file.read_text().splitlines()]
    condensed = [summaries.read_condensed(path) for path in run.events.glob("*.condensed")]
    kept = [msgspec.to_builtins(event) for starts in condensed if starts is not None for event in starts.events]
    return [event for event in [*kept, *map(json.loads, lines)] if not kind or event["event"] == kind]


CONSTANTS = (
    (coordination, "SOON_S"),
    (coordination, "SELDOM_S"),
    (ranks, "LOST_S"),
    (run_io, "LOOP_HANGS_S"),
    (results, "MAX_INTERRUPTIONS"),
    (results, "SYSTEMATIC_LAST"),
    (drain_rules, "DRAIN_NOW_S"),
)
"""What :func:`lead` changes while a pod runs."""


def lead(run: RunDir, comm: Comm) -> str:
    """Run rank 0 of a pod. Some tests call it in their own process, so it leaves no constant changed."""
    before = [getattr(module, name) for module, name in CONSTANTS]
    try:
        return _lead(run, comm)
    finally:
        for (module, name), value in zip(CONSTANTS, before, strict=True):
            setattr(module, name, value)


def _lead(run: RunDir, comm: Comm) -> str:
    coordination.SOON_S = coordination.SELDOM_S = 0.3
    settings = json.loads((run.path / "world.json").read_text())
    ranks.LOST_S = settings.pop("lost_s", ranks.LOST_S)
    hangs, open_s = settings.pop("hangs", False), settings.pop("open_s", None)
    run_io.LOOP_HANGS_S = settings.pop("hangs_s", 1.0 if hangs else run_io.LOOP_HANGS_S)
    results.MAX_INTERRUPTIONS = settings.pop("max_interruptions", 16)
    settings["scheduling"] = SchedulingConfig(**settings.get("scheduling", {}))
    settings["limits"] = LimitsConfig(**settings.get("limits", {}))
    results.SYSTEMATIC_LAST = settings.pop("systematic_last", 10**6)
    drain = settings.pop("drain", None)
    if drain is not None:
        drain_rules.DRAIN_NOW_S = 0.1
        settings["drain_s"] = 0.2
        settings["walltime"] = Walltime(drain["whole_s"], time.monotonic() + drain["whole_s"])
    pod = make_pod(run, comm, **settings)
    if drain is not None:
        pod.drain_file = drain_file(run)
        pod.drain_file.unlink(missing_ok=True)
        threading.Timer(drain["whole_s"], write_atomic, (pod.drain_file, drain["word"])).start()
    if hangs:
        pod.ledger = Ledger(run, pod.ledger.identity, times=HASTY)
        pod.drain_file = drain_file(run)
    if open_s is not None:
        pod.ledger = Ledger(run, pod.ledger.identity, times=Times(open_s=open_s))
    return Master(pod).run()


def drain_file(run: RunDir) -> Path:
    return run.path / "drain"


class Player:
    """Answers ``start`` as the task's id says: ``<behaviour>_<anything>``."""

    def __init__(self, rank: int, run: RunDir) -> None:
        self.rank, self.run = rank, run
        self.slow: dict[str, dict[str, Any]] = {}
        self.goes: signal.Signals | None = None
        """Signal that ends this rank once its last message is in flight."""

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
            return [self.result(start, "cancelled", checkpoint=f"kept.{start['attempt']}")]
        if behaviour == "cut":
            return [self.result(start, "completed", reward=float(start["checkpoint"] == "kept.1"))]
        reward = {"mixed": float(rollout.sample_index % 2), "solved": 1.0}.get(behaviour, 0.0)
        return [self.result(start, "completed", reward=reward)]

    @staticmethod
    def result(
        start: dict[str, Any],
        status: str,
        cause: str = "",
        reward: float | None = None,
        checkpoint: str = "",
        text: str = "",
    ) -> dict[str, Any]:
        rollout = Rollout(**start["rollout"])
        trajectory = Trajectory.begin(
            rollout,
            start["attempt"],
            status,
            error_kind="walltime" if checkpoint else KINDS.get(cause, cause),
            error=cause,
            reward=reward,
            started_at=time.time() - 0.01,
            messages=[{"role": "user", "content": text}],
        )
        return Outcome.of(
            trajectory, [Attempt(**before) for before in start["attempts"]], cause, checkpoint
        ).to_message()


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
    # mpiexec ends all ranks when the first one leaves without MPI_Finalize.
    deadline = time.monotonic() + 10
    while not (run.report / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)
