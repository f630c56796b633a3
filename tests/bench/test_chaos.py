"""The check of the chaos benchmark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.trajectories.journal.frames import read_frames
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.bench import faults
from tests.bench.chaos import check
from tests.support.campaigns import Make, planned


@pytest.mark.slow
def test_the_check_of_chaos_misses_a_record_that_was_taken_out(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(3, agent="oracle")).submit(launcher="local")
    run.wait(timeout_s=900)
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


def test_a_survey_is_seen_by_the_leases_of_old_starts_that_it_reads(
    make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(make_campaign(1, agent="oracle"))
    leases = run.dir.ledger / "leases"
    monkeypatch.setattr(faults, "SURVEYED", 20)
    faults.leave_old_starts(run.dir, 30)
    monkeypatch.setattr(faults, "SURVEY_S", 0.1)
    assert not faults.await_survey(leases), "nobody reads"
    monkeypatch.setattr(faults, "SURVEY_S", 60.0)
    with ThreadPoolExecutor(1) as threads:
        seen = threads.submit(faults.await_survey, leases)
        while not seen.done():
            assert len(run.ledger.leases()) == 30
        assert seen.result()
