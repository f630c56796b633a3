"""A trainer's steps on rollouts that show images, and the same steps in the forms of other trainers."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch

SCRIPT = r'''
import hashlib, json, warnings
from dataclasses import replace
from pathlib import Path

warnings.simplefilter("ignore")
import numpy as np
import torch
from launchers.tiny_model import make
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.rundir.amendments import Amendments
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.bridges import areal, prime_rl, verl
from megaflow_hpc.training.bridges.rows import rows
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.training.trainer.columns import FrozenModels, sequences_of
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import ProcessGroup, load, row_of
from megaflow_hpc.training.trainer.vision import Vision
from tests.support.trainer_scripts import refusal
from tests.support.training import rollouts, training_run
from tests.support.vision import SeeingPods

torch.set_num_threads(1)
make(Path("seeing"), vision=True, layers=1)
POLICY = {"dtype": "float32", "recompute": False, "microbatch": 150, "optimizer": {"lr": 1e-3}}


class SomeBroken(SeeingPods):
    """One rollout shows an image whose file is cut off."""

    def store(self, block, trajectory, epoch=0, damage=""):
        if trajectory.id == "task-1/default/2":
            from tests.support.samples import image
            from tests.support.vision import show
            whole = image(56, 56)
            data = whole.data[:100]
            cut = replace(whole, data=data, sha256=hashlib.sha256(data).hexdigest())
            show(trajectory.sequences[0], cut)
            trajectory.images[cut.sha256] = cut
        super().store(block, trajectory, epoch, damage)


def flow_of(name, kind=SeeingPods, steps=1, tasks=4, args=None, **policy):
    """A dataflow over a run whose rollouts are all there."""
    run = training_run(Path(name), {}, tasks=tasks, model="seeing", args=args)
    write_blocks(run, rollouts([f"task-{n}" for n in range(tasks)], 4))
    pods = kind(run, lambda rollout: rollout.sample_index / 3)
    pods.work()
    pods.close()
    config = {"policies": {"default": {**POLICY, **policy}}, "batch": tasks // steps, "steps": steps}
    return Dataflow(run, training=TrainingConfig.model_validate(config))


def trained(result):
    """A step of the trainer, against transformers' own model on each sequence alone."""
    flow = flow_of("trained", SomeBroken)
    metrics = list(TrainingLoop(flow, ProcessGroup()).steps())
    files = TrainingFiles(flow.run, "default")
    result["steps"] = [files.read(Commit, n).metrics["updates"] for n in files.numbers(Commit)]
    result["left out"] = [[list(a.rollouts), a.cause[:90]] for a in Amendments(flow.run, "default").read()]
    result["mismatch"] = metrics[-1]["mismatch"]
    base = dict(load("seeing", "float32").named_parameters())
    published = sorted(flow.run.path.glob("weights/**/model.safetensors"))
    made = dict(load(published[-1].parent, "float32").named_parameters())
    result["moved"] = sorted({name.split(".")[2] for name in base if not torch.equal(base[name], made[name])})
    frozen = flow_of("frozen", vision="frozen")
    list(TrainingLoop(frozen, ProcessGroup()).steps())
    published = sorted(frozen.run.path.glob("weights/**/model.safetensors"))
    made = dict(load(published[-1].parent, "float32").named_parameters())
    result["frozen moved"] = sorted({name.split(".")[2] for name in base if not torch.equal(base[name], made[name])})


def columned(result):
    """Columns of other models, which must see the images as the engine does."""
    options = {"image_mean": [0.1, 0.2, 0.3]}
    flow = flow_of("columned", args={"mm-processor-kwargs": options})
    loop, step = TrainingLoop(flow, ProcessGroup()), next(flow.steps())
    mine = list(sequences_of(flow, step))
    models = FrozenModels(flow, loop.policy, ProcessGroup(), step, {})
    ours, frozen = models.logprobs(None, mine), models.logprobs(models.base, mine)
    result["columns"] = [sum(bool(s.images) for s in mine), max(float(abs(a - b).max()) for a, b in zip(ours, frozen))]
    broken = flow_of("broken", SomeBroken, columns={"reference": "megaflow_hpc.training.trainer.recipes:reference"})
    list(TrainingLoop(broken, ProcessGroup()).steps())
    result["broken column"] = [list(a.rollouts) for a in Amendments(broken.run, "default").read()]


