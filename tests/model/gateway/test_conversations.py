"""Recorded ids are the sampled ids, for every dialect and however a client writes answers back."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.conversations import converse


@pytest.mark.parametrize("seed", [1, 2])
def test_random_conversations_with_tools_are_recorded_as_sampled_in_one_sequence_each(seed: int) -> None:
    outcome = asyncio.run(converse(24, seed=seed, drift=0.3))
    assert outcome.calls > 60
    assert outcome.wrong == 0
    assert outcome.one_sequence == outcome.rollouts == 24
    assert max(outcome.surplus) == 1.0


def test_without_the_split_ids_are_exact_and_what_encodes_otherwise_starts_a_sequence() -> None:
    drifting = asyncio.run(converse(12, seed=3, drift=0.3, protocol="plain"))
    assert drifting.wrong == 0
    assert drifting.one_sequence < 12
    faithful = asyncio.run(converse(12, seed=3, drift=0.0, protocol="plain"))
    assert (faithful.wrong, faithful.one_sequence) == (0, 12)
