"""Models that VeOmni makes and divides, compared with this package's, and a training with them that is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.config import CampaignConfig, parse, resolved
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.plan import Commit, TrainingFiles
from tests.support.torch_ranks import run_ranks

torch_runs = pytest.mark.slow  # all of them wait for one run of torch on two ranks, and one of the command

SCRIPT = r'''
import functools, json, math, shutil, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig
from megaflow_hpc.training.trainer import veomni
from megaflow_hpc.training.trainer import checkpoint, loop
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.support.hash_trainer import watched
from tests.support.trainer_scripts import (
    distance, furthest, learn, make_models, masters, refusal, same, stored_tensors as tensors, train,
)
from megaflow_hpc.training.layout import Layout
from tests.support.training import Uniform, training_run

ALONE = ProcessGroup()
CASES = {
    "context": ("dense", {"context": 2}),
    "tied, replicas": ("tied", {"replicas": 2}),
    "experts": ("moe", {}),
}
TRAINING = {
    "policies": {"default": {
        "dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-4}, "loss": {"kind": "grpo", "minibatch": 1},
    }},
    "batch": 2, "staleness": 0, "steps": 4, "checkpoint_every": 2,
}


def start(ranks, name, parallel, read=None):
    return Optimizer(load(name, "float32", ranks, recompute=True, parallel=parallel, read=read), 1e-4)


def case(result, ranks, name, model, parallel):
    copies = parallel.get("context", 1)
    optimizer = start(ranks, model, parallel, veomni.read)
    loss, gradients, norm = learn(optimizer, ranks, copies)
    there, now = Path(name), masters(optimizer)
    checkpoint.save(there, 1, optimizer, ranks).finish()
    checkpoint.export(there / "export", optimizer.policy, ranks)
    if ranks.first:
        own = start(ALONE, model, {})
        wanted = learn(own, ALONE)
        result[name] = [abs(loss / wanted[0] - 1), distance(gradients, wanted[1]), abs(norm / wanted[2] - 1)]
        alone = learn(start(ALONE, model, {}, veomni.read), ALONE)
        result[f"{name}, one rank"] = [abs(alone[0] / wanted[0] - 1), distance(alone[1], wanted[1])]
        checkpoint.restore(there / "1", own, ALONE)
        result[f"{name}: own reads it"] = same(now, masters(own))
        result[f"{name}: files"] = sorted(tensors(model)) == sorted(tensors(there / "export"))
        result[f"{name}: exported"] = same(masters(start(ALONE, there / "export", {})), now)


def stored(result, ranks):
    """A model whose experts are divided, of which CPUs can compute no pass."""
    layout, source = Layout(ranks.count, expert=2), Path("moe")
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    policy = veomni.divided(config, source, "float32", ranks, layout)
    optimizer = Optimizer(policy, 1e-4)
    for master in optimizer.masters.values():
        master.grad = master.detach().clone()
    norm = optimizer._norm()
    optimizer.clear()
    checkpoint.save(Path("stored"), 1, optimizer, ranks).finish()
    checkpoint.export(Path("stored/export"), policy, ranks)
    if ranks.first:
        base = tensors("moe")
        result["stored"] = [
            norm / math.sqrt(sum(float(t.double().square().sum()) for t in base.values())) - 1,
            same(tensors("stored/export"), base),
        ]
        own = start(ALONE, "moe", {})
        was = masters(own)
        with torch.no_grad():
            for master in own.masters.values():
                master.zero_()
        checkpoint.restore(Path("stored/1"), own, ALONE)
        result["stored"].append(same(masters(own), was))
        with torch.no_grad():
            for master in own.masters.values():
                master.mul_(2)
        checkpoint.save(Path("stored"), 2, own, ALONE).finish()
    ranks.barrier()
    checkpoint.restore(Path("stored/2"), optimizer, ranks)
    checkpoint.export(Path("stored/doubled"), policy, ranks)
    if ranks.first:
        result["stored"].append(same(tensors("stored/doubled"), {n: 2 * t for n, t in base.items()}))


def sample():
    """The rollouts and plans of a training, by this package's trainer: a run, and three copies to train."""
    slurm = {"trainer": {"gpus": 2}}
    run = training_run(Path("run"), {**TRAINING, "trainer": "veomni"}, tasks=3, samples=4, model="dense", slurm=slurm)
    pods = Uniform(run)
    flow = watched(run, pods)
    trainer = TrainingLoop(flow, ALONE)
    losses = [line["loss"] for line in trainer.steps()]
    flow.leave()
    pods.close()
    for name in ("compared", "whole", "cut off"):
        copy = shutil.copytree("run", name)
        for folder in ("training/default/commits", "training/default/checkpoints", "weights"):
            shutil.rmtree(Path(copy) / folder)
        (Path(copy) / "weights").mkdir()
    return masters(trainer.optimizer), losses


