"""The bridge to prime-rl: files as its source describes them, and weights published once despite kills."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training import dataflow
from megaflow_hpc.training.bridges import prime_rl
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.plan import Commit, StepPlan, TrainingFiles
from tests.support.bridges import TRAINING, first_step
from tests.support.tensors import safetensors
from tests.support.training import Pods, meanwhile, training_run

COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"
"""Commit of github.com/PrimeIntellect-ai/prime-rl whose src/prime_rl/transports/rollouts/types.py was read."""
PINNED: list[tuple[str, type]] = [
    ("input_ids", list[int]),
    ("loss_mask", list[bool]),
    ("advantages", list[float]),
    ("inference_logprobs", list[float]),
    ("position_ids", list[int]),
    ("sequence_lengths", list[int]),
    ("temperatures", list[float]),
    ("env_names", list[str]),
    ("seq_lens", list[int]),
]
"""Fields of its ``MicroBatch`` without a default. The struct is array-like, so only their order matters."""
OPTIONAL = [
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
]
"""The following fields, ``None`` by default."""
Theirs = msgspec.defstruct("Theirs", [*PINNED, *((name, Any, None) for name in OPTIONAL)], array_like=True, gc=False)
FORK = multiprocessing.get_context("fork")


class Trainer:
    """Uses the files as prime-rl's trainer does. Its weights are a digest of all batches."""

    def __init__(self, output: Path, ranks: int = 1) -> None:
        self.output, self.ranks, self.weights = output, ranks, [b"\0" * 32]
        self.received: list[list[bytes]] = []

    def step(self) -> bool:
        """Train the next step if its files exist."""
        number = len(self.weights)
        paths = [self.output / f"rollouts/step_{number}/rank_{rank}.bin" for rank in range(self.ranks)]
        if not all(path.exists() for path in paths):
            return False
        self.received.append([path.read_bytes() for path in paths])
        decoded = [msgspec.msgpack.decode(data, type=list[Theirs]) for data in self.received[-1]]
        assert len({len(batches) for batches in decoded}) == 1
        self.weights.append(hashlib.sha256(self.weights[-1] + b"".join(self.received[-1])).digest())
        self.broadcast(number)
        shutil.rmtree(self.output / f"broadcasts/step_{max(number - 2, 0)}", ignore_errors=True)
        return True

    def broadcast(self, number: int) -> None:
        folder = self.output / f"broadcasts/step_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(safetensors(self.weights[number]))
        (folder / "STABLE").touch()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(dataflow, "MAX_POLL_S", 0.02)


def serve(run: RunDir, output: Path, *more: str) -> int:
    return prime_rl.main([str(run.path), "--output", str(output), "--tokens", "64", *more])


def test_the_fields_are_those_of_the_pinned_source_in_their_order() -> None:
    ours = msgspec.structs.fields(prime_rl.PrimeMicroBatch)
    assert [(field.name, field.type) for field in ours if field.required] == PINNED
    assert [field.name for field in ours if not field.required] == OPTIONAL
    assert all(field.default is None for field in ours if not field.required)
    assert prime_rl.PrimeMicroBatch.__struct_config__.array_like
    assert prime_rl.__doc__ is not None
    assert COMMIT in prime_rl.__doc__


def test_every_step_reaches_their_trainer_and_its_weights_become_the_next_version(tmp_path: Path) -> None:
    run, output = training_run(tmp_path / "run", TRAINING, tasks=3, samples=4), tmp_path / "prime"
    own, trainer = Pods(run), Trainer(output, ranks=2)
    with meanwhile(own.work, trainer.step):
        assert serve(run, output, "--ranks", "2") == 0
    assert len(trainer.received) == 3
    files = TrainingFiles(run, "default")
    for number, version in enumerate(versions(run, "default"), 1):
        commit = files.read(Commit, number)
        assert commit is not None
        assert commit.weights == version.version
        assert Path(version.path, "model.safetensors").read_bytes() == safetensors(trainer.weights[number])
        assert not Path(version.path, "STABLE").exists()
    assert version.ordinal == 3
    plan = files.read(StepPlan, 3)
    assert plan is not None
    batches = [b for data in trainer.received[2] for b in msgspec.msgpack.decode(data, type=list[Theirs])]
    sampled = sum(sum(b.loss_mask) for b in batches)
    assert sampled == sum(sum(rollout.sampled) for rollout in plan.rollouts if rollout.weight)
    assert sum(a for b in batches for a in b.advantages) == pytest.approx(
        sum(r.advantage * sum(r.sampled) for r in plan.rollouts), abs=1e-4
    )


