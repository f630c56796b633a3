"""What one campaign asks of slurmctld, and what it holds idle: sdiag and sacct around a campaign that is followed.

Requests are those of clients (submissions, queries, steps), not what daemons say among themselves; on a cluster where
the same user runs anything else meanwhile, that is counted too.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.campaign.facade import Campaign
from megaflow_hpc.slurm import site
from tests.bench.chaos_campaign import write_campaign
from tests.bench.figures import Figure
from tests.support.waiting import until

DAEMONS = ("MESSAGE_", "REQUEST_COMPLETE_", "REQUEST_STEP_COMPLETE", "REQUEST_PING", "ACCOUNTING_")
"""What slurmd, slurmstepd and slurmdbd send, and what grows with jobs that end, not with who follows them."""


def requests() -> Counter[str]:
    """Client requests that slurmctld has answered so far, by type (``sdiag``)."""
    table = site.ask("sdiag").partition("by message type")[2].partition("by user")[0]
    found = Counter[str]()
    for name, count in re.findall(r"^\s+([A-Z_]+)\s+\(.*?count:(\d+)", table, re.MULTILINE):
        if not name.startswith(DAEMONS):
            found[name] = int(count)
    return found


def measure(folder: Path, image: Path, note: Callable[[str], None], arguments: argparse.Namespace) -> list[Figure]:
    """Follows one campaign of ``arguments.tasks`` rollouts on ``arguments.pods`` pods to its end."""
    rollouts, pods = arguments.tasks, arguments.pods
    folder.mkdir(parents=True, exist_ok=True)
    campaign = write_campaign(folder, image, rollouts, "work", pods)
    before, began = requests(), time.monotonic()
    run = Campaign.from_yaml(campaign).submit()
    submitted = requests() - before
    result = run.wait(timeout_s=3600)
    minutes = (time.monotonic() - began) / 60
    asked = requests() - before
    note(
        f"{result['rollouts']['completed']} of {rollouts} rollouts in {minutes:.1f} minutes; "
        f"to submit: {', '.join(f'{name} {count}' for name, count in submitted.most_common())}"
    )
    note("requests: " + ", ".join(f"{name} {count}" for name, count in asked.most_common()))
    until(lambda: not run.live_jobs(0), "every job has left", 600, every_s=1.0)
    usage = run.usage()
    steady = (asked.total() - submitted.total()) / minutes
    return [
        Figure(f"slurmctld requests a minute, {pods} pods, followed", "/min", steady, 1, goal=4),
        Figure("slurmctld requests to submit a campaign", "requests", submitted.total(), 1),
        Figure("idle core-seconds of those held", "%", 100 * usage["idle_core_seconds"] / usage["core_seconds"], 1),
        Figure("idle GPU-seconds", "GPU s", usage["idle_gpu_seconds"], 1),
        Figure("GPUs held past the last rollout", "s", usage["gpus_outlived_last_rollout_s"], 1, goal=60),
    ]
