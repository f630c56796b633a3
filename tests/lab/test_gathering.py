"""A gather job whose walltime is too short stops in time, is requeued, and continues where it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.trajectories import open_trajectories, validate
from tests.bench.gathering import write_journals
from tests.support.campaigns import Make
from tests.support.labs import pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

ROLLOUTS = 4_000
SLOW = """\
import sys
if "gather" in sys.orig_argv:
    import time
    from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
    append = TrajectoryWriter.append
    TrajectoryWriter.append = lambda self, trajectory: (append(self, trajectory), time.sleep(0.02))
"""
"""A ``sitecustomize`` with which all rollouts take 80 s to gather, on any machine."""


def test_a_gather_with_a_walltime_of_a_minute_is_requeued_until_it_is_complete(
    make_campaign: Make, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW)
    section = f"  gather: {{time: 1}}\n  setup: ['export PYTHONPATH={slow}:$PYTHONPATH']\n"
    run = Campaign.from_yaml(make_campaign(1, pods(count=1) + section)).plan()
    write_journals(run.dir, 20, ROLLOUTS, 60)  # takes longer to gather than the walltime
    run.start()
    [job] = run.job_ids("gather")
    log = Path(run.dir.logs / f"gather-{job}.log")
    until(run.dir.trajectories.exists, "the file is gathered", 900)
    stops = [int(rows) for rows in re.findall(r"stopped after (\d+) of \d+ rollouts", log.read_text())]
    assert stops, log.read_text()
    assert stops == sorted(stops), "each start adds rows"
    assert log.read_text().count("requeueing the gather job") >= len(stops)
    with open_trajectories(run.dir.trajectories) as store:
        assert len(set(store.column("id").tolist())) == len(store) == ROLLOUTS + run.record.total
    assert validate(run.dir.trajectories) == []
    assert not [path for path in run.path.iterdir() if path.name.startswith(".trajectories.h5")]
