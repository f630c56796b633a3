"""Two pods share a run directory that misbehaves as network file systems do, and every rollout counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ledger.faults import campaign


@pytest.mark.parametrize("seed", [1, 2])
def test_stale_answers_replayed_replies_and_pauses_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    said = campaign([tmp_path / "run"] * 2, tmp_path / "run", seed)
    met = {kind: sum(start[kind] for each in said for start in each["met"]) for kind in said[0]["met"][0]}
    print(met, [each["starts"] for each in said])
    assert met["stale"]
    assert met["replayed"]
    assert met["ESTALE"]
