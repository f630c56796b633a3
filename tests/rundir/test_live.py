"""What viewers ask for is bounded, and nothing in those files does harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import MOST_ROLLOUTS, Asked, LiveFiles, PodActivity, RolloutActivity, Transcript, Viewers


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_all_viewers_together_ask_for_so_much_and_what_is_no_ask_is_skipped(run: RunDir) -> None:
    files = LiveFiles(run)
    assert files.asked() == Asked()
    files.ask([f"t/p/{n}" for n in range(9 * MOST_ROLLOUTS)])
    (run.live / "other.1.ask").write_text('{"counter": 1, "rollouts": ["u/p/0"], "transcript": "u/p/0"}')
    (run.live / "cut.2.ask").write_text('{"counter": 1, "rollo')
    (run.live / "deep.3.ask").write_text("[" * 100_000)
    (run.live / "odd.4.ask").write_text('{"counter": 1, "rollouts": [7]}')
    asked = files.asked()
    assert len(asked.rollouts) == MOST_ROLLOUTS
    assert asked.transcripts == ("u/p/0",)
    files.leave()
    assert files.asked() == Asked(("u/p/0",), ("u/p/0",))


def test_what_a_pod_shows_may_be_any_text_and_a_disk_that_refuses_stops_nothing(run: RunDir) -> None:
    said = PodActivity({"t/p/0": RolloutActivity(1, 2, True, 3.0)}, {"t/p/0": Transcript(1, [("user", "\udc80é")])})
    viewers = Viewers(run, "7_0.0")
    viewers.show(said)  # nobody has made the directory: as after a removal
    assert not run.live.exists()
    run.live.mkdir()
    viewers.show(said)
    shown = LiveFiles(run).activity("7_0.0")
    assert shown is not None
    assert shown.rollouts == said.rollouts
    assert shown.transcripts["t/p/0"].messages == [("user", "\\udc80é")]
    viewers.leave()
    assert list(run.live.iterdir()) == []
    viewers.clear()
    assert not run.live.exists()
