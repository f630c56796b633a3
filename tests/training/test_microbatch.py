"""Packing: no token is lost or repeated, and the total is equal for every number of ranks."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.training.microbatch import EQUAL_LENGTH, MicroBatch, Minibatch, split
from megaflow_hpc.training.plan import PlannedRollout, RecordPlace
from megaflow_hpc.trajectory import TokenSequence


def sequence(tokens: int, sampled: int, version: int = 0) -> TokenSequence:
    """Return a sequence whose last ``sampled`` tokens were sampled."""
    found = TokenSequence("default")
    prompt = tokens - sampled
    found.tokens.extend(range(tokens))
    found.logprobs.extend([math.nan] * prompt + [-0.5] * sampled)
    found.loss_mask.extend([0] * prompt + [1] * sampled)
    found.weight_versions.extend([-1] * prompt + [version] * sampled)
    return found


def planned(index: int, sequences: list[TokenSequence], advantage: float = 1.0, weight: float = 1.0) -> PlannedRollout:
    return PlannedRollout(
        id=f"t/default/{index}",
        task="t",
        group="t/default",
        place=RecordPlace("", 0),
        advantage=advantage,
        weight=weight,
        lengths=[len(s.tokens) for s in sequences],
        sampled=[sum(s.loss_mask) for s in sequences],
    )


def minibatch(sequences: list[list[TokenSequence]], rank: int = 0, ranks: int = 1, **changes: float) -> Minibatch:
    rollouts = [planned(index, own, **changes) for index, own in enumerate(sequences)]
    groups = [index // 2 for index in range(len(rollouts))]
    return Minibatch(rollouts, range(len(rollouts)), groups, sequences.__getitem__, lambda v: v, rank, ranks)


def test_sequences_lie_end_to_end_with_their_own_positions_and_values() -> None:
    found = minibatch([[sequence(5, 2), sequence(3, 1)], [sequence(4, 4, version=7)]], advantage=-2.0, weight=0.5)
    assert (found.tokens, found.samples, found.sequences) == (7, 2, 3)
    (batch,) = found.microbatches(12)
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.positions.tolist() == batch.tokens.tolist()
    assert batch.offsets.tolist() == [0, 5, 9, 12]
    assert batch.mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1]
    assert batch.versions.tolist() == [-1, -1, -1, 0, 0, 7, 7, 7, 7, -1, -1, 0]
    assert batch.advantages.tolist() == (-2.0 * batch.mask).tolist()
    assert batch.weights.tolist() == (0.5 * batch.mask).tolist()
    assert batch.logprobs.tolist() == (-0.5 * batch.mask).tolist()
    assert batch.sample.tolist() == [0, 1, 0]
    assert batch.group.tolist() == [0, 0, 0]
    assert batch.rollout_tokens.tolist() == [3, 4, 3]
    batch.versions[0] = batch.tokens[0] = 9  # the caller's own copy


def test_numbers_of_versions_become_the_policys_own_count_even_where_both_are_the_same_numbers() -> None:
    rollouts = [planned(0, [sequence(3, 3)])]
    own = sequence(3, 3)
    own.weight_versions[:] = type(own.weight_versions)("i", [2, 4, 6])
    found = Minibatch(rollouts, [0], [0], lambda index: [own], {2: 1, 4: 2, 6: 4}.__getitem__)
    (batch,) = found.microbatches(3)
    assert batch.versions.tolist() == [1, 2, 4]


def test_what_has_no_weight_or_no_sampled_token_is_left_out() -> None:
    found = minibatch([[sequence(5, 0)], [sequence(4, 1)]])
    assert [len(batch.sample) for batch in found.microbatches(100)] == [1]
    assert list(minibatch([[sequence(5, 2)]], weight=0.0).microbatches(10)) == []
    assert minibatch([[sequence(5, 2)]], weight=0.0).tokens == 0


def test_rollouts_without_advantage_are_left_out_and_still_counted() -> None:
    sequences = [[sequence(6, 2), sequence(3, 1)], [sequence(9, 4)], [sequence(8, 3)], [sequence(1 + 9, 5)]]
    advantages = [0.5, 0.0, -0.0, -0.5]
    rollouts = [
        planned(n, own, advantage) for n, (own, advantage) in enumerate(zip(sequences, advantages, strict=True))
    ]

    def packed(skip_zero: bool, rank: int, ranks: int) -> tuple[Minibatch, list[MicroBatch]]:
        found = Minibatch(rollouts, range(4), [0] * 4, sequences.__getitem__, lambda v: v, rank, ranks)
        return found, list(found.microbatches(10, skip_zero=skip_zero))

    for ranks in (1, 3):
        trained = [packed(True, rank, ranks)[1] for rank in range(ranks)]
        assert len({len(batches) for batches in trained}) == 1
        batches = [batch for own in trained for batch in own]
        assert sorted(n for batch in batches for n in batch.sample.tolist()) == [0, 0, 3]
        assert sum(len(batch.tokens) for batch in batches) == 19
    found, every = packed(False, 0, 1)
    assert sum(len(batch.tokens) for batch in every) == 36
    assert (found.tokens, found.samples, found.sequences) == (15, 4, 5)


def test_a_rollout_is_trained_on_if_the_advantages_of_its_sequences_add_up_to_zero() -> None:
    sequences = [sequence(6, 2), sequence(3, 1)]
    rollout = planned(0, sequences, 0.0)
    rollout.advantages = [1.0, -1.0]
    minibatch = Minibatch([rollout], [0], [0], lambda index: sequences, lambda v: v)
    (batch,) = minibatch.microbatches(10, skip_zero=True)
    assert set(batch.advantages[batch.mask == 1].tolist()) == {1.0, -1.0}


def test_a_sequence_longer_than_a_micro_batch_gets_one_of_its_own() -> None:
    found = list(minibatch([[sequence(4, 1)], [sequence(9, 1)], [sequence(3, 1)]]).microbatches(8))
    assert [batch.sample.tolist() for batch in found] == [[1], [0, 2]]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=3), max_size=12),
    ranks=st.integers(1, 4),
    budget=st.integers(30, 80),
)
def test_every_sampled_token_is_on_one_rank_and_all_ranks_have_equally_many_passes(
    lengths: list[list[tuple[int, int]]], ranks: int, budget: int
) -> None:
    sequences = [[sequence(tokens, min(tokens, some)) for tokens, some in own] for own in lengths]
    by_rank = [list(minibatch(sequences, rank, ranks).microbatches(budget)) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    batches: list[MicroBatch] = [batch for own in by_rank for batch in own]
    assert all(len(batch.tokens) <= budget for batch in batches)
    assert sum(batch.sampled for batch in batches) == minibatch(sequences).tokens
    wanted = sorted((i, len(s.tokens)) for i, own in enumerate(sequences) for s in own if sum(s.loss_mask))
    found = [(int(i), int(n)) for b in batches for i, n in zip(b.sample, np.diff(b.offsets), strict=True)]
    assert sorted(found) == wanted


def test_ranks_get_rows_of_similar_attention_cost() -> None:
    """One long sequence costs as much as many short ones of several times its tokens."""
    lengths = [60_000, 30_000, 30_000, 20_000, 20_000, 20_000, 10_000, 10_000, 10_000, 10_000]
    sequences = [[sequence(length, 1)] for length in lengths]
    rows = [next(minibatch(sequences, rank, 4).microbatches(65_536)) for rank in range(4)]
    costs = [sum(n * (n + EQUAL_LENGTH) for n in np.diff(row.offsets).tolist()) for row in rows]
    assert sum(len(row.tokens) for row in rows) == sum(lengths)
    assert costs[0] == 60_000 * (60_000 + EQUAL_LENGTH)  # the longest is alone
    assert max(costs[1:]) <= 1.2 * min(costs[1:])


def test_sequences_with_the_same_tokens_have_different_keys() -> None:
    """They may show different images."""
    own = [[sequence(5, 2), sequence(5, 2)], [sequence(5, 2)]]
    (batch,) = minibatch(own).microbatches(100)
    assert sorted(batch.sequence_keys()) == [(0, 0), (0, 1), (1, 0)]


def test_minibatches_are_of_whole_groups() -> None:
    groups = [0, 0, 1, 1, 2, 2]
    assert split(groups, 2) == [[0, 1, 2, 3], [4, 5]]
    shuffled = split(groups, 2, np.random.default_rng(1))
    assert sorted(index for part in shuffled for index in part) == list(range(6))
    assert shuffled == split(groups, 2, np.random.default_rng(1))


def test_columns_and_advantages_follow_their_tokens() -> None:
    sequences = [sequence(5, 2), sequence(3, 1)]
    rollout = planned(0, sequences)
    rollout.advantages, rollout.turns = [2.0, 3.0], [(0, 3, 4), (1, 2, 3)]
    columns = {"teacher": [[np.arange(5, dtype=np.float32), 10 + np.arange(3, dtype=np.float32)]]}
    found = Minibatch([rollout], [0], [0], lambda index: sequences, lambda v: v, columns=columns)
    (batch,) = found.microbatches(8)
    assert batch.columns["teacher"].tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    assert batch.advantages.tolist() == [0, 0, 0, 2, 0, 0, 0, 3]
    rollout.turns = []
    (batch,) = found.microbatches(8)
    assert batch.advantages.tolist() == [0, 0, 0, 2, 2, 0, 0, 3]


def test_a_sequence_is_left_out_if_none_of_its_own_turns_has_an_advantage() -> None:
    sequences = [[sequence(6, 4), sequence(5, 2)], [sequence(4, 1), sequence(3, 2)]]
    rollouts = [planned(n, own, 0.5) for n, own in enumerate(sequences)]
    rollouts[0].turns, rollouts[0].advantages = [(0, 2, 3), (0, 4, 6), (1, 3, 5)], [0.0, 1.0, 0.0]
    rollouts[1].advantages = [0.0, -1.0]
    found = Minibatch(rollouts, range(2), [0, 0], sequences.__getitem__, lambda v: v)
    (batch,) = found.microbatches(20, skip_zero=True)
    assert (batch.sample.tolist(), np.diff(batch.offsets).tolist()) == ([0, 1], [6, 3])
    assert batch.advantages.tolist() == [0, 0, 0, 0, 1, 1, 0, -1, -1]