def bridged(result):
    flow = flow_of("bridged")
    step = next(flow.steps())
    own = rows(step)
    vision = Vision.read(Path("seeing"))
    policy = load("seeing", "float32")
    result["shown"] = sum(len(row.images) for row in own)
    tensors, others = verl.batch(step, vision=vision)
    width = tensors["prompts"].shape[1]
    apart = []
    for line, row in enumerate(own):  # what verl's worker computes of these columns
        place = slice(width - row.first, width - row.first + len(row.tokens))
        ids = torch.from_numpy(tensors["input_ids"][line, place])[None]
        places = torch.from_numpy(tensors["position_ids"][line, 1:, place])[:, None]
        assert tensors["position_ids"][line, 0, place].tolist() == list(range(len(row.tokens)))
        pixels = others["multi_modal_inputs"][line]
        with torch.no_grad():
            policy.causal.set_attn_implementation("eager")
            logits = policy.causal(input_ids=ids, position_ids=places, **pixels).logits[0]
            policy.causal.set_attn_implementation({"": "megaflow_packed", "text_config": "megaflow_packed"})
            ours = policy(*row_of([(row.tokens, np.arange(1, len(row.tokens)), row.images)], policy))[0][1:]
        theirs = torch.log_softmax(logits[:-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
        apart.append(float((ours - theirs).abs().max()))
    result["verl"] = max(apart)
    groups = areal.batch(step, vision=vision)
    result["areal"] = [[len(g["multi_modal_input"]), len(g["input_ids"])] for g in groups]
    counts = [int(p["image_grid_thw"].shape[0]) if p else 0 for g in groups for p in g["multi_modal_input"]]
    result["areal images"] = counts == [len(row.images) for row in own]
    pairs = zip((p for g in groups for p in g["multi_modal_input"]), others["multi_modal_inputs"], strict=True)
    result["areal as verl"] = all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)
    result["several images"] = sum(len({image.sha256 for _, image in row.images}) > 1 for row in own)
    for name, call in {"verl": lambda: verl.batch(step), "prime": lambda: prime_rl.grid(step, 10_000, 1, "x")}.items():
        result[f"{name} refused"] = refusal(call)


def with_trl(result):
    from megaflow_hpc.training.bridges import trl
    from megaflow_hpc.training.trainer.losses import Loss, Tokens, policy_loss

    options = {"image_std": [0.4, 0.5, 0.6]}
    flow = flow_of("trl", loss={"kind": "dapo"}, args={"mm_processor_kwargs": json.dumps(options)})
    trainer = trl.DataflowTrainer(flow, "seeing", trl.arguments(flow, flow.run.path / "out", disable_tqdm=True))
    item = next(trainer._stream)["item"]
    draw = torch.Generator().manual_seed(3)

    def moved(module):
        draw.manual_seed(3)
        with torch.no_grad():
            for _, parameter in sorted(module.named_parameters()):
                parameter += 0.01 * torch.randn(parameter.shape, generator=draw)

    moved(trainer.model)
    trainer.model.train()
    theirs = 0.0
    for given in trainer._micro_batches(item):
        value = trainer.compute_loss(trainer.model, trainer._prepare_inputs(given))
        value.backward()
        theirs += value.item()
    old, new = load("seeing", "float32"), load("seeing", "float32")
    old.vision.options = new.vision.options = options
    moved(new.causal)
    ours, settings = 0.0, flow.settings
    how = Loss("dapo", settings.loss.band, importance=settings.engine_importance)
    for batch in item.minibatch.microbatches(settings.microbatch):
        bounds = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()))
        images = batch.images or ((),) * len(bounds)
        parts = [(batch.tokens[a:b], batch.mask[a:b].nonzero()[0], s) for (a, b), s in zip(bounds, images)]
        with torch.no_grad():
            proximal, _ = old(*row_of(parts, old))
        now, entropies = new(*row_of(parts, new))
        packed = Tokens(torch.from_numpy(batch.offsets), torch.from_numpy(batch.mask).bool(), proximal, *(
            torch.from_numpy(x) for x in (batch.logprobs, batch.advantages, batch.weights, batch.rollout_tokens)))
        value, _ = policy_loss(how, now, entropies, packed, item.minibatch)
        value.backward()
        ours += value.item()
    theirs_of, ours_of = (dict(m.named_parameters()) for m in (trainer.model, new.causal))
    assert theirs_of.keys() == ours_of.keys()
    apart = max((theirs_of[n].grad - p.grad).abs().max().item() for n, p in ours_of.items() if p.grad is not None)
    largest = max(p.grad.abs().max().item() for p in ours_of.values() if p.grad is not None)
    result["trl"] = [theirs, ours, apart / largest]


result = {}
trained(result)
columned(result)
bridged(result)
with_trl(result)
print(json.dumps(result))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("vision"))


def test_a_step_trains_on_images_and_leaves_out_a_rollout_with_a_broken_one(found):
    assert found["steps"] == [1.0]
    ((left_out, cause),) = found["left out"]
    assert left_out == ["task-1/default/2"]
    assert "cannot be decoded" in cause
    assert found["mismatch"] < 0.5, "random weights sample almost uniformly"


def test_other_models_of_a_step_see_the_images_as_the_engine_does(found):
    shown, apart = found["columns"]
    assert shown > 5
    assert apart <= 1e-5


def test_a_broken_image_that_another_model_meets_first_leaves_its_rollout_out(found):
    assert found["broken column"] == [["task-1/default/2"]]


def test_a_frozen_vision_part_is_published_as_it_was(found):
    assert found["moved"] == ["language_model", "projector", "visual", "weight"]
    assert found["frozen moved"] == ["language_model", "weight"]


def test_verl_computes_our_log_probabilities_from_its_columns(found):
    assert found["shown"] > 10
    assert found["verl"] <= 1e-5
    assert "vision=Vision.read(MODEL)" in found["verl refused"]


def test_areal_gets_the_pixels_of_each_row(found):
    assert all(inputs == lines for inputs, lines in found["areal"])
    assert found["areal images"]
    assert found["areal as verl"]
    assert found["several images"] > 3, "two of a row could be swapped"


def test_prime_rl_is_refused_images(found):
    assert "show images" in found["prime refused"]


def test_trl_computes_our_loss_and_gradient(found):
    theirs, ours, apart = found["trl"]
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert apart <= 1e-4
