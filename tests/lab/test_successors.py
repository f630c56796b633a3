"""A pod that Slurm does not requeue has a successor in the queue before it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.slurm import site
from tests.support.campaigns import Make, cli, rows
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

TASKS = 20
AGENT = """\
import asyncio, os
from pathlib import Path
from megaflow_hpc.types import AgentResult

class Waits:
    async def run(self, task, sandbox, model):
        first = Path("{first}")
        if not first.exists():
            first.write_text(os.environ["MEGAFLOW_POD"])
        if first.read_text() == os.environ["MEGAFLOW_POD"] and not task.id.endswith("0"):
            await asyncio.sleep(600)
        await sandbox.exec("sleep 3; echo 42 > answer")
        return AgentResult()
"""
"""An agent that ends only some of its tasks in the first pod, so that the second has work until the first has ended."""
SECTION = """\
slurm:
  no-requeue: true
  pods: {partition: cpu, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem: 1G, time: 2}
"""


def test_a_pod_that_is_not_requeued_has_a_successor_before_its_walltime_ends(
    tmp_path: Path, make_campaign: Make
) -> None:
    path = make_campaign(TASKS, SECTION, agent="waits:Waits")
    path.with_name("waits.py").write_text(AGENT.format(first=tmp_path / "first"))
    done = cli("run", path, "--run-dir", tmp_path / "run", timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    run = Run(tmp_path / "run")
    assert rows(run.path) == {f"task{n}/Waits/0": ("completed", 1) for n in range(TASKS)}
    first, second, *_ = run.job_ids("pods")

    def shown(array: str, field: str) -> str:
        return site.ask("sacct", "-nXP", "-j", array, "-o", field, epoch=True).strip()

    until(lambda: shown(first, "End").isdecimal(), "accounting, which lags, has the end of the first pod", 120)
    assert shown(first, "State") == "FAILED", "it was not requeued"
    assert int(shown(second, "Submit")) < int(shown(first, "End"))
    log = run.dir.log("pod").replace("%A_%a", f"{first}_0")
    assert "presently disabled" in Path(log).read_text()