def test_a_step_in_their_form_lies_as_their_packing_lays_it(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    ours = list(step.minibatch().microbatches(64))
    ranks = prime_rl.grid(step, 64, 3, "sample")
    theirs = [msgspec.msgpack.decode(data, type=Theirs) for each in zip(*ranks, strict=True) for data in each]
    assert len(theirs) % 3 == 0
    for batch, packed in zip(theirs, ours, strict=False):
        assert batch.input_ids == packed.tokens.tolist()
        assert [int(counts) for counts in batch.loss_mask] == packed.mask.tolist()
        assert batch.position_ids == [n for length in batch.sequence_lengths for n in range(length)]
        assert batch.seq_lens == batch.sequence_lengths == np.diff(packed.offsets).tolist()
        assert batch.advantages == packed.advantages.tolist()
        assert [p for p, m in zip(batch.inference_logprobs, batch.loss_mask, strict=True) if not m and p] == []
        assert np.array_equal(np.array(batch.inference_logprobs, np.float32)[packed.mask == 1],
                              packed.logprobs[packed.mask == 1])  # fmt: skip
        assert batch.rl_weights is None
    for batch in theirs[len(ours) :]:
        assert not any(batch.loss_mask)
        assert len(batch.input_ids) > 1
    packed = ours[0]
    packed.weights[packed.mask == 1] = 0.5
    weighted = prime_rl._micro_batch(packed, "sample", 0.7)
    assert weighted.rl_weights == (0.5 * packed.mask).tolist()
    assert set(weighted.temperatures) == {0.7}


def test_killed_at_any_instant_it_publishes_each_broadcast_once_and_hands_over_no_step_twice(tmp_path: Path) -> None:
    steps, draw = 6, random.Random(1)
    run = training_run(tmp_path / "run", {**TRAINING, "steps": steps}, tasks=4, samples=3)
    output = tmp_path / "prime"
    own, trainer = Pods(run), Trainer(output)
    kills = 0
    with meanwhile(own.work, trainer.step):
        while True:
            child = FORK.Process(target=lambda: os._exit(serve(run, output)))
            child.start()
            child.join(draw.uniform(0.0, 0.1) if kills < 12 else 60)
            if child.exitcode is not None:
                break
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            kills += 1
    assert child.exitcode == 0
    assert kills
    found = versions(run, "default")
    assert [v.token for v in found][-3:] == [f"step-{n:06d}" for n in range(steps - 2, steps + 1)]
    assert [v.ordinal for v in found][-1] == steps
    for version in found:
        weights = Path(version.path, "model.safetensors").read_bytes()
        assert weights == safetensors(trainer.weights[version.ordinal])
    kept = TrainingFiles(run, "default").checkpoints
    assert [path.name for path in kept.iterdir()] == [str(steps)]  # no half-copied weights remain
    for number, received in enumerate(trainer.received, 1):
        assert [(output / f"rollouts/step_{number}/rank_0.bin").read_bytes()] == received
    plans = [TrainingFiles(run, "default").read(StepPlan, number) for number in range(1, steps + 1)]
    trained = [rollout.id for plan in plans if plan for rollout in plan.rollouts]
    assert len(trained) == len(set(trained)) == steps * 2 * 3


def test_notes_that_a_bridge_left_when_it_died_after_the_last_step_are_removed_by_the_next(tmp_path: Path) -> None:
    run, output = training_run(tmp_path / "run", {**TRAINING, "steps": 1}), tmp_path / "prime"
    own, trainer = Pods(run), Trainer(output)
    with meanwhile(own.work, trainer.step):
        assert serve(run, output) == 0
    kept = TrainingFiles(run, "default").checkpoints
    (kept / "1").rename(kept / "4")
    files = TrainingFiles(run, "default")
    commit = files.read(Commit, 1)
    assert commit is not None
    files.commit(msgspec.structs.replace(commit, step=4, checkpoint=str((kept / "4").relative_to(run.path))))
    for name, content in {
        "1": [prime_rl.NOTE_FILE],
        "2": [f".{prime_rl.NOTE_FILE}.7.0a"],
        "3": [],
        "5": [],
        "0": ["other"],
    }.items():
        (kept / name).mkdir()
        for file in content:
            (kept / name / file).touch()
    assert serve(run, output) == 0
    assert sorted(path.name for path in kept.iterdir()) == ["0", "4", "5"], "neither another's nor a later one"


def test_a_broadcast_that_is_written_again_under_its_old_mark_is_not_taken_in_the_middle(tmp_path: Path) -> None:
    output, target = tmp_path / "prime", tmp_path / "target"
    trainer = Trainer(output)
    folder = output / "broadcasts" / "step_0"
    broadcast = prime_rl.Broadcast(folder)
    assert not broadcast.take(target)
    trainer.broadcast(0)
    assert broadcast.take(target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    whole = (folder / "model.safetensors").read_bytes()
    time.sleep(0.02)  # longer than the time resolution of a file system
    (folder / "model.safetensors").write_bytes(whole)
    assert not broadcast.take(target)  # its trainer has not finished
    (folder / "STABLE").touch()
    assert broadcast.take(target)
    (folder / "model.safetensors").write_bytes(whole[:-1])
    (folder / "STABLE").touch()
    assert not broadcast.take(target)  # truncated
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "tmp-rank1.safetensors").write_bytes(whole)
    (folder / "STABLE").touch()
    assert not broadcast.take(target)  # a rank has not renamed its part
    (folder / "tmp-rank1.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"v": "model-00002-of-00002.safetensors"}}')
    (folder / "STABLE").touch()
    assert not broadcast.take(target)


def test_a_broadcast_whose_mark_seems_older_is_taken_once_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(tmp_path).broadcast(0)
    os.utime(tmp_path / "broadcasts/step_0/STABLE", (0, 0))  # written by a node with another clock
    broadcast = prime_rl.Broadcast(tmp_path / "broadcasts/step_0")
    assert not broadcast.take(tmp_path / "target")
    monkeypatch.setattr(prime_rl, "UNCHANGED_S", 0.0)
    assert broadcast.take(tmp_path / "target")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": {"default": {"loss": {"epochs": 2}}}}, "leave out epochs and minibatch"),
        ({"policies": {"default": {"loss": {"minibatch": 1}}}}, "leave out epochs and minibatch"),
    ],
)
def test_several_optimizer_steps_in_a_step_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    run = training_run(tmp_path / "run", {**TRAINING, **changes})
    with pytest.raises(ConfigError, match=said):
        prime_rl.PrimeBridge(Dataflow(run), tmp_path / "prime", 1, 64, print)


def test_files_of_another_run_are_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = training_run(tmp_path / "run", TRAINING), tmp_path / "prime"
    (output / "rollouts" / "step_1").mkdir(parents=True)
    (output / "rollouts" / "step_1" / "rank_0.bin").write_bytes(b"\x90")
    own = Pods(run)
    with meanwhile(own.work):
        assert serve(run, output) == 2
    assert "give each run its own --output" in capsys.readouterr().err
    assert (output / "rollouts" / "step_1" / "rank_0.bin").read_bytes() == b"\x90"


def test_an_output_in_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory; create the parent directory of --output"):
        prime_rl.hand_over(tmp_path / "none" / "prime", 1, [])


def test_what_was_begun_with_other_ranks_is_not_gone_on_with(tmp_path: Path) -> None:
    run, output = training_run(tmp_path / "run", {**TRAINING, "steps": 1}), tmp_path / "prime"
    own, trainer = Pods(run), Trainer(output)
    with meanwhile(own.work, trainer.step):
        assert serve(run, output) == 0
    assert serve(run, output) == 0  # nothing is left to do
    with pytest.raises(ConfigError, match="continue with the same settings"):
        prime_rl.PrimeBridge(Dataflow(run), output, 2, 64, print)
