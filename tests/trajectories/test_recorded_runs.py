"""Journals of three real campaigns (tests/support/recorded.py) gather into the columns that they always did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.trajectories import gather
from tests.support.recorded import DIGESTS, digests, unpack

EXPECTED = json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_run_gathers_into_the_same_columns(name: str, tmp_path: Path) -> None:
    columns = digests(gather(unpack(name, tmp_path)))
    assert {key: columns.get(key) for key in EXPECTED[name]} == EXPECTED[name]
