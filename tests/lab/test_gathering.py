"""A gather job whose walltime ends stops in time, is requeued, and continues where it was."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.slurm.ids import scancel
from megaflow_hpc.trajectories import open_trajectories, validate
from tests.bench.gathering import write_journals
from tests.support.campaigns import Make
from tests.support.labs import pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

ROLLOUTS = 600
SLOW = """\
import sys
if "gather" in sys.orig_argv:
    import time
    from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
    append = TrajectoryWriter.append
    TrajectoryWriter.append = lambda self, trajectory: (append(self, trajectory), time.sleep(0.02))
"""
"""A ``sitecustomize`` with which all rollouts take 12 s to gather, on any machine."""


def test_a_gather_whose_walltime_ends_is_requeued_until_it_is_complete(make_campaign: Make, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW)
    section = f"  setup: ['export PYTHONPATH={slow}:$PYTHONPATH']\n"
    run = Campaign.from_yaml(make_campaign(1, pods(count=1) + section)).plan()
    write_journals(run.dir, 20, ROLLOUTS, 60)
    run.start()
    [job] = run.job_ids("gather")
    log = Path(run.dir.logs / f"gather-{job}.log")
    until(lambda: list(run.path.glob(".trajectories.h5*")), "it has begun")
    time.sleep(2)  # some rows are written
    scancel([job], "--batch", "--signal=USR2")  # as Slurm does before the walltime
    until(run.dir.trajectories.exists, "the file is gathered", 900)
    stops = [int(rows) for rows in re.findall(r"stopped after (\d+) of \d+ rollouts", log.read_text())]
    assert stops, log.read_text()
    assert 0 < stops[0] < ROLLOUTS
    assert log.read_text().count("requeueing the gather job") >= len(stops)
    with open_trajectories(run.dir.trajectories) as store:
        assert len(set(store.column("id").tolist())) == len(store) == ROLLOUTS + run.record.total
    assert validate(run.dir.trajectories) == []
    assert not [path for path in run.path.iterdir() if path.name.startswith(".trajectories.h5")]
