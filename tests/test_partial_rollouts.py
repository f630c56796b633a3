"""Rollouts that the end of an allocation cuts short, and that go on where they were."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign import Run
from megaflow_hpc.environments.provider import default_scratch
from megaflow_hpc.pod.partial import new_name
from megaflow_hpc.types import Rollout

Make = Callable[..., Path]

LATE_S = 5.0
"""The second answers come so late that a pod which is asked to drain meanwhile has heard of it."""

ENGINE = "engine: scripted, script: answers.yaml"
SCHEDULE = "seed: 7\nslurm: {pods: {slots_per_rank: 3}}\n"

AGENT = """
import asyncio, json, urllib.error, urllib.request
from megaflow_hpc.types import AgentResult

class Careful:
    def __init__(self):
        self.messages = [{"role": "user", "content": "What next?"}]

    def resume(self, state):
        self.messages = state["messages"]

    async def run(self, task, sandbox, model):
        def ask():
            body = json.dumps({"model": model.model_name, "messages": self.messages}).encode()
            headers = {"Authorization": "Bearer " + model.api_key, "Content-Type": "application/json"}
            request = urllib.request.Request(model.base_url + "/chat/completions", body, headers)
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]["content"]

        while True:
            try:
                answer = await asyncio.to_thread(ask)
            except urllib.error.HTTPError as refusal:
                if json.load(refusal)["error"]["type"] != "rollout_suspended":
                    raise
                return AgentResult(state={"messages": self.messages})
            command = answer.split("```")[1].partition("\\n")[2]
            if "COMPLETE" in command:
                return AgentResult(messages=self.messages)
            done = await sandbox.exec(command)
            self.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": done.stdout}]
"""


def block(command: str) -> str:
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"


@pytest.fixture
def start(
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], tuple[Run, str]]:
    """Starts a campaign whose rollouts are of three commands each; its tests find out whether each ran exactly once."""
    (tmp_path / "careful.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def begin(extra: str, tasks: int) -> tuple[Run, str]:
        mark = f"kept-{uuid.uuid4().hex}"
        commands = [
            f"mkdir /{mark} && echo one > log",
            "rm /etc/issue; echo two >> log",
            f"test -d /{mark} && echo three >> log",
            "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ]
        answers: list[Any] = [block(command) for command in commands]
        answers[1] = {"text": answers[1], "delay_s": LATE_S}
        (tmp_path / "answers.yaml").write_text(json.dumps({"default": answers}))
        test = f'[ "$(cat log)" = "$(printf "one\\ntwo\\nthree")" ] && [ -d /{mark} ] && [ ! -e /etc/issue ]'
        path = make_campaign(tasks, extra, agent="mini-swe-agent", test=test)
        return Campaign.from_yaml(path).submit(launcher="local"), mark

    return begin


def drain(run: Run, mark: str, rollouts: int) -> None:
    """Ends the pod while all its rollouts wait for the answer to their second call."""
    assert run.local is not None
    deadline = time.monotonic() + 90
    while len(list(default_scratch().glob(f"owners/*/*/layer/upper/{mark}"))) < rollouts:
        assert time.monotonic() < deadline, log(run)
        time.sleep(0.05)
    run.local.drain()
    assert run.local.pod.wait(60) == 0
    run.local.stop()


def log(run: Run) -> str:
    return (run.dir.logs / "pod-local.log").read_text()


def partial(run: Run, rollout: str) -> Path:
    """The file that is kept of a rollout."""
    (path,) = run.dir.partial.glob(new_name(rollout).partition(".")[0] + ".*")
    return path


def test_rollouts_go_on_where_their_allocation_ended(start: Callable[[str, int], tuple[Run, str]]) -> None:
    own = f"own: {{{ENGINE}, agent: 'careful:Careful', include: [task0]}}"
    run, mark = start(f"models: {{swe: {{{ENGINE}}}, {own}}}\n{SCHEDULE}", 2)
    drain(run, mark, 3)
    assert not run.ledger.finished
    damaged = partial(run, "task1/swe/0")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again = Run(run.path)
    assert again.resume(launcher="local")
    again.wait(timeout_s=120)
    assert again.ledger.finished, log(run)
    assert not run.dir.partial.exists(), "nothing is left behind"
    assert "damaged; the rollout starts anew" in log(run)
    with open_trajectories(run.path) as store:
        found = {row.id: row.trajectory() for row in store}
    assert set(found) == {"task0/swe/0", "task1/swe/0", "task0/own/0"}
    for trajectory in found.values():
        assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", "", 1.0)
        assert len(trajectory.sequences) == 1, "what comes later goes on from the tokens of what was kept"
        assert len(trajectory.turns) == 4
        first, second = trajectory.attempts
        assert (first.attempt, first.status, first.error_kind) == (0, "cancelled", "walltime")
        assert "its state was kept" in first.error
        assert (second.attempt, second.status, trajectory.attempt) == (1, "completed", 1)
    kept, anew = found["task0/swe/0"], found["task1/swe/0"]
    rollout = Rollout("task0", "swe", 0, "")
    assert kept.seed == rollout.seed(7, 0), "the numbers of its calls go on"
    assert anew.seed == replace(rollout, task_id="task1").seed(7, 1)
    assert kept.agent_s is not None
    assert kept.agent_s > LATE_S, "its time is that of both parts"


def test_a_rollout_that_is_cut_short_too_often_fails_for_that(start: Callable[[str, int], tuple[Run, str]]) -> None:
    run, mark = start(f"model: {{{ENGINE}}}\n{SCHEDULE}scheduling: {{cuts: 0}}\n", 1)
    drain(run, mark, 1)
    assert run.ledger.finished
    assert not run.dir.partial.exists()
    run.gather()
    with open_trajectories(run.path) as store:
        (row,) = store
        assert (row.status, row.error_kind) == ("failed", "walltime")
        assert "scheduling.cuts: 0" in row.error
