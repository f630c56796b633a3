"""A trainer on this machine: started again while its starts commit steps, and never after a mistake."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.campaign.local import LocalTrainer
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import TrainingView
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from tests.support.campaigns import Make, run_local, verb
from tests.support.scripted import SOLVE
from tests.support.stand_in_trainer import interpreter, trained
from tests.support.training import training_run

COMMIT = 'n=$(ls "$home/commits" | wc -l); echo "{\\"step\\": $((n + 1))}" >"$home/commits/00000$((n + 1)).json"\n'
"""What a trainer leaves of a step, by a shell."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = training_run(tmp_path / "run", {"steps": 20})
    TrainingFiles(made, "default").create()
    (made.ledger / "open").mkdir(exist_ok=True)
    (made.ledger / "open" / "default").touch()
    return made


def watched(run: RunDir, monkeypatch: pytest.MonkeyPatch, program: str, requeues: int = 2) -> LocalTrainer:
    """Runs a shell program in a trainer's place until it is not started again; its log tells of each start."""
    python = run.path / "python"
    python.write_text(f'#!/bin/bash\nrun=$3; home="$run/training/$5"\necho start\n{program}\n')
    python.chmod(0o700)
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(python))

    def start(command: list[str], role: str, own: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(run.logs / f"{role}-local.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True)

    trainer = LocalTrainer(run, "default", requeues, start)
    while not trainer.word:
        trainer.process.wait(30)
        trainer.look()
    return trainer


def starts(run: RunDir) -> int:
    return (run.logs / "trainer-default-local.log").read_text().count("start\n")


def test_one_that_is_killed_goes_on_until_it_closes_its_lease(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    end = '[ -e "$home/commits/000005.json" ] || kill -KILL $$\nrm "$run/ledger/open/default"'
    trainer = watched(run, monkeypatch, COMMIT + end)
    assert (trainer.word, starts(run)) == ("done", 5)
    word = TrainingView(run, "default").last_word()
    assert word is not None
    assert (word.word, word.exit_status) == ("done", 0)


def test_starts_that_commit_nothing_are_bounded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = f'if [ ! -e "$home/commits/000002.json" ]; then {COMMIT} fi\necho "OutOfMemoryError: 80 GB"; exit 1'
    trainer = watched(run, monkeypatch, stuck, requeues=2)
    assert (trainer.word, starts(run)) == ("lost", 2 + 3)
    word = TrainingView(run, "default").last_word()
    assert word is not None
    assert word.cause == "OutOfMemoryError: 80 GB"


@pytest.mark.parametrize(("program", "word"), [("exit 2", "failed"), ("exit 69", "failed"), ("exit 0", "lost")])
def test_a_mistake_is_not_tried_again_and_an_end_that_leaves_the_campaign_open_is_none(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, program: str, word: str
) -> None:
    assert watched(run, monkeypatch, program, requeues=1).word == word
    assert starts(run) == (1 if word == "failed" else 2)


def test_it_is_told_that_no_pod_is_queued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(run, monkeypatch, '$MEGAFLOW_ASK_PODS >"$run/asked"; exit 2')
    assert (run.path / "asked").read_text() == "0\n"


SHARED = """\
samples: 2
model: {engine: scripted, script: answers.yaml, gpus: 0}
training: {policies: {default: {}}, batch: 2, staleness: 0, steps: 3}
slurm: {trainer: {share: sleep, gpus: 0}}
"""


@pytest.fixture
def dying_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is killed once, in its second step."""
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(interpreter(tmp_path / "python", dies=2)))


@pytest.mark.slow
def test_an_engine_sleeps_in_each_step_and_wakes_when_the_trainer_is_killed_in_one(
    make_campaign: Make, dying_trainer: None
) -> None:
    result, done = run_local(make_campaign(2, SHARED, agent="mini-swe-agent", answers=SOLVE))
    assert done.returncode == 0, done.stderr
    assert (result["state"], result["rollouts"]["completed"]) == ("finished", 12)
    run = RunDir(result["run"])
    assert [line[:2] for line in trained(run)] == [["1", "1"], ["1", "2"], ["2", "2"], ["2", "3"]]
    assert [version.ordinal for version in versions(run, "default")] == [1, 2, 3]
    words = ("asleep", "the trainer has the GPUs", "loading weights 1", "loading weights 2", "loading weights 3")
    said = [line.partition("] ")[2] for line in (run.logs / "server-0-local.log").read_text().splitlines()]
    told = [word for line in said for word in words if line.startswith(word)]
    assert told[:3] == [*words[:3]], "a version is loaded when the trainer has moved off"
    turns = [place for place, word in enumerate(told) if word == words[1]]
    assert len(turns) == 4, "one step was made twice"
    assert turns[2] < told.index("loading weights 2") < turns[3]
    assert "loading weights 3" not in told[: turns[3]]  # later it may: the campaign is done
    assert told.count("loading weights 2") == 1


SUMS = """\
class Two:
    image = "none"
    instruction, answer = "What is 2 + 2?", "4"

    async def score(self, sandbox, roles):
        correct = roles["writer"][-1]["content"] == self.answer
        return {"reward": float(correct), "right": float((roles["checker"][-1]["content"] == "yes") == correct)}

class Three(Two):
    instruction, answer = "What is 3 + 3?", "6"
"""


@pytest.mark.slow
def test_a_team_learns_in_one_campaign_although_each_trainer_is_killed(tmp_path: Path, dying_trainer: None) -> None:
    """Each policy has an engine and a trainer of its own.

    The writer is wrong about one task. The checker always says no, so it is right where the writer is wrong.
    """
    (tmp_path / "sums.py").write_text(SUMS)
    answers = [{"when": "yes or no", "answers": ["no"]}, {"when": "What is", "answers": ["4"]}]
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"tasks": answers}))
    engine = {"engine": "scripted", "script": "answers.yaml"}
    fields = {
        "name": "pair",
        "tasks": ["sums:Two", "sums:Three"],
        "agent": {"name": "megaflow_hpc.agents.teams:WriterChecker", "args": {"rounds": 1}},
        "samples": 2,
        "models": {"author": engine, "second": engine},
        "team": {"writer": "author", "checker": {"policy": "second", "reward": "right"}},
        "training": {"policies": {"author": {}, "second": {}}, "batch": 2, "staleness": 1, "steps": 3},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    assert (result["state"], result["rollouts"]["completed"]) == ("finished", 3 * 2 * 2), "requested once for both"
    run = RunDir(result["run"])
    told = verb("status", run.path).stdout
    steps: dict[str, list[set[str]]] = {}
    for policy, role, rewards in (("author", "writer", (1.0, 0.0)), ("second", "checker", (0.0, 1.0))):
        assert [line[:2] for line in trained(run, policy)] == [["1", "1"], ["1", "2"], ["2", "2"], ["2", "3"]]
        own = versions(run, policy)
        assert [version.ordinal for version in own] == [1, 2, 3]
        assert f"trainer of {policy}: done" in told
        with open_trajectories(run.path) as store:
            sequences = [one for row in store for one in row.trajectory().sequences if one.policy == policy]
        served = {int(v) for one in sequences for v in one.weight_versions if v >= 0}
        assert served <= {0, *(version.version for version in own)}, "sampled by its own engine's weights alone"
        assert len(served) > 1
        plans = [plan for number in (1, 2, 3) if (plan := TrainingFiles(run, policy).read(StepPlan, number))]
        for rollout in (rollout for plan in plans for rollout in plan.rollouts):
            assert rollout.roles == {role: rewards[rollout.task == "Three"]}
        assert max(age for plan in plans for age in plan.staleness) <= 1
        steps[policy] = [{rollout.id for rollout in plan.rollouts} for plan in plans]
    assert steps["author"] == steps["second"], "each step uses the same groups"
    assert [len(step) for step in steps["author"]] == [4, 4, 4]
    with open_trajectories(run.path) as store:
        assert set().union(*steps["author"]) == set(store.ids), "each is used, and once"