def wrong(ranks):
    """The errors for models and layouts that it cannot train."""
    shutil.copytree("dense", "code")
    config = json.loads(Path("code/config.json").read_text())
    Path("code/config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    shutil.copytree("dense", "pickle")
    Path("pickle/model.safetensors").rename("pickle/pytorch_model.bin")
    shutil.copytree("dense", "unknown")
    Path("unknown/config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 260}))
    ask = lambda name, layout=Layout(): refusal(lambda: veomni.read(Path(name), "float32", ranks, layout))
    found = {name: ask(name) for name in ("code", "pickle", "unknown")}
    found["experts"] = ask("moe", Layout(2, expert=2))
    veomni.VERSION = "9"
    return found | {"version": ask("dense")}


def main():
    torch.set_num_threads(1)
    ranks = join()
    result = {}
    plain = loop.Optimizer
    # With the preset epsilon, rounding decides which way a gradient of nearly nothing moves a weight.
    loop.Optimizer = functools.partial(plain, eps=1e-4)
    if ranks.first:
        make_models()
        ends, losses = sample()
    ranks.barrier()
    for name, values in CASES.items():
        case(result, ranks, name, *values)
    stored(result, ranks)
    found, trainer = train("compared", ranks, read=veomni.read, agree=ranks.broadcast)
    now = masters(trainer.optimizer)
    loop.Optimizer = plain
    for name, most in (("whole", None), ("cut off", 3)):
        train(name, ranks, most, veomni.read, agree=ranks.broadcast)
    if ranks.first:
        result["parameters"] = furthest(now, ends)
        result["losses"] = [[line["loss"] for line in found], losses]
        result["wrong"] = wrong(ALONE)
    ranks.leave()
    if ranks.first:
        print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("veomni")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return run_ranks(SCRIPT, folder, ranks=2)


@torch_runs
def test_losses_gradients_and_norms_are_those_of_our_own_model(found):
    for name in ("context", "tied, replicas", "experts"):
        for where in (name, f"{name}, one rank"):
            assert max(found[where]) <= 1e-6, (where, found[where])


@torch_runs
def test_checkpoints_and_exported_files_are_the_same(found):
    for name in ("context", "tied, replicas", "experts"):
        for what in ("own reads it", "files", "exported"):
            assert found[f"{name}: {what}"] is True, (name, what)


@torch_runs
def test_divided_experts_are_stored_whole(found):
    off, *equal = found["stored"]
    assert abs(off) <= 1e-6
    assert equal == [True, True, True]


@torch_runs
def test_a_training_ends_with_the_parameters_of_our_own_model(found):
    assert found["parameters"] <= 1e-6
    theirs, ours = found["losses"]
    assert len(ours) == 4
    assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-7)


@torch_runs
def test_what_it_cannot_train_is_refused_before_any_weight_is_read(found):
    said = found["wrong"]
    assert "its own Python code" in said["code"]
    assert "has no *.safetensors" in said["pickle"]
    assert "VeOmni has no language model 'gpt2'" in said["unknown"]
    assert "parallel.expert" in said["experts"]
    assert "pip install --no-deps veomni==9" in said["version"]


@torch_runs
def test_the_command_continues_a_training_that_was_cut_off_bit_for_bit(found, folder):
    files = TrainingFiles(RunDir(folder / "cut off"), "default")
    assert files.numbers(Commit) == [1, 2, 3]
    command = "import runpy; runpy.run_module('megaflow_hpc.training.trainer', run_name='__main__')"
    assert run_ranks(command, folder, "cut off", "--json", ranks=2)["step"] == 4
    assert files.numbers(Commit) == [1, 2, 3, 4]
    last, whole = (versions(RunDir(folder / name))[-1] for name in ("cut off", "whole"))
    assert last.token == whole.token == "step-000004"
    weights = [folder / name / "weights" / str(v.version) for name, v in (("cut off", last), ("whole", whole))]
    ended, wanted = ({path.name: path.read_bytes() for path in w.glob("*.safetensors")} for w in weights)
    assert ended
    assert ended == wanted


def test_the_campaign_file_takes_it_where_it_can_train():
    fields: dict[str, Any] = {
        "name": "a",
        "tasks": "tasks",
        "agent": "nop",
        "samples": 4,
        "model": {"engine": "vllm", "path": "model"},
        "training": {"policies": {"default": {}}, "trainer": "veomni"},
    }
    campaign = parse(fields)
    assert campaign.training.trainer == "veomni"
    earlier = campaign.model_dump(mode="json")
    earlier["training"]["trainer"], earlier["slurm"]["trainer"]["kind"] = None, "veomni"
    assert resolved(CampaignConfig, earlier) == campaign, "as a run of an earlier version has it"
    divided = {"policies": {"default": {"parallel": {"tensor": 2}}}}
    with pytest.raises(ConfigError, match="veomni has no tensor parallelism"):
        parse({**fields, "training": {**divided, "trainer": "veomni"}})
    parse({**fields, "training": divided})
    with pytest.raises(ConfigError, match="'megatron'"):
        parse({**fields, "training": {**divided, "trainer": "megatron"}})
    with pytest.raises(ConfigError, match=r"unknown key 'slurm\.trainer\.kind'"):
        parse({**fields, "slurm": {"trainer": {"kind": "veomni"}}})
