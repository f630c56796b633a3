"""Steps that cannot be trained as planned, with a real trainer that is killed at random instants."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks

SEED = 1
"""Draws the instants of the kills."""

pytestmark = pytest.mark.slow  # one start of torch, from which all trainers are forked

SCRIPT = r'''
import faulthandler, functools, itertools, json, math, os, random, shutil, sys, time
from pathlib import Path
import torch
from launchers.tiny_model import make
from megaflow_hpc.rundir import amendments
from megaflow_hpc.rundir.amendments import Amendments
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit, Trainer
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training import buffer
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.training.trainer import __main__ as trainer
from megaflow_hpc.training.trainer.model import PolicyModel, load
from tests.support.kills import run_killed, start, status_of
from tests.support.tensors import raw_tensors
from tests.support.trainer_scripts import refusal
from tests.support.training import Uniform, trained_on, training_run

torch.set_num_threads(1)
SEED = int(sys.argv[1])
KILLS = 2
RECIPES = "megaflow_hpc.training.trainer.recipes"
buffer.LOST_AFTER_S = 0.3


class Sampler(Uniform):
    def work(self):
        super().work()
        self.finish_blocks()


def lengthen(tokens):
    """Make one rollout longer than all others."""
    def spoil(trajectory):
        if "task-0" in trajectory.id and trajectory.sample_index == 1:
            (one,) = trajectory.sequences
            version = max(one.weight_versions)
            columns = (one.tokens, 1), (one.logprobs, -5.0), (one.loss_mask, 1), (one.weight_versions, version)
            for column, value in columns:
                column.extend([value] * tokens)
    return spoil


def infinite(trajectory):
    if trajectory.id == "task-1@2/default/1":
        (one,) = trajectory.sequences
        one.logprobs[one.loss_mask.index(1)] = -math.inf


def unreadable():
    """Damage one record in each step, each in another way."""
    count = itertools.count()
    damages = {5: "payload", 12: "zeros", 20: "status", 27: "odd bytes"}
    return lambda trajectory: damages.get(next(count))


class Scene:
    def __init__(self, name, spoil=lambda trajectory: None, limit=10**9, steps=4, frozen=False, **policy):
        self.name, self.limit, self.frozen = name, limit, frozen
        fields = {"dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-4}, "recompute": False, **policy}
        training = {"policies": {"default": fields}, "batch": 2, "staleness": 0, "steps": steps, "checkpoint_every": 2}
        self.run = training_run(Path(name), training, tasks=3, samples=4, model="tiny")
        self.files, self.pods = TrainingFiles(self.run, "default"), Sampler(self.run, spoil=spoil)
        self.draw = random.Random(f"{SEED}{name}")
        self.fails_at = 0

    def train(self):
        """Runs the trainer's command, in a process with memory for rows of ``limit`` tokens, in passes with gradients
        or, if ``frozen``, in those without. Memory also runs out within the update ``fails_at``, if it is not 0."""
        faulthandler.enable()
        forward, limit, frozen = PolicyModel.forward, self.limit, self.frozen

        def bounded(policy, tokens, *rest):
            if len(tokens) > limit and torch.is_grad_enabled() != frozen:
                torch.empty(1 << 50, dtype=torch.uint8)  # fails as torch fails when memory runs out
            return forward(policy, tokens, *rest)

        count, update = itertools.count(1), torch.optim.AdamW.step

        def half(adamw, *rest):
            if next(count) == self.fails_at:
                with torch.no_grad():
                    adamw.param_groups[0]["params"][0].add_(1.0)
                torch.empty(1 << 50, dtype=torch.uint8)
            return update(adamw, *rest)

        torch.optim.AdamW.step = half
        PolicyModel.forward = bounded
        log = os.open(f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return trainer.main([str(self.run.path)])

    def until(self, condition):
        """Trains until the condition holds, then kills the trainer."""
        process = start(self.train)
        while not condition():
            assert status_of(process) is None, Path(f"{self.name}.log").read_text()
            self.pods.work()
            time.sleep(0.01)
        os.kill(process, 9)
        os.waitpid(process, 0)

    def end(self, kills=KILLS, work=lambda: None):
        def entered():
            return len(self.files.numbers(Trainer))

        def serve():
            self.pods.work()
            work()

        return run_killed(self.train, entered, serve, kills, self.draw)

    def tensors(self):
        (shard,) = (self.files.checkpoints / str(max(self.files.numbers(Commit)))).glob("*.safetensors")
        return raw_tensors(shard)

    def report(self, status):
        files = self.files
        commits = [files.read(Commit, number) for number in files.numbers(Commit)]
        planned = trained_on(files)
        ended = self.tensors()
        for path in list(files.checkpoints.iterdir()):  # a start that has lost them repeats every step
            shutil.rmtree(path)
        limit, self.limit = self.limit, 10**9
        again = self.end(kills=0)
        self.limit = limit
        log = Path(f"{self.name}.log").read_text()
        return {
            "status": [status, again],
            "steps": [commit.step for commit in commits],
            "checkpoint": bool(commits[-1].checkpoint),
            "updates": [commit.metrics["updates"] for commit in commits],
            "lr": [commit.metrics.get("lr") for commit in commits],
            "not_finite": [commit.metrics["not_finite"] for commit in commits],
            "left_out": [commit.metrics.get("dropped/amended", 0) for commit in commits],
            "rollouts": [len(planned), len(set(planned))],
            "drops": [list(files.read(StepPlan, number).drops.values()) for number in files.numbers(StepPlan)],
            "versions": [version.token for version in versions(self.run)],
            "amendments": [
                [a.step, a.skip, list(a.rollouts), a.microbatch, a.by, a.cause[:200]]
                for a in Amendments(self.run, "default").read()
            ],
            "exact": ended == self.tensors(),
            "log": log[-4000:],
            "restarts": log.count("continues from the last checkpoint"),
        }


def damaged():
    scene = Scene("damaged")
    scene.until(lambda: scene.files.numbers(StepPlan)[1:])
    rollout = scene.files.read(StepPlan, 2).rollouts[2]
    journal = scene.run.journal / rollout.place.journal
    with open(journal, "r+b") as file:
        file.seek(rollout.place.start + 60)
        byte = file.read(1)[0]
        file.seek(rollout.place.start + 60)
        file.write(bytes([byte ^ 0xFF]))
    return {**scene.report(scene.end()), "damaged": rollout.id}


def never_finite():
    count = itertools.count()

    def spoil(trajectory):
        if next(count) in (16, 24, 32):  # one rollout of each of the steps 3, 4 and 5
            (one,) = trajectory.sequences
            one.logprobs[one.loss_mask.index(1)] = -math.inf

    scene = Scene("never finite", spoil, steps=7)
    first = scene.end(kills=0)
    log = Path("never finite.log").read_text()
    return {**scene.report(scene.end(kills=0)), "first": [first, log[-2000:]]}


def half_updated():
    first, later = Scene("first update"), Scene("half updated")
    first.fails_at, later.fails_at = 1, 3
    ends = [[scene.end(kills=0), Path(f"{scene.name}.log").read_text()] for scene in (first, later)]
    later.fails_at = 0
    return {**later.report(later.end(kills=0)), "ends": ends}


def amended():
    scene = Scene("amended", steps=3)
    said = {}

    def amend():
        """Amends the training once, while it runs."""
        if said or not scene.files.numbers(Commit):
            return
        run, committed = scene.run, max(scene.files.numbers(Commit))
        said["refused"] = [
            refusal(lambda: amendments.skip(run, "default", committed)),
            refusal(lambda: amendments.skip(run, "default", 9, "task-0/default/0")),
            refusal(lambda: amendments.change(run, "default", {"steps": 0})),
        ]
        said["recorded"] = len(Amendments(run, "default").read())
        amendments.skip(run, "default", 5, cause="a test")
        amendments.change(run, "default", {"steps": 6, "lr": 5e-5})

    return {**scene.report(scene.end(work=amend)), **said}


def main():
    make(Path("tiny"), layers=1)
    load("tiny", "float32")
    result = {}
    for name, scene in {
        "long": Scene("long", lengthen(100)),
        "infinite": Scene("infinite", infinite),
        "memory": Scene("memory", lengthen(150), limit=60, microbatch=128),
        "unreadable": Scene("unreadable", unreadable()),
        "columns": Scene(
            "columns", lengthen(150), limit=60, frozen=True, microbatch=128,
            columns={"reference": f"{RECIPES}:reference"}, loss={"kind": f"{RECIPES}:kl_to_reference"},
        ),
        "updated": Scene("updated", lengthen(150), limit=100, loss={"kind": "grpo", "epochs": 2, "minibatch": 1}),
    }.items():
        result[name] = scene.report(scene.end())
    result["damaged"] = damaged()
    result["never finite"] = never_finite()
    result["half updated"] = half_updated()
    result["amended"] = amended()
    print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(SCRIPT, tmp_path_factory.mktemp("untrainable"), SEED)
    return result


def test_training_ends_and_a_start_without_checkpoints_repeats_it_bit_by_bit(found: dict[str, Any]) -> None:
    assert len(found) == 10
    for scene, result in found.items():
        assert result["status"] == [0, 0], (scene, result["log"])
        assert result["steps"] == list(range(1, len(result["steps"]) + 1)), scene
        assert result["checkpoint"], f"{scene}: the last commit names no checkpoint"
        assert result["exact"], (scene, result["log"])
        planned, different = result["rollouts"]
        assert planned == different == 8 * len(result["steps"]) - sum(map(len, result["drops"])), scene


def test_records_that_are_damaged_before_they_are_planned_are_dropped_with_their_cause(found: dict[str, Any]) -> None:
    lost = ["failed: unreadable record"]
    assert found["unreadable"]["drops"] == [lost, lost, lost, ["nothing sampled"]]
    assert found["unreadable"]["amendments"] == []
    assert "has no readable record; it counts as failed" in found["unreadable"]["log"]


def test_a_long_sequence_is_trained_in_a_row_of_its_own(found: dict[str, Any]) -> None:
    assert found["long"]["amendments"] == []
    assert found["long"]["updates"] == [1, 1, 1, 1]
    assert found["long"]["left_out"] == [0, 0, 0, 0]


def test_an_update_that_is_not_finite_is_skipped_and_counted(found: dict[str, Any]) -> None:
    result = found["infinite"]
    spoiled = result["not_finite"].index(1)
    assert [sum(result["not_finite"]), sum(result["updates"]), result["updates"][spoiled]] == [1, 3, 0]
    assert f"step-{spoiled + 1:06d}" not in result["versions"]
    assert f"step {spoiled + 1}: 1 updates were not finite" in result["log"]


def test_a_training_that_ended_after_steps_that_were_not_finite_continues_beyond_them(found: dict[str, Any]) -> None:
    result = found["never finite"]
    status, log = result["first"]
    assert status == 2
    assert "the gradients of the last 3 steps were not finite" in log
    assert result["updates"] == [1, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("scene", ["memory", "columns"])
def test_rows_that_do_not_fit_into_memory_are_halved_and_a_rollout_that_does_not_fit_is_left_out(
    found: dict[str, Any], scene: str
) -> None:
    result = found[scene]
    halved = [amendment for amendment in result["amendments"] if amendment[3]]
    left_out = [amendment[2] for amendment in result["amendments"] if amendment[2]]
    assert len(halved) == {"memory": 1, "columns": 2}[scene]  # their rows are packed differently
    assert halved[-1][3] <= 60
    assert all(len(names) == 1 and names[0].startswith("task-0") and names[0].endswith("/1") for names in left_out)
    assert sum(result["left_out"]) == len(left_out) >= 1
    assert all("memory" in amendment[5] and amendment[4] == "trainer" for amendment in result["amendments"])


def test_a_step_that_has_changed_the_weights_is_amended_from_the_last_checkpoint(found: dict[str, Any]) -> None:
    assert found["updated"]["restarts"] >= 1
    assert all(amendment[2] for amendment in found["updated"]["amendments"])
    assert found["updated"]["updates"] == [4, 4, 4, 4]


def test_memory_that_runs_out_within_an_update_ends_the_training_with_the_weights_of_the_last_checkpoint(
    found: dict[str, Any],
) -> None:
    (first, hopeless), (later, log) = found["half updated"]["ends"]
    assert [first, later] == [2, 1], log
    for said in (hopeless, log):
        assert "trainer: tiny: out of memory in the optimizer's step" in said
        assert "optimizer.offload" in said
        assert "Traceback" not in said
    assert "the next start continues from the last checkpoint" in log
    assert found["half updated"]["amendments"] == []
    assert found["half updated"]["updates"] == [1, 1, 1, 1]


def test_a_damaged_record_is_left_out_by_name(found: dict[str, Any]) -> None:
    result = found["damaged"]
    ((step, skip, rollouts, _, by, cause),) = result["amendments"]
    assert [step, skip, rollouts, by] == [2, False, [result["damaged"]], "trainer"]
    assert "no whole record at byte" in cause
    assert result["left_out"] == [0, 1, 0, 0]


def test_a_training_is_amended_while_it_runs(found: dict[str, Any]) -> None:
    result = found["amended"]
    committed, unplanned, steps = result["refused"]
    assert "is committed already; nothing was changed" in committed
    assert "step 9 of policy 'default' is not planned yet" in unplanned
    assert "steps 0: expected a whole number of at least 1" in steps
    assert result["recorded"] == 0
    assert len(result["steps"]) == 6
    assert result["updates"] == [1, 1, 1, 1, 0, 1]
    assert result["left_out"][4] == 8
    assert result["lr"][0] == 1e-4
    assert result["lr"][-1] == 5e-5
    assert "step-000005" not in result["versions"]
