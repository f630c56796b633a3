"""Rollouts that the end of an allocation cuts short, and that go on where they were."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign import Run
from megaflow_hpc.environments.provider import default_scratch
from megaflow_hpc.types import Rollout, Trajectory

Make = Callable[..., Path]

MODEL = "model: {engine: scripted, script: answers.yaml}\nseed: 7\n"
LATE_S = 6.0
"""The second answer comes so late that a pod which is asked to drain meanwhile has heard of it."""


def block(command: str) -> str:
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"


class Cut:
    """A campaign of one rollout of three commands and the end, whose test finds out whether each ran exactly once."""

    def __init__(self, folder: Path, make_campaign: Make, extra: str = "", late_s: float = LATE_S) -> None:
        self.mark = f"kept-{uuid.uuid4().hex}"
        commands = [
            f"mkdir /{self.mark} && echo one > log",
            "rm /etc/issue; echo two >> log",
            f"test -d /{self.mark} && echo three >> log",
            "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ]
        answers: list[Any] = [block(command) for command in commands]
        answers[1] = {"text": answers[1], "delay_s": late_s}
        (folder / "answers.yaml").write_text(json.dumps({"default": answers}))
        test = f'[ "$(cat log)" = "$(printf "one\\ntwo\\nthree")" ] && [ -d /{self.mark} ] && [ ! -e /etc/issue ]'
        path = make_campaign(1, MODEL + extra, agent="mini-swe-agent", test=test)
        self.run = Campaign.from_yaml(path).submit(launcher="local")

    def drain(self) -> None:
        """While the answer to its second call is awaited."""
        local = self.run.local
        assert local is not None
        deadline = time.monotonic() + 90
        while not list(default_scratch().glob(f"owners/*/*/layer/upper/{self.mark}")):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        local.drain()
        assert local.pod.wait(60) == 0
        local.stop()
        assert not self.run.ledger.finished

    def partials(self) -> list[Path]:
        return [path for path in self.run.dir.partial.iterdir() if path.suffix != ".json"]

    def resume(self) -> None:
        self.run = Run(self.run.path)
        assert self.run.resume(launcher="local")

    def finish(self) -> Trajectory:
        self.resume()
        self.run.wait(timeout_s=120)
        assert self.run.ledger.finished, self.log()
        assert not self.run.dir.partial.exists(), "nothing of it is left behind"
        with open_trajectories(self.run.path) as store:
            (row,) = store
            return row.trajectory()

    def log(self) -> str:
        return (self.run.dir.logs / "pod-local.log").read_text()


def test_a_rollout_goes_on_where_its_allocation_ended(tmp_path: Path, make_campaign: Make) -> None:
    cut = Cut(tmp_path, make_campaign)
    cut.drain()
    assert len(cut.partials()) == 1
    trajectory = cut.finish()
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", "", 1.0)
    assert [message["role"] for message in trajectory.messages].count("assistant") == len(trajectory.turns) == 4
    assert len(trajectory.sequences) == 1, "the second part goes on from the tokens of the first"
    first, second = trajectory.attempts
    assert (first.attempt, first.status, first.error_kind) == (0, "cancelled", "walltime")
    assert "its state was kept" in first.error
    assert (second.attempt, second.status, trajectory.attempt) == (1, "completed", 1)
    assert trajectory.agent_s is not None
    assert trajectory.agent_s > LATE_S, "the agent's time is that of both parts"
    assert trajectory.seed == Rollout("task0", "default", 0, "").seed(7, 0), "calls are numbered through"


def test_a_damaged_state_means_a_fresh_start(tmp_path: Path, make_campaign: Make) -> None:
    cut = Cut(tmp_path, make_campaign)
    cut.drain()
    (partial,) = cut.partials()
    content = bytearray(partial.read_bytes())
    content[len(content) // 2] ^= 1
    partial.write_bytes(content)
    trajectory = cut.finish()
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("completed", 1.0, 4)
    assert len(trajectory.attempts) == 2
    assert "damaged" in cut.log()
