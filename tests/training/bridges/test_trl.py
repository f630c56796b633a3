"""TRL's trainer on the steps of a dataflow: its loss equals ours, it continues after a restart, and it runs on two
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch and TRL

SHARED = r'''
import json, os, sys, time, warnings
from datetime import timedelta
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from launchers.tiny_model import make
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.rundir import amendments
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.bridges import trl
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.trainer.losses import Loss, Tokens, policy_loss
from megaflow_hpc.training.trainer.model import load
from tests.support.hash_trainer import watched
from tests.support.trainer_scripts import furthest, refusal, same
from tests.support.training import Pods, rollouts, training_run

torch.set_num_threads(1)
root, model = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def flow_of(name, steps=1, tasks=4, **policy):
    """A dataflow over a run whose rollouts are all there."""
    run = RunDir(root / name)
    if not rank:
        training_run(run.path, {}, tasks=tasks, model=model, agent={"name": "nop", "max_tokens": 30})
    if not rank and not list(run.journal.iterdir()):
        write_blocks(run, rollouts([f"task-{n}" for n in range(tasks)], 4))
        pods = Pods(run, lambda rollout: rollout.sample_index / 3)
        pods.work()
        pods.close()
    if ranks > 1:
        torch.distributed.barrier()
    policy = {"dtype": "float32", "recompute": False, "microbatch": 150, **policy}
    config = {"policies": {"default": policy}, "batch": tasks // steps, "steps": steps,
              "checkpoint_every": 2}
    return Dataflow(run, training=TrainingConfig.model_validate(config), rank=rank, ranks=ranks)


def trainer_of(flow, **others):
    return trl.DataflowTrainer(flow, model, trl.arguments(flow, flow.run.path / "out", disable_tqdm=True, **others))


def parameters(folder):
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors")


def learned(name, stops, watched=lambda flow: None, **others):
    """Trains three steps of two minibatches each, twice over, in as many starts as there are stops."""
    for stop in stops:
        flow = flow_of(name, steps=3, tasks=6, loss={"kind": "grpo", "minibatch": 1, "epochs": 2},
                       optimizer={"lr": 1e-3})
        trainer = trainer_of(flow, **others, **({"max_steps": stop} if stop else {}))
        watched(flow)
        trainer.train()
    made = versions(flow.run, "default")
    lines = [json.loads(line) for line in flow.files.metrics.read_text().splitlines()]
    return flow, made, lines
'''

SCRIPT = r'''
make(Path(model), layers=1)


def moved(module):
    """Its parameters as some updates would leave them, so that ratios are not 1."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=draw)


def losses(kind, importance):
    """Of the first minibatch: TRL's loss and gradient, and ours."""
    loss = {"kind": kind, "entropy": 0.01, "minibatch": 3}
    flow = flow_of(f"{kind}-{importance}", loss=loss, importance=importance)
    trainer = trainer_of(flow)
    item = next(trainer._stream)["item"]
    moved(trainer.model)
    trainer.model.train()
    theirs, parts = 0.0, 0
    for rows in trainer._micro_batches(item):
        value = trainer.compute_loss(trainer.model, trainer._prepare_inputs(rows))
        value.backward()
        theirs, parts = theirs + value.item(), parts + 1
    settings, ours = flow.settings, 0.0
    how = Loss(kind, settings.loss.band, entropy=0.01, importance=importance,
               length=flow.trained.max_tokens)
    old, new = load(model, "float32"), load(model, "float32")
    moved(new.causal)
    report = None
    for batch in item.minibatch.microbatches(settings.microbatch):
        tokens, positions = (torch.from_numpy(x).long() for x in (batch.tokens, batch.positions))
        mask, offsets = torch.from_numpy(batch.mask).bool(), torch.from_numpy(batch.offsets)
        given = tokens, positions, batch.offsets.tolist(), mask.nonzero()[:, 0]
        with torch.no_grad():
            proximal, _ = old(*given)
        now, entropies = new(*given)
        packed = Tokens(offsets, mask, proximal, *(torch.from_numpy(x) for x in (
            batch.logprobs, batch.advantages, batch.weights, batch.rollout_tokens)))
        value, _ = policy_loss(how, now, entropies, packed, item.minibatch)
        value.backward()
        ours += value.item()
    pairs = zip(trainer.model.parameters(), new.causal.parameters(), strict=True)
    apart = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    largest = max(p.grad.abs().max().item() for p in new.causal.parameters())
    return {"theirs": theirs, "ours": ours, "apart": apart, "largest": largest, "parts": parts}


result = {"losses": {}}
for kind in trl.LOSSES:
    result["losses"][f"{kind} none"] = losses(kind, "none")
result["losses"]["dapo token"] = losses("dapo", "token")
result["losses"]["gspo token"] = losses("gspo", "token")
result["losses"]["grpo sequence"] = losses("grpo", "sequence")

flow, made, lines = learned("whole", [None])
again, made_again, lines_again = learned("stopped", [8, None])
last, last_again = (parameters(f.run.weights / str(m[-1].version)) for f, m in ((flow, made), (again, made_again)))
first = parameters(Path(model))
result["train"] = {
    "ordinals": [[v.ordinal for v in m] for m in (made, made_again)],
    "steps": [[line["step"] for line in ls] for ls in (lines, lines_again)],
    "metrics": lines[-1],
    "equal": same(last, last_again),
    "moved": furthest(last, first),
    "pickles": [str(path) for path in flow.run.weights.rglob("*.bin")],
    "checkpoints": [flow.files.committed(with_checkpoint=True).checkpoint,
                    sorted(p.name for p in (flow.run.path / "out").glob("checkpoint-*"))],
}

