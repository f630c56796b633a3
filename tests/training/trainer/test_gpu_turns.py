"""A trainer that shares its GPUs with the engine: requests, moved data, and unchanged results of its steps."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # torch on two ranks

SCRIPT = r'''
import json, threading, time
from pathlib import Path
import torch
from launchers.tiny_model import make
from megaflow_hpc.rundir.training import GpuGrant, SharedGpu
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.support.trainer_scripts import copies, same
from tests.support.training import Pods, training_run

LORA = 1
CASES = {"full": ("float32", None), "half": ("bfloat16", None), "lora": ("bfloat16", LORA)}
STEPS = 4


class Elsewhere(torch.overrides.TorchFunctionMode):
    """Has every move end in memory where nothing was before, as one to another device does."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is not torch.Tensor.to:
            return found
        self.kept.append(found.detach())
        return found.clone()


def places(optimizer):
    held = [*optimizer.policy.parameters(), *optimizer.masters.values()]
    held += [t for state in optimizer.adamw.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
    with torch.no_grad():
        return [(t.to_local() if hasattr(t, "to_local") else t).data_ptr() for t in held]


def ends(ranks, case, moves):
    """Parameters and moments after some steps; tells whether every move left nothing where it was."""
    torch.manual_seed(3)
    dtype, lora = CASES[case]
    optimizer = Optimizer(load("tiny", dtype, ranks, lora=lora), 1e-3)
    left = True
    for step in range(STEPS):
        for _ in range(2 * moves):
            before = places(optimizer)
            with Elsewhere() as kept:
                optimizer.to("cpu")
                after = places(optimizer)
            left = left and all(a != b for a, b in zip(before, after) if a)  # a rank's share may be nothing
        noise = torch.Generator().manual_seed(10 * step + ranks.rank)
        tokens = torch.randint(0, 259, (12,), generator=noise)
        positions = torch.cat([torch.arange(7), torch.arange(5)])
        logprobs, _ = optimizer.policy(tokens, positions, [0, 7, 12], (positions > 0).nonzero()[:, 0])
        (logprobs * torch.randn(12, generator=noise)).sum().backward()
        optimizer.step()
    return copies(optimizer.tensors()), left and len(before) > 20 if moves else left


class Server(threading.Thread):
    """The model server's side: gives what is wanted, and tells what there was to be seen."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self.gpu, self.run_directory = SharedGpu(run, "default"), run
        self.seen, self.over = [], threading.Event()

    def run(self):
        given = ""
        while not self.over.is_set():
            turn = self.gpu.wanted()
            if given and not turn:
                self.seen.append(["awake", current(self.run_directory, "default").version])
            if turn and turn != given:
                self.seen.append(["asleep", current(self.run_directory, "default").version])
                self.gpu.give(GpuGrant(turn, 0.25))
            given = turn
            time.sleep(0.01)


def shared(name, ranks):
    """A whole training that shares its GPUs; what the server saw, and the steps' metrics."""
    server = None
    if ranks.first:
        run = training_run(
            Path(name),
            {"policies": {"default": {"dtype": "float32"}}, "batch": 2, "staleness": 0, "steps": 3},
            tasks=3, samples=4, model="tiny", slurm={"trainer": {"share": "sleep"}},
        )
        pods = Pods(run)
        server = Server(run)
        (run.training / "default").mkdir(parents=True)
        server.start()

        def sample():
            while not server.over.is_set():
                if not server.gpu.wanted():  # an engine that sleeps samples nothing
                    pods.work()
                time.sleep(0.02)

        threading.Thread(target=sample, daemon=True).start()
    ranks.barrier()
    trainer = TrainingLoop(Dataflow(name, rank=ranks.rank, ranks=ranks.count), ranks)
    trainer._compared = True  # no engine has sampled it
    metrics = list(trainer.steps())
    if server:
        time.sleep(0.2)
        server.over.set()
    return {"seen": server.seen, "metrics": metrics} if server else {}


def main():
    ranks, alone, result = join(), ProcessGroup(0, 1, torch.device("cpu")), {}
    if ranks.first:
        make(Path("tiny"))
    ranks.barrier()
    for case in CASES:
        for who in (alone, ranks) if ranks.first else (ranks,):
            straight, moved = ends(who, case, 0)[0], ends(who, case, 1)
            result[f"{case} {who.count}"] = [same(straight, moved[0]), moved[1]]
    for who in (alone, ranks) if ranks.first else (ranks,):
        result[f"shared {who.count}"] = shared(f"shared-{who.count}", who)
    ranks.leave()
    if ranks.first:
        print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("turns"), ranks=2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["full", "half", "lora"])
def test_all_that_is_trained_is_moved_and_no_bit_of_it_changes(found, case, ranks):
    assert found[f"{case} {ranks}"] == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_sleeps_while_a_model_is_laid_out_and_in_each_step_until_its_version_is_published(found, ranks):
    turns = [["asleep", 0], ["awake", 0], ["asleep", 0], ["awake", 1], ["asleep", 1], ["awake", 2], ["asleep", 2]]
    assert found[f"shared {ranks}"]["seen"] == [*turns, ["awake", 3]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_step_tells_what_sleeping_moving_and_waking_took(found, ranks):
    metrics = found[f"shared {ranks}"]["metrics"]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["staleness_max"] == 0
        assert line["seconds/wake"] == 0.25
        assert line["seconds/sleep"] > 0
        assert line["seconds/move"] > 0
        assert line["seconds/sleep"] + line["seconds/move"] < line["seconds"]
