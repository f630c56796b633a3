"""The training loop over a run, on one rank and on two, and its command line through kills and signals."""

from __future__ import annotations

import json
import math
import re

import pytest

from megaflow_hpc.rundir.amendments import TRAINER, Amendments
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.plan import Commit, StepPlan, TrainingFiles
from tests.support.tensors import raw_tensors
from tests.support.torch_ranks import LOOPBACK, run_ranks
from tests.support.training import VOCABULARY

pytestmark = pytest.mark.slow  # each waits for several starts of torch

SCRIPT = r'''
import functools, json, math, shutil
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from launchers.tiny_model import make
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weight_delta import put_together
from megaflow_hpc.rundir.weights import current, versions
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.plan import Commit, StepPlan, TrainingFiles
from megaflow_hpc.training.trainer import loop, losses
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from tests.support.trainer_scripts import Engine, copies, furthest, refusal, train
from tests.support.training import by_index, meanwhile, training_run

# With the preset epsilon, rounding decides which way a gradient of nearly nothing moves a weight.
loop.Optimizer = functools.partial(loop.Optimizer, eps=1e-4)
TRAINING = {
    "policies": {"default": {"dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-4}}},
    "batch": 2, "staleness": 0, "steps": 3, "checkpoint_every": 2,
}


def training(**policy):
    return {**TRAINING, "policies": {"default": {**TRAINING["policies"]["default"], **policy}}}


def some_equal(rollout):
    """Gives all rollouts of one task the same reward, so that they have no advantage."""
    return 0.3 if rollout.task_id == "task-0" else 0.3 * (rollout.sample_index % 2)


def fresh(run, name):
    """A copy whose plans and rollouts are there and whose steps are not trained."""
    copy = RunDir(Path(name))
    shutil.copytree(run.path, copy.path)
    for folder in ("commits", "checkpoints"):
        shutil.rmtree(copy.path / "training/default" / folder)
    return copy


def parameters(trainer):
    return copies(trainer.optimizer.masters)


def spoil(run_name, how, alone):
    """The error of training on spoiled rollouts, the commits, and whether anything was published."""
    run = training_run(Path(run_name), training(), tasks=2, samples=4, model="tiny")
    with meanwhile(Engine(run, spoil=how).work):
        told = refusal(lambda: train(run, alone))
    files = TrainingFiles(run, "default")
    return [told, files.numbers(Commit), len(versions(run)), list(files.checkpoints.iterdir())]


def broken(run_name, alone):
    """The same of a model that has diverged."""
    run = training_run(Path(run_name), training(), tasks=2, samples=4, model="tiny")
    trainer = TrainingLoop(Dataflow(run, say=lambda text: None), alone)
    with torch.no_grad():
        next(iter(trainer.optimizer.masters.values())).fill_(math.nan)
    with meanwhile(Engine(run).work):
        told = refusal(lambda: list(trainer.steps()))
    files = TrainingFiles(run, "default")
    return [told, files.numbers(Commit), len(versions(run)), list(files.checkpoints.iterdir())]


def deltas(result, alone):
    """A model in bfloat16 at a small learning rate: bytes of each version, and whether the last is what was trained."""
    half = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.bfloat16)
    shutil.copytree("tiny", "half")
    half.save_pretrained("half")
    policy = training(dtype="bfloat16", optimizer={"lr": 1e-6})
    run = training_run(Path("delta"), {**policy, "publish_delta": True}, 3, 4, "half")
    with meanwhile(Engine(run).work):
        metrics, trainer = train(run, alone)
    found = versions(run)
    result["delta versions"] = [version.version for version in found]
    result["delta bytes"] = [
        sum(p.stat().st_size for p in Path(v.path).iterdir() if p.suffix in (".safetensors", ".delta")) for v in found
    ]
    whole = load(put_together(Path(found[-1].path), run.weights / "1", Path("whole")), "bfloat16")
    same = [torch.equal(a, b) for (_, a), (_, b) in zip(whole.trained(), trainer.policy.trained(), strict=True)]
    result["delta same"] = all(same)
    result["delta mismatch"] = [line["mismatch"] for line in metrics]


def without_advantage(result, ends, run, alone):
    """The same steps with every rollout in the passes, and a step whose rollouts have no advantage at all."""
    skips, losses.Loss.needs_all_tokens = losses.Loss.needs_all_tokens, True
    metrics, trainer = train(fresh(run, "every"), alone)
    losses.Loss.needs_all_tokens = skips
    result["every"] = [furthest(parameters(trainer), ends), metrics]
    plans = [trainer.flow.files.read(StepPlan, number) for number in (1, 2, 3)]
    result["tokens"] = [
        [sum(sum(rollout.lengths) for rollout in plan.rollouts if keep(rollout.advantage)) for plan in plans]
        for keep in (bool, math.isfinite)
    ]
    one_step = {**training(), "steps": 1}
    equal = training_run(Path("equal"), one_step, tasks=3, samples=4, model="tiny", pass_threshold=0.5)
    with meanwhile(Engine(equal, lambda rollout: 0.5, set_far).work):
        metrics, trainer = train(equal, alone)
    moved = furthest(parameters(trainer), dict(load("tiny", "float32").trained()))
    result["equal"] = [metrics, moved, trainer._compared]


def set_token(one):
    one.tokens[one.loss_mask.index(1)] = 259


def set_far(one):
    for t, sampled in enumerate(one.loss_mask):
        if sampled:
            one.logprobs[t] -= 3.0


def main():
    torch.set_num_threads(1)
    ranks = join()
    alone = ProcessGroup(0, 1, ranks.device)
    result, runs, ends = {}, {}, {}
    cases = {
        "plain": {},
        "several": {"loss": {"kind": "grpo", "epochs": 2, "minibatch": 1}},
        "m2po": {"loss": {"kind": "m2po", "entropy": 0.01, "epochs": 2}},
        "some": {"loss": {"kind": "grpo", "minibatch": 1}},
    }
    two, shared = ("plain", "m2po", "some"), ("plain", "several", "m2po")
    if ranks.first:
        make(Path("tiny"))
        for name, policy in cases.items():
            run = runs[name] = training_run(Path(name), training(**policy), tasks=3, samples=4, model="tiny")
            with meanwhile(Engine(run, some_equal if name == "some" else by_index).work):
                metrics, trainer = train(run, alone)
            result[f"metrics {name}"] = metrics
            ends[name] = parameters(trainer)
        run = runs["plain"]
        files = TrainingFiles(run, "default")
        result["checkpoints"] = sorted(path.name for path in files.checkpoints.iterdir())
        result["versions"] = [version.token for version in versions(run)]
        result["left"] = sorted(path.name for path in files.path.iterdir())
        published = load(current(run, "default").path, "float32")
        result["published"] = furthest(dict(published.trained()), ends["plain"])

        again, trainer = train(fresh(run, "again"), alone)
        result["again"] = furthest(parameters(trainer), ends["plain"])
        result["published again"] = len(versions(RunDir(Path("again"))))
        torn = fresh(run, "torn")
        train(torn, alone, most=1)
        train(torn, alone, most=2)
        resumed, trainer = train(torn, alone)
        result["torn"] = [furthest(parameters(trainer), ends["plain"]), [m["step"] for m in resumed]]
        result["twice"] = len(train(torn, alone)[0])

        without_advantage(result, ends["some"], runs["some"], alone)
        deltas(result, alone)
        result["token"] = spoil("token", set_token, alone)
        result["nan"] = broken("nan", alone)
        result["far"] = spoil("far", set_far, alone)
        make(Path("deep"), layers=3)
        other = training_run(Path("other"), training(base="deep"), tasks=2, samples=2, model="tiny")
        result["other"] = refusal(lambda: train(other, alone))
        shutil.copytree("tiny", "swapped")
        tokenizer = Path("swapped/tokenizer.json")
        tokenizer.write_text(tokenizer.read_text().replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97'))
        swapped = training_run(Path("words"), training(base="swapped"), tasks=2, samples=2, model="tiny")
        result["words"] = [tokenizer.read_text() == Path("tiny/tokenizer.json").read_text()]
        result["words"].append(refusal(lambda: train(swapped, alone)))
        missing = training_run(Path("missing"), training(), tasks=2, samples=2, model="nowhere")
        result["missing"] = refusal(lambda: train(missing, alone))
        for name in two:
            fresh(runs[name], f"two-{name}")
        for name in shared:
            fresh(runs[name], f"shared-{name}")
    ranks.barrier()
    for name in two:
        metrics, trainer = train(RunDir(Path(f"two-{name}")), ranks)
        ended = parameters(trainer)
        if ranks.first:
            result[f"two {name}"] = [furthest(ended, ends[name]), len(metrics), metrics[0]["mismatch"]]
    for name in shared:
        settings = TrainingConfig.model_validate(training(**cases[name], parallel={"context": 2}))
        metrics, trainer = train(RunDir(Path(f"shared-{name}")), ranks, training=settings)
        ended = parameters(trainer)
        if ranks.first:
            one = result[f"metrics {name}"]
            pairs = [(a, b) for a, b in zip(metrics, one, strict=True)]
            off = max(abs(a[key] - b[key]) for a, b in pairs for key in ("entropy", "kl", "updates"))
            result[f"shared {name}"] = [furthest(ended, ends[name]), off]
    ranks.leave()
    if ranks.first:
        print(json.dumps(result, default=str))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("loop"), ranks=2)


def test_every_step_is_trained_published_and_committed_with_its_metrics(found):
    metrics = found["metrics plain"]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["reward"] == line["pass_rate"] == 0.5
        assert line["updates"] == 1
        assert 4.0 < line["entropy"] < math.log(VOCABULARY)
        assert line["grad_norm"] > 0
        assert line["tokens_per_s"] > 0
        spent = {name.partition("/")[2] for name in line if name.startswith("seconds/")}
        assert {"wait", "plan", "data", "forward", "backward", "optimizer", "publish"} <= spent
    assert found["versions"] == ["step-000001", "step-000002", "step-000003"]
    assert found["checkpoints"] == ["2", "3"]
    assert found["published"] == 0.0
    assert not [name for name in found["left"] if name.startswith(".")]


def test_the_engines_log_probabilities_are_those_of_the_trainer(found):
    for line in found["metrics plain"]:
        assert line["mismatch"] <= 1e-5
        assert line["staleness"] == 0


def test_ratios_are_one_before_the_first_update_and_not_after_it(found):
    assert found["metrics plain"][0]["log_ratio_max"] == 0.0
    several = found["metrics several"][0]
    assert several["updates"] == 4
    assert several["log_ratio_max"] > 1e-4
    assert several["mismatch"] <= 1e-5  # the proximal policy is the one before the step
    assert found["metrics m2po"][0]["updates"] == 2


def test_the_same_plans_give_the_same_parameters_whatever_was_cut_off(found):
    assert found["again"] == 0.0
    assert found["published again"] == 3
    parameters, steps = found["torn"]
    assert parameters == 0.0
    assert steps == [3]
    assert found["twice"] == 0


def test_rollouts_without_advantage_cost_no_pass_and_change_no_parameter(found):
    apart, every = found["every"]
    assert apart <= 1e-6
    with_advantage, together = found["tokens"]
    assert sum(with_advantage) < 0.7 * sum(together)
    # The log-probabilities before the step take one more forward pass, which is not in this figure.
    assert [line["computed_tokens"] for line in found["metrics some"]] == with_advantage
    assert [line["computed_tokens"] for line in every] == together
    assert [line["updates"] for line in every] == [line["updates"] for line in found["metrics some"]] == [2, 2, 2]
    norms = [[line["grad_norm"] for line in lines] for lines in (found["metrics some"], every)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_step_without_any_advantage_is_committed_and_says_nothing_about_the_engine(found):
    (line,), moved, compared = found["equal"]
    assert moved == 0.0
    assert compared is False
    assert (line["computed_tokens"], line["updates"], line["grad_norm"]) == (0, 1, 0)
    assert "mismatch" not in line
    assert line["pass_rate"] == 1.0  # by the campaign's threshold


def test_two_ranks_train_as_one(found):
    for name in ("plain", "m2po", "some"):
        apart, steps, mismatch = found[f"two {name}"]
        assert apart <= 1e-6, name
        assert steps == 3
        assert mismatch <= 1e-5


def test_two_ranks_that_share_every_row_train_as_one(found):
    for name in ("plain", "several", "m2po"):
        apart, metrics = found[f"shared {name}"]
        assert apart <= 1e-6, name
        assert metrics <= 1e-5, name


def test_deltas_are_a_tenth_of_the_bytes_and_what_was_trained(found):
    assert found["delta versions"] == [1, 2, 3]
    whole, *deltas = found["delta bytes"]
    assert whole >= 10 * max(deltas)
    assert found["delta same"] is True
    assert max(found["delta mismatch"]) <= 2e-3


def test_rollouts_that_cannot_be_trained_on_change_nothing(found):
    told, commits, published, _ = found["nan"]
    assert "the gradients of the last 3 steps were not finite" in told
    assert (commits, published) == ([1, 2, 3], 0)
    for name, said in (("token", "has 259 tokens"), ("far", "another model")):
        told, commits, published, checkpoints = found[name]
        assert said in (told or ""), name
        assert (commits, published, checkpoints) == ([], 0, [])
    assert "num_hidden_layers is 3, and 2" in found["other"]
    assert found["words"][0] is False
    assert "swapped: its tokenizer" in found["words"][1]
    assert "nowhere: has no config.json" in found["missing"]


COMMAND = r'''
import json, os, shutil, signal, sys, time
from pathlib import Path
import torch
from launchers.tiny_model import make
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.training.trainer import __main__ as trainer
from tests.support.kills import start, status_of
from tests.support.training import Uniform, training_run