flow, made, lines = learned("skipping", [None], lambda flow: amendments.skip(flow.run, "default", 2))
one, two, three = (parameters(flow.run.weights / str(version.version)) for version in made)
result["skipped"] = {
    "steps": [line["step"] for line in lines],
    "moved": [not same(one, two), not same(two, three)],
}


def lease_after(stop):
    """Who holds a campaign open that was trained on for so many optimizer steps of three."""
    fields = {"staleness": 0, "batch": 2, "steps": 3, "policies": {"default": {"dtype": "float32"}}}
    run = training_run(root / f"asked-{stop}", fields, tasks=2, model=model)
    flow = watched(run, Pods(run, lambda rollout: rollout.sample_index / 3))
    trainer_of(flow, max_steps=stop).train()
    return sorted(path.name for path in (run.path / "ledger" / "open").iterdir()), flow.files.committed().step


result["leases"] = [lease_after(2), lease_after(3)]
result["refused"] = [refusal(wrong) for wrong in (
    lambda: trl.arguments(flow_of("m2po", loss={"kind": "m2po"}), root),
    lambda: trainer_of(flow_of("beta"), beta=0.1),
    lambda: trainer_of(flow_of("accumulation"), gradient_accumulation_steps=2),
)]
trl.importlib.metadata.version = lambda name: "1.17.0"
result["refused"].append(refusal(trl._check_version))
print(json.dumps(result))
'''

RANKS = r'''
torch.distributed.init_process_group(
    "gloo", os.environ["MEGAFLOW_TRAINER_STORE"], rank=rank, world_size=ranks, timeout=timedelta(seconds=40)
)
taken, skipped = [], root / "skipped"


def watched(flow):
    """Notes each step that this rank takes. Step 2 is skipped after rank 0 has read its amendments, and before rank 1
    does."""
    step_of, amend, agree = flow._step, flow._amend, flow.agree

    def noted(*given):
        step = step_of(*given)
        taken.append([step.number, step.amendments, sum(rollout.weight for rollout in step.plan.rollouts)])
        return step

    def late(step):
        while rank and started.count(2) == 1 and not skipped.exists():
            time.sleep(0.01)
        started.append(step)
        return amend(step)

    def agreed(value):
        if not rank and started.count(2) == 2 and not skipped.exists():
            amendments.skip(flow.run, "default", 2)
            skipped.touch()
        return agree(value)

    started = []
    flow._step, flow._amend, flow.agree = noted, late, agreed


flow, made, lines = learned("ranks", [8, None], use_cpu=True)
one, two = (parameters(root / name / "weights" / str(made[-1].version)) for name in ("whole", "ranks"))
learned("amended", [None], watched, use_cpu=True)
everywhere = [None] * ranks
torch.distributed.all_gather_object(everywhere, taken)
torch.distributed.barrier()
if not rank:
    print(json.dumps({
        "apart": furthest(two, one),
        "ordinals": [version.ordinal for version in made],
        "steps": [line["step"] for line in lines],
        "taken": everywhere,
    }))
torch.distributed.destroy_process_group()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(SHARED + SCRIPT, folder, folder, folder / "tiny")
    return found


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(SHARED + RANKS, folder, folder, folder / "tiny", ranks=2)
    return found


def test_loss_and_gradient_of_trl_on_a_step_are_ours(results: dict[str, Any]) -> None:
    assert len(results["losses"]) == 9
    for name, found in results["losses"].items():
        assert found["parts"] > 1, name
        assert found["theirs"] == pytest.approx(found["ours"], abs=1e-6), name
        assert found["apart"] < 1e-5 * found["largest"], name
        assert found["largest"] > 1e-6, name


def test_steps_are_published_and_committed(results: dict[str, Any]) -> None:
    found = results["train"]
    assert found["steps"][0] == [1, 2, 3]
    assert found["ordinals"][0] == [1, 2, 3]
    assert found["moved"] > 1e-4
    assert found["pickles"] == []
    assert {"reward", "entropy", "clip_ratio/region_mean"} <= set(found["metrics"])
    assert found["checkpoints"] == ["out/checkpoint-12", ["checkpoint-12", "checkpoint-8"]]


def test_a_later_start_goes_on_from_the_last_checkpoint_and_makes_the_same(results: dict[str, Any]) -> None:
    found = results["train"]
    assert found["steps"][1] == [1, 2, 3]
    assert found["ordinals"][1] == [1, 2, 3]
    assert found["equal"]


def test_the_campaign_stays_open_until_its_last_step(results: dict[str, Any]) -> None:
    assert results["leases"] == [[["default"], 2], [[], 3]]


def test_a_skipped_step_changes_nothing(results: dict[str, Any]) -> None:
    assert results["skipped"] == {"steps": [1, 2, 3], "moved": [False, True]}


def test_what_trl_cannot_do_is_refused_by_name(results: dict[str, Any]) -> None:
    names = ["'m2po'", "beta 0.1", "gradient_accumulation_steps", "TRL 1.17.0"]
    assert [name in text for name, text in zip(names, results["refused"], strict=True)] == [True] * 4


def test_two_ranks_learn_what_one_learns_and_continue_after_a_restart(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["apart"] < 1e-5
    assert on_two_ranks["steps"] == on_two_ranks["ordinals"] == [1, 2, 3]


def test_ranks_take_the_same_step_if_it_is_amended_between_their_looks(on_two_ranks: dict[str, Any]) -> None:
    first, second = on_two_ranks["taken"]
    assert first == second
    assert [number for number, _, _ in first] == [1, 2, 3]
    assert first[1][1:] == [0, first[0][2]]  # rank 0 had read step 2's amendments before it was skipped
