"""A pod packs the small journals of its earlier starts while it runs, and the campaign ends as ever."""

from __future__ import annotations

import os
import subprocess
import sys

from megaflow_hpc.trajectories.journal.packs import FAN
from megaflow_hpc.trajectories.journal.winners import journals
from tests.support.campaigns import Make, planned
from tests.support.samples import commit, trajectory

POD = """
import runpy, sys
from megaflow_hpc.pod.master import assembly
assembly.PACK_AFTER_S, assembly.PACK_SPREAD_S = 0.5, 1
sys.argv = ["pod", sys.argv[1]]
runpy.run_module("megaflow_hpc.pod", run_name="__main__")
"""


def test_a_later_start_of_a_pod_packs_what_earlier_ones_left(make_campaign: Make) -> None:
    run = planned(make_campaign(1, agent="oracle", solution="sleep 4; echo 42 > answer")).dir
    for start in range(FAN):
        commit(run, "7_1", (900 + start, 0, trajectory(start)), start=str(start))
    environment = {**os.environ, "MEGAFLOW_POD": "7_1", "MEGAFLOW_START": str(FAN)}
    done = subprocess.run(
        [sys.executable, "-c", POD, str(run)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in run.journal.glob("*.pack")] == [f"7_1.{FAN}.1.pack"]
    assert len(journals(run)) == FAN + 1
    assert len(list(run.journal.glob("*.journal"))) == FAN + 1, "a later start removes the originals"
