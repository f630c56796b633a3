"""The check of the chaos benchmark."""

from __future__ import annotations

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.trajectories.journal.frames import read_frames
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.bench.chaos import check
from tests.support.campaigns import Make


@pytest.mark.slow
def test_the_check_of_chaos_misses_a_record_that_was_taken_out(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(3, agent="oracle")).submit(launcher="local")
    run.wait(timeout_s=120)
    assert check(run) == (3, [], [], [])
    [journal] = run.dir.journal.glob("*.journal")
    frames = list(read_frames(journal))
    copy = journal.with_name("copy")
    with JournalWriter(copy) as writer:
        for frame in frames[1:]:
            writer.append(frame.payload)
        writer.commit()
    write_atomic(journal, copy.read_bytes())
    copy.unlink()
    planned, lost, double, _ = check(run)
    assert (planned, len(lost), double) == (3, 1, [])
