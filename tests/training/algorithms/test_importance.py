"""Truncated importance weights against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.config.objective import ImportanceConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms.importance import importance_weights

NAN = math.nan
PROXIMAL = np.log([1.0, 0.5, 0.3, 1.0, 0.9, 0.1])
ENGINE = np.log([NAN, 0.4, 0.1, NAN, 0.6, 0.2])
MASK = np.array([0, 1, 1, 0, 1, 1], np.uint8)
SEQUENCE = np.array([0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("none", [1, 1, 1, 1, 1, 1]),
        ("token", [1, 1.25, 2, 1, 1.5, 0.5]),  # 0.3 / 0.1 is cut at 2
        ("sequence", [1, 2, 2, 1, 0.75, 0.75]),  # 1.25 x 3 is cut at 2; 1.5 x 0.5
    ],
)
def test_each_level(level: Any, expected: list[float]) -> None:
    found = importance_weights(ImportanceConfig(level=level, truncate=2.0), PROXIMAL, ENGINE, MASK, SEQUENCE)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_sampled_token_without_a_log_probability_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"token 0 was sampled without a log-probability"):
        importance_weights(ImportanceConfig(), PROXIMAL, ENGINE, np.ones(6), SEQUENCE)


def test_differences_beyond_all_measure_stay_numbers() -> None:
    far = np.array([0.0, -1e4]), np.array([-1e4, 0.0])
    assert importance_weights(ImportanceConfig(), *far, np.ones(2), np.arange(2)).tolist() == [2.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans(), st.integers(0, 3)), max_size=30),
    st.sampled_from(["token", "sequence"]),
    st.floats(1, 10),
)
def test_a_weight_is_never_above_the_bound_nor_below_zero(rows: list[Any], level: Any, most: float) -> None:
    proximal, engine, mask, sequence = (np.array([row[i] for row in rows]) for i in range(4))
    config = ImportanceConfig(level=level, truncate=most)
    found = importance_weights(config, proximal, engine, mask, sequence.astype(int))
    assert ((found >= 0) & (found <= np.float32(most) * (1 + 1e-6))).all()
    assert (found[~mask.astype(bool)] == 1).all()
