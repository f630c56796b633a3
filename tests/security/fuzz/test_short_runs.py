"""Each target for a moment: what was found before, its valid seeds, and some hundred inputs, always the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.fuzz.found import FOUND
from tests.security.fuzz.targets import TARGETS
from tests.security.fuzz.watch import fuzzed


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_refused_or_read(name: str, tmp_path: Path) -> None:
    outcome = fuzzed(name, tmp_path, count=TARGETS[name].count)
    assert outcome.faults == {}
    assert outcome.runs > TARGETS[name].count


def test_every_fault_found_belongs_to_a_target() -> None:
    assert set(FOUND) <= set(TARGETS)
