"""How often pods look for blocks that are not there yet."""

from __future__ import annotations

import pytest

from megaflow_hpc.pod.master.dispatch import LOOKS_PER_S, SOON_S, awaited_s


@pytest.mark.parametrize(("pods", "seconds"), [(1, 0.25), (10, 0.25), (20, 0.5), (40, 1.0), (1000, 1.0)])
def test_a_few_pods_that_wait_for_a_trainer_look_often_and_many_as_ever(pods: int, seconds: float) -> None:
    assert awaited_s(pods) == seconds
    assert pods / awaited_s(pods) <= max(LOOKS_PER_S, pods / SOON_S)
