"""A campaign whose tasks, agents and errors attack readers of the report, and one to compare it with."""

from __future__ import annotations

import json

import pytest

from megaflow_hpc.rundir.events import AttemptEvent, EventWriter, PodEvent, RolloutEvent, WorkerEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import gather
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Artifact
from tests.support import samples
from tests.support.reports import ATTACK, POLICIES


def trajectory(number: int, passed: bool, **changes: object) -> Trajectory:
    task, policy = f"task{number % 6}", POLICIES[number // 24]
    rollout = f"{task}/{policy}/{number}"
    fields = {
        "id": rollout,
        "task_id": task,
        "group_id": f"{task}/{policy}",
        "policy": policy,
        "reward": float(passed),
        "setup_s": 1.0,
        "agent_s": 30.0,
        "verify_s": 2.0,
        "started_at": 1.7e9 + 10 * (number // 4),
        "finished_at": 1.7e9 + 10 * (number // 4) + 40 + number,
        "artifacts": [Artifact("verifier.log", b"1 failed in 0.1 s")],
        **changes,
    }
    return samples.trajectory(number, task, **fields)


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """48 rollouts of two policies; rollout 3 carries the attack in its messages, rollout 5 in its error."""
    run = RunDir(tmp_path_factory.mktemp("report") / "attacked")
    run.create()
    write_run(run, RunRecord(campaign={"name": f"evil {ATTACK}"}, total=50))
    messages = [
        {"role": "user", "content": ATTACK},
        {"role": f"assistant {ATTACK}", "content": [{"type": "text", "text": ATTACK}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": ATTACK, "arguments": ATTACK}}]},
    ]
    changes: dict[int, dict[str, object]] = {
        3: {"messages": messages, "node": f"node{ATTACK}"},
        5: {"status": "failed", "error_kind": "sandbox", "error": f"broke 17 {ATTACK}", "reward": None},
        11: {"status": "failed", "error_kind": "sandbox", "error": f"broke 18 {ATTACK}", "reward": None},
    }
    made = [trajectory(n, n % 6 < 2 or n % 12 == 2, **changes.get(n, {})) for n in range(48)]
    samples.commit(run, "pod0", *[(0, 0, one) for one in made])
    gather(run, {})
    writer = EventWriter(run.event_file("pod0", "0"))
    writer.write(PodEvent(state="started", node="node-1", job_id="17_0"))
    writer.write(WorkerEvent(rank=1, state="ready", slots=8, node="node-1"))
    for one in made:
        writer.write(RolloutEvent(id=one.id, status=one.status, reward=one.reward))
    writer.write(AttemptEvent(id=made[0].id, attempt=0, kind="node", error=ATTACK))
    writer.write(PodEvent(state="done", why=ATTACK))
    writer.close()
    lines = [json.loads(line) for line in run.event_file("pod0", "0").read_text().splitlines()]
    for number, line in enumerate(lines):  # they were written at once; spread them over the time of the rollouts
        line["t"] = 1.7e9 + number * 4
    run.event_file("pod0", "0").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture(scope="session")
def better(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same tasks, with the first policy only and not gathered. Every rollout of task 2 passes."""
    run = samples.run_dir(tmp_path_factory.mktemp("report") / "better", "better")
    samples.commit(run, "pod0", *[(0, 0, trajectory(n, n % 6 < 3)) for n in range(24)])
    return run
