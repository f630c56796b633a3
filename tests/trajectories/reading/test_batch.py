"""Batches: exact slices, packing, shards of ranks, advantages."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectories.reading.advantages import advantages
from tests.support.samples import commit, run_dir, sequence, trajectory


def long(number: int):
    """Some thousand tokens in one to three sequences, so that they span chunks."""
    draw = random.Random(number)
    found = []
    for _ in range(number % 3 + 1):
        one, _ = sequence(draw)
        times = draw.randint(10, 60)
        for name in ("tokens", "logprobs", "loss_mask", "weight_versions"):
            setattr(one, name, getattr(one, name) * times)
        found.append(one)
    return trajectory(number, sequences=found, turns=[])


@pytest.fixture(scope="module")
def rollouts():
    return [long(n) for n in range(24)] + [trajectory(n, sequences=[], turns=[], status="failed") for n in (24, 25)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, rollouts):
    run = run_dir(tmp_path_factory.mktemp("batch") / "run")
    commit(run, "a", *((0, 0, t) for t in rollouts))
    gather(run)
    return run


def column(rollouts, rows, name):
    held = b"".join(getattr(s, name).tobytes() for row in rows for s in rollouts[row].sequences)
    return np.nan_to_num(np.frombuffer(held, np.float32), nan=0).tobytes() if name == "logprobs" else held


NAMES = {"tokens": "tokens", "logprobs": "logprobs", "loss_mask": "loss_mask", "weight_version": "weight_versions"}


def test_batches_in_any_order_are_exact(run, rollouts):
    draw = random.Random(1)
    with open_trajectories(run.path) as store:
        for _ in range(8):
            rows = [draw.randrange(26) for _ in range(draw.randint(0, 30))]
            batch = store.batch(rows)
            assert {n: batch[n].tobytes() for n in NAMES} == {n: column(rollouts, rows, f) for n, f in NAMES.items()}
            assert batch["trajectory"].tolist() == [row for row in rows for _ in rollouts[row].sequences]


def tokens_of(rollouts, row):
    return sum(len(s.tokens) for s in rollouts[row].sequences)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("pad", [None, 0])
def test_packed_batches_hold_every_row_once_within_the_budget(run, rollouts, seed, pad):
    budget = 3 * max(len(t.sequences) * max(len(s.tokens) for s in t.sequences) for t in rollouts if t.sequences)
    with open_trajectories(run.path) as store:
        batches = list(store.batches(budget, pad=pad, seed=seed))
        seen = [row for batch in batches for row in dict.fromkeys(batch["trajectory"].tolist())]
        assert sorted(seen) == list(range(24))
        assert all(batch["tokens"].size <= budget for batch in batches)
        if pad is None:
            fewest = math.ceil(sum(tokens_of(rollouts, row) for row in range(24)) / budget)
            assert len(batches) <= fewest + 1
        again = [batch["trajectory"].tolist() for batch in store.batches(budget, pad=pad, seed=seed)]
        assert again == [batch["trajectory"].tolist() for batch in batches]


def test_seeds_shuffle_and_ranks_share_out(run, rollouts):
    budget = 2 * max(tokens_of(rollouts, row) for row in range(24))
    with open_trajectories(run.path) as store:
        orders = {tuple(b["trajectory"][0] for b in store.batches(budget, seed=seed)) for seed in range(4)}
        assert len(orders) > 1
        ranks = [[set(b["trajectory"].tolist()) for b in store.batches(budget, seed=1, shard=(r, 3))] for r in range(3)]
        rows = [row for rank in ranks for batch in rank for row in batch]
        assert sorted(rows) == list(range(24))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_a_row_over_the_budget_is_named_or_left_out(run, rollouts):
    longest = max(range(24), key=lambda row: tokens_of(rollouts, row))
    budget = tokens_of(rollouts, longest) - 1
    with open_trajectories(run.path) as store:
        with pytest.raises(ConfigError, match=f"{rollouts[longest].id}: {budget + 1} tokens do not fit a batch"):
            list(store.batches(budget, [longest]))
        assert list(store.batches(budget, [longest], oversize="skip")) == []
        assert len(list(store.batches(budget, "sample == 0"))) == 1


def test_padding_on_either_side():
    from megaflow_hpc.trajectories.reading.batch import padded

    values, offsets = np.array([1, 2, 3], np.int32), np.array([0, 2, 2, 3])
    assert padded(values, offsets, 9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert padded(values, offsets, 9, left=True).tolist() == [[1, 2], [9, 9], [9, 3]]
    assert padded(values[:0], np.array([0]), 9).shape == (0, 0)


NAN = math.nan
REWARDS = np.array([1, 10, 0, 3, NAN, 0, 7, 2], np.float32)
GROUPS = np.array(list("abaaabca"), object)
"""Group a has 1, 0, 3, 2 and one unverified; b has 10 and 0; c has one row."""


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        # a: mean 1.5, so -0.5 -1.5 1.5 0.5 with squares of 5; b: mean 5, squares of 50
        ("drgrpo", {}, [-0.5, 5, -1.5, 1.5, NAN, -5, 0, 0.5]),
        ("grpo", {"ddof": 0, "epsilon": 0}, [-0.4472136, 1, -1.3416408, 1.3416408, NAN, -1, 0, 0.4472136]),
        ("grpo", {"epsilon": 0}, [-0.3872983, 0.7071068, -1.1618950, 1.1618950, NAN, -0.7071068, 0, 0.3872983]),
        # a: the others' mean is 5/3 for 1, 2 for 0, 1 for 3, 4/3 for 2
        ("rloo", {}, [1 - 5 / 3, 10, -2, 2, NAN, -10, 0, 2 - 4 / 3]),
        # a: median 1.5; b: 5
        ("median", {}, [-0.5, 5, -1.5, 1.5, NAN, -5, 0, 0.5]),
    ],
)
def test_advantages_are_those_computed_by_hand(kind, options, expected):
    assert advantages(REWARDS, GROUPS, kind, **options) == pytest.approx(expected, nan_ok=True, abs=1e-6)


def test_the_median_of_an_odd_group_gets_nothing_and_equal_rewards_neither():
    odd = advantages(np.array([5, 0, 1], np.float32), np.array(["a"] * 3), "median")
    assert odd.tolist() == [4, -1, 0]
    for kind in ("grpo", "drgrpo", "rloo", "median"):
        assert advantages(np.ones(4, np.float32), np.zeros(4), kind).tolist() == [0, 0, 0, 0]
    with np.errstate(all="raise"):  # equal rewards and a group of one, without epsilon
        rewards, groups = np.array([0.1, 0.1, 0.1, 1, 0, 3], np.float32), np.array(list("aaabbc"))
        assert advantages(rewards, groups, "grpo", epsilon=0, ddof=0).tolist() == [0, 0, 0, 1, -1, 0]
    with pytest.raises(ConfigError, match="advantage 'ppo': there are grpo"):
        advantages(REWARDS, GROUPS, "ppo")


def test_a_store_gives_advantages_by_row(run):
    with open_trajectories(run.path) as store:
        reward = store.column("reward")
        centred = reward - np.nanmean(reward)
        assert store.advantages("drgrpo") == pytest.approx(centred, nan_ok=True, abs=1e-6)
        assert (
            np.isfinite(store.advantages("rloo", reward="tests")).sum()
            == np.isfinite(store.column("rewards/tests")).sum()
        )