torch.set_num_threads(1)


def command(run, log, *options):
    def child():
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = trainer.main([str(run.path), *options])
        sys.stdout.flush()
        return status
    return start(child)


def ended(processes, pods):
    """Lets pods work until all have ended; returns their statuses."""
    found, limit = {}, time.monotonic() + 200
    while len(found) < len(processes):
        assert time.monotonic() < limit, found
        pods.work()
        for process in processes:
            if process not in found and (status := status_of(process)) is not None:
                found[process] = status
        time.sleep(0.01)
    return [found[process] for process in processes]


def steps(process, log, last, pods):
    """Lets pods work until a step is printed; returns the steps up to it."""
    while True:
        pods.work()
        lines = Path(log).read_text().splitlines(True) if Path(log).exists() else []
        done = [json.loads(line)["step"] for line in lines if line[0] == "{" and line[-1] == "\n"]
        if last in done:
            return done[: done.index(last) + 1]
        assert status_of(process) is None, lines
        time.sleep(0.01)


def interrupted():
    policies = {"default": {"dtype": "float32", "optimizer": {"lr": 1e-4}}}
    training = {"policies": policies, "batch": 2, "staleness": 0, "steps": 6, "checkpoint_every": 2}
    run = training_run(Path("run"), training, tasks=3, samples=4, model="tiny")
    files, pods = TrainingFiles(run, "default"), Uniform(run)
    process = command(run, "killed", "--json")
    found = {"killed": steps(process, "killed", 3, pods)}
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    process = command(run, "stopped", "--json")
    found["stopped"] = steps(process, "stopped", 4, pods)
    os.kill(process, signal.SIGTERM)
    found["statuses"] = ended([process], pods) + ended([command(run, "resumed", "--json")], pods)
    shutil.copytree(files.checkpoints / "6", "ended")
    for folder in ("commits", "checkpoints"):
        shutil.rmtree(files.path / folder)
    found["statuses"] += ended([command(run, "again")], pods)
    return found


