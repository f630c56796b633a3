"""The PyTorch datasets, in the engine's environment, which has torch: every way of reading yields each row once."""

from __future__ import annotations

import numpy as np
import pytest

from megaflow_hpc.trajectories import gather, open_trajectories
from tests.support.samples import commit, run_dir, trajectory
from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch

SCRIPT = r'''
import json, sys
from collections import Counter
import torch
from torch.utils.data import DataLoader, RandomSampler
from megaflow_hpc.training.dataset import PackedTrajectories, Trajectories

path = sys.argv[1]
WHERE = "status == 'completed'"


def packed(workers, context, ranks=1, epoch=0, **options):
    """Rows by rank, in the order they came."""
    found = []
    for rank in range(ranks):
        data = PackedTrajectories(path, 300, WHERE, rank=rank, ranks=ranks, oversize="skip", **options)
        data.set_epoch(epoch)
        how = {"multiprocessing_context": context} if workers else {}
        loader = DataLoader(data, batch_size=None, num_workers=workers, **how)
        found.append([list(dict.fromkeys(batch["trajectory"].tolist())) for batch in loader])
        assert len(found[-1]) == len(data)
    return found


def main():
    result = {"ways": {}, "epochs": []}
    for workers, context, ranks in [(0, None, 1), (1, "fork", 1), (3, "fork", 1), (3, "fork", 2), (1, "spawn", 1)]:
        found = packed(workers, context, ranks, seed=5)
        result["ways"][f"{workers} {context} {ranks}"] = sorted(r for rank in found for batch in rank for r in batch)
    result["order"] = [packed(0, None, seed=5), packed(3, "fork", seed=5)]
    result["epochs"] = [packed(0, None, seed=5, epoch=epoch)[0] for epoch in (0, 1)]
    result["even"] = [len(rank) for rank in packed(0, None, 4, seed=5, even=True)]

    data = PackedTrajectories(path, 300, WHERE, seed=5, oversize="skip")
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    result["persistent"] = []
    for epoch in (0, 1):
        data.set_epoch(epoch)
        result["persistent"].append([list(dict.fromkeys(batch["trajectory"].tolist())) for batch in loader])
    del loader

    rows = Trajectories(path, WHERE, pad=7, advantage="grpo")
    loader = DataLoader(rows, batch_size=4, collate_fn=Trajectories.collate, num_workers=2, sampler=RandomSampler(rows))
    seen = Counter()
    for batch in loader:
        assert batch["tokens"].shape == batch["loss_mask"].shape == batch["logprobs"].shape
        assert batch["tokens"].dtype is torch.int32 and batch["advantage"].dtype is torch.float32
        assert len(batch["advantage"]) == len(batch["group"]) == len(batch["tokens"])
        seen.update(set(batch["trajectory"].tolist()))
    result["sampled"] = [sorted(seen), max(seen.values()), len(rows)]
    one = Trajectories(path)[-1]
    result["one"] = [one["tokens"].tolist(), one["trajectory"].tolist()]
    print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return the rows that the script read, and the store."""
    folder = tmp_path_factory.mktemp("dataset")
    run = run_dir(folder / "run")
    rollouts = [trajectory(n, status="failed" if n % 10 == 0 else "completed") for n in range(60)]
    commit(run, "a", *((0, 0, t) for t in rollouts))
    path = gather(run)
    result = run_ranks(SCRIPT, folder, path)
    with open_trajectories(path) as store:
        yield result, store, rollouts


def with_tokens(store, rollouts) -> list[int]:
    """Return completed rows that have tokens and fit the budget."""
    lengths = store.lengths()
    return [row for row in range(60) if row % 10 and 0 < lengths[row] <= 300]


def test_each_row_is_read_once_by_any_workers_and_ranks(read):
    result, store, rollouts = read
    assert len(with_tokens(store, rollouts)) > 20
    assert set(result["ways"]) == {"0 None 1", "1 fork 1", "3 fork 1", "3 fork 2", "1 spawn 1"}
    for way, rows in result["ways"].items():
        assert rows == with_tokens(store, rollouts), way


def test_the_order_does_not_depend_on_the_workers(read):
    result, _, _ = read
    assert result["order"][0] == result["order"][1]


def test_epochs_shuffle_differently_also_in_workers_that_stay(read):
    result, store, rollouts = read
    first, second = result["epochs"]
    assert first != second
    assert sorted(r for batch in second for r in batch) == with_tokens(store, rollouts)
    assert result["persistent"] == [first, second]


def test_even_ranks_make_as_many_steps(read):
    result, _, _ = read
    assert len(set(result["even"])) == 1
    assert result["even"][0] > 0


def test_the_map_style_dataset_reads_batches_with_any_sampler(read):
    result, store, rollouts = read
    rows, times, length = result["sampled"]
    assert rows == [row for row in range(60) if row % 10 and store.lengths()[row] > 0]
    assert (times, length) == (1, 54)
    assert result["one"] == [np.concatenate([s.tokens for s in rollouts[59].sequences]).tolist(), [59, 59]]
