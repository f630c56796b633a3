"""Rollouts that the end of an allocation cuts short, and that go on where they were."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.environments.sandbox.scratch import default_scratch
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.process import argv, descendants
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.preemption import MAX_CHECKPOINT_BYTES, Checkpoint, Preemption, new_name
from megaflow_hpc.types import Rollout
from tests.support import samples
from tests.support.campaigns import Make
from tests.support.scripted import ENGINE, block

LATE_S = 10.0
"""The second answers come so late that all rollouts wait for theirs when the pod drains, on a busy machine too."""

STEPS = """\
schema_version = "1.4"
[environment]
docker_image = "base"
workdir = "/app"
[[steps]]
name = "first"
[steps.agent]
user = "1000"
[[steps]]
name = "second"
"""

SCHEDULE = "seed: 7\nslurm: {pods: {slots_per_rank: 4}}\n"
LARGE = f"head -c {MAX_CHECKPOINT_BYTES + 10**6} /dev/urandom > /large"


Begin = Callable[..., tuple[Run, str]]


@pytest.fixture
def start(tmp_path: Path, make_campaign: Make) -> Begin:
    """Starts a campaign whose rollouts are of three commands each; its tests find out whether each ran exactly once.

    The last task has a step before that, of one command. ``task2`` first writes a file that is too large to be kept.
    """

    def begin(extra: str, tasks: int, late_s: float = LATE_S) -> tuple[Run, str]:
        mark = f"kept-{uuid.uuid4().hex}"
        submit = block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

        def answers(before: str = "true") -> list[Any]:
            late = {"text": block("rm /etc/issue; echo two >> log"), "delay_s": late_s}
            first = block(f"{before} && mkdir /{mark} && echo one > log")
            return [first, late, block(f"test -d /{mark} && echo three >> log"), submit]

        easy = {"when": "Do the first.", "answers": [block("id -u > first"), submit]}
        large = {"when": "Task task2", "answers": answers(LARGE)}
        (tmp_path / "answers.yaml").write_text(json.dumps({"tasks": [easy, large], "default": answers()}))
        test = f'[ "$(cat log)" = "$(printf "one\\ntwo\\nthree")" ] && [ -d /{mark} ] && [ ! -e /etc/issue ]'
        path = make_campaign(tasks, extra, agent="mini-swe-agent", test=test)
        # The tests look at what was kept outside the work directory too.
        path.write_text(path.read_text().replace("network: none", "network: none, verification: as-left"))
        reward = "then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
        files = {
            "task.toml": STEPS,
            "steps/first/instruction.md": "Do the first.",
            "steps/first/tests/test.sh": f"if [ $(cat first) != 0 ]; {reward}",
            "steps/second/instruction.md": "Do the second.",
            "steps/second/tests/test.sh": f"if {test} && [ $(cat first) != 0 ]; {reward}",
        }
        for name, text in files.items():
            file = tmp_path / "tasks" / "walk" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Campaign.from_yaml(path).submit(launcher="local"), mark

    return begin


def await_first_commands(run: Run, mark: str, rollouts: int) -> None:
    deadline = time.monotonic() + 600
    while len(list(default_scratch().glob(f"owners/*/*/layer/upper/{mark}"))) < rollouts:
        assert time.monotonic() < deadline, log(run)
        time.sleep(0.05)


def drain(run: Run, mark: str, rollouts: int) -> None:
    """Ends the pod while all its rollouts wait for the answer to their second call."""
    await_first_commands(run, mark, rollouts)
    assert run.local is not None
    run.local.drain()
    assert run.local.pod.wait(60) == 0
    run.local.stop()


def log(run: Run) -> str:
    return (run.dir.logs / "pod-local.log").read_text()


def checkpoints_of(run: Run, rollout: str) -> list[Path]:
    """The files that are kept of a rollout."""
    return list(run.dir.partial.rglob(new_name(rollout).partition(".")[0] + ".*"))


def test_what_is_kept_is_bounded_for_the_rank_over_all_its_starts(tmp_path: Path) -> None:
    """Eight threads keep 1 MB each where 3.5 MB are left, and the same rank starts again."""
    (tmp_path / "layer" / "upper").mkdir(parents=True)
    (tmp_path / "layer" / "upper" / "data").write_bytes(os.urandom(10**6))
    folder, total = tmp_path / "partial", 3.5e6
    folder.mkdir()

    def kept() -> int:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def keep(preemption: Preemption, number: int) -> bool:
        checkpoint = Checkpoint(samples.trajectory(number), 0, [], 1.0, {}, {"recording": {"turns": [1]}})
        checkpoint.layer = Snapshot(str(tmp_path / "layer"), "image")
        path = folder / preemption.owner / new_name(str(number))
        try:
            checkpoint.write(path, 10**7, preemption._rank_quota())
        except SandboxError:
            return False
        return True

    first = Preemption(ModelGateway(), folder, 10**7, total)
    first.owner = "7_0.1"
    first._rank_quota()
    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda number: keep(first, number), range(8)))
    assert sum(done) <= 3
    assert kept() <= total
    while keep(first, 9):
        done.append(True)
    assert sum(done) == 3, "what was written in vain was given back"
    again = Preemption(ModelGateway(), folder, 10**7, total)
    again.owner = first.owner
    assert not keep(again, 10)
    next((folder / "7_0.1").iterdir()).unlink()  # somebody went on with it
    later = Preemption(ModelGateway(), folder, 10**7, total)
    later.owner = first.owner
    assert keep(later, 11)
    assert not keep(later, 12)
    assert kept() <= total


@pytest.mark.slow
def test_what_slurms_first_signal_found_waiting_is_kept_whatever_its_next_ones_find(start: Begin) -> None:
    """Slurm signals every process of a preempted step when its grace time begins, and again when that ends."""
    run, mark = start(f"model: {{{ENGINE}}}\n{SCHEDULE}", 1, 60.0)
    await_first_commands(run, mark, 2)
    time.sleep(5.0)  # by then the agents wait for their second answers
    assert run.local is not None
    runners = [pid for pid in descendants(run.local.pod.pid) if b"megaflow_hpc.pod.rollout.runner" in argv(pid)]
    assert runners
    for pid in runners * 20:
        with suppress(ProcessLookupError):  # it has kept its rollouts already
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.005)
    run.local.drain()
    assert run.local.pod.wait(60) == 0
    run.local.stop()
    kept = [path for path in run.dir.partial.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert len(kept) == 2, log(run)


@pytest.mark.slow
def test_rollouts_go_on_where_their_allocation_ended(start: Begin) -> None:
    """One is damaged, and one was too large to be kept: they start anew."""
    run, mark = start(f"model: {{{ENGINE}}}\n{SCHEDULE}", 3)
    drain(run, mark, 4)
    assert not run.ledger.finished
    assert not checkpoints_of(run, "task2/default/0")
    (damaged,) = checkpoints_of(run, "task1/default/0")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again = Run(run.path)
    assert again.resume(launcher="local")
    again.wait(timeout_s=600)
    assert again.ledger.finished, log(run)
    assert not run.dir.partial.exists(), "nothing is left behind"
    assert "damaged; the rollout restarts from the beginning" in log(run)
    with open_trajectories(run.path) as store:
        found = {row.id: row.trajectory() for row in store}
    assert len(found) == 4
    large = found.pop("task2/default/0")
    assert (large.status, large.reward) == ("completed", 1.0)
    assert "its files take more than" in large.attempts[0].error
    for trajectory in found.values():
        steps = 2 if trajectory.task_id == "walk" else 1
        assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", "", 1.0)
        assert len(trajectory.sequences) == steps, "what comes later goes on from the tokens of what was kept"
        assert len(trajectory.turns) == 2 * (steps - 1) + 4
        first, second = trajectory.attempts
        assert (first.attempt, first.status, first.error_kind) == (0, "cancelled", "walltime")
        assert "its state was kept" in first.error
        assert (second.attempt, second.status, trajectory.attempt) == (1, "completed", 1)
    kept, anew = found["task0/default/0"], found["task1/default/0"]
    rollout = Rollout("task0", "default", 0, "")
    assert kept.seed == rollout.seed(7, 0), "the numbers of its calls go on"
    assert anew.seed == replace(rollout, task_id="task1").seed(7, 1)
    assert kept.agent_s is not None
    assert kept.agent_s > LATE_S, "its time is that of both parts"