def stuck():
    """Two ranks, one of which is out of memory."""
    policies = {"default": {"dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-4}}}
    training = {"policies": policies, "batch": 2, "staleness": 0, "steps": 1}
    run = training_run(Path("stuck"), training, tasks=2, samples=4, model="tiny")

    def backward(*_):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        while True:  # as in a collective operation of NCCL, which does not notice that another rank has ended
            time.sleep(1)

    torch.Tensor.backward = backward
    processes = []
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        processes.append(command(run, f"rank-{rank}"))
    return ended(processes, Uniform(run))


make(Path("tiny"))
result = interrupted()
os.environ.update(json.loads(sys.argv[1]), MEGAFLOW_TRAINER_STORE=f"file://{Path('store').absolute()}")
print(json.dumps({**result, "stuck": stuck()}))
'''


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The working directory of the command's starts, and what came of them."""
    folder = tmp_path_factory.mktemp("commands")
    return folder, run_ranks(COMMAND, folder, json.dumps(LOOPBACK))


def test_the_command_goes_on_after_sigkill_and_sigterm_bit_by_bit(commands):
    folder, found = commands
    assert found["killed"] == [1, 2, 3]
    assert found["stopped"] in ([3, 4], [1, 2, 3, 4])  # the second if the checkpoint of step 2 was not durable yet
    assert found["statuses"] == [75, 0, 0]
    run = RunDir(folder / "run")
    files = TrainingFiles(run, "default")
    assert files.numbers(StepPlan) == files.numbers(Commit) == [1, 2, 3, 4, 5, 6]
    assert [version.token for version in versions(run)][-1] == "step-000006"
    ended, again = (raw_tensors(*place.glob("*.safetensors")) for place in (folder / "ended", files.checkpoints / "6"))
    assert len(ended) > 60
    assert [name for name in ended.keys() | again.keys() if ended.get(name) != again.get(name)] == []
    last = (folder / "again").read_text().splitlines()[-1]
    assert last.startswith("step 6/6: reward 0.500, passed 50%, staleness 0.0")
    assert re.search(r"tokens/s, [\d.]+ s \(wait \d+%, checkpoint \d+%, publish \d+%\)$", last)


def test_no_rank_waits_for_one_that_is_out_of_memory(commands):
    folder, found = commands
    assert found["stuck"] == [76, 76], (folder / "rank-0").read_text()[-4000:]
    (amendment,) = Amendments(RunDir(folder / "stuck"), "default").read()
    assert (amendment.step, amendment.by) == (1, TRAINER)
    assert 0 < (amendment.microbatch or 0) <= 32
