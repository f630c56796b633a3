"""A run of more pods than a process may have files open: it is looked at, followed and gathered all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from megaflow_hpc import config
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.rundir.events import PodEvent, RolloutEvent, StartEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import JournalWriter, gather
from tests.support.journals import digests, record, write_between
from tests.support.samples import trajectory

PODS, STORED = 400, 280
JOURNALS = 20

LOOKS = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.logs import RolloutLog
from megaflow_hpc.trajectories.reading.follow import Follower

run = Run(sys.argv[1])
run.monitor.list_rollouts()
live, log, follower = Live(run.dir, run.monitor), RolloutLog(run.dir, "t0/p/0"), Follower(run.dir)
leader = Coordination(Ledger(run.dir, PodIdentity("7_0", "0")), Endpoints(run.dir, {}), CampaignBudget(run.dir, {}))
found = {}
with run.tended() as tend:
    for look in range(2):
        status = run.status()
        found["over"] = run.over(status)
        found["rows"] = len(live.look(status).rollouts)
        found["said"] = found.get("said", 0) + len(log.read())
        found["followed"] = found.get("followed", 0) + len(follower.poll())
        tend()
leader.tick()
while leader._survey is not None:
    leader.tick()
found["pods"], found["surveyed"] = len(status["pods"]), leader.report.pods
found["open"] = len(os.listdir("/proc/self/fd"))
print(json.dumps(found))
"""


GATHERS = """
import resource, sys
from megaflow_hpc.trajectories import gather
resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))
gather(sys.argv[1])
"""


def test_a_run_of_more_pods_than_descriptors_is_watched_led_and_followed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    campaign = config.parse({"name": "x", "tasks": ["t"], "agent": "oracle", "slurm": {"pods": {"count": PODS}}})
    write_run(run, RunRecord(campaign=campaign.model_dump(mode="json"), total=10**6))
    Ledger(run, PodIdentity("7_0", "0")).register()
    lease, now = (run.ledger / "leases" / "7_0.0").read_bytes(), time.time()
    for pod in range(PODS):
        (run.ledger / "leases" / f"7_{pod}.0").write_bytes(lease)
        events = [PodEvent(state="started", job_id=f"7_{pod}"), StartEvent(id=f"t{pod}/p/0", rank=1, attempt=0)]
        if pod < STORED:
            events.append(RolloutEvent(id=f"t{pod}/p/0", status="completed"))
        for event in events:
            event.t = now
        run.event_file(f"7_{pod}", "0").write_bytes(b"".join(encode(event) for event in events))
    for pod in range(STORED):
        with JournalWriter(run.journal_file(f"7_{pod}", "0")) as journal:
            journal.append(record(pod, 0, trajectory(pod)))
            journal.commit()
    done = limited(LOOKS, run, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("open") < 256
    assert found == {
        "over": False,
        "rows": PODS,
        "said": 2,
        "followed": STORED,
        "pods": PODS,
        "surveyed": PODS,
    }


def test_more_journals_than_descriptors_are_gathered(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    write_between(run, JOURNALS, 3 * JOURNALS)
    done = limited(GATHERS, run, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == "", done.stderr
    few = digests(run.trajectories)
    run.trajectories.unlink()
    gather(run)
    assert few == digests(run.trajectories)


def limited(program: str, run: RunDir, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that limits its own descriptors, without Slurm."""
    environment = {**os.environ, "PATH": str(path)}
    command = [sys.executable, "-c", program, str(run)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
