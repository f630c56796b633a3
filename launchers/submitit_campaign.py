#!/usr/bin/env python3
"""A whole campaign as one submitit job, as a sweep of campaigns would have it: the job plans, queues, follows, gathers.

usage: python launchers/submitit_campaign.py CAMPAIGN [--partition P] [--folder DIR]

The job itself needs one CPU; pods and engines are jobs of their own, queued from inside it. Where a site does not allow
that, give launcher="local": then the pod runs in this very job. Without a job around it the same is
``Campaign.from_yaml(file).submit().wait()``, whose ``run.jobs`` are submitit's handles.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import submitit

from megaflow_hpc.slurm.submission import inherited


def campaign(file: str, launcher: str = "slurm") -> dict[str, Any]:
    """Runs on the node; what it returns is the job's result."""
    from megaflow_hpc import Campaign

    return Campaign.from_yaml(file).submit(launcher=launcher).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("campaign")
    parser.add_argument("--partition")
    parser.add_argument("--folder", help="submitit's files; default: beside the campaign")
    arguments = parser.parse_args()
    file = Path(arguments.campaign).absolute()
    for name in inherited(os.environ):  # of a job around this one; sbatch would prefer them to what is said below
        del os.environ[name]
    executor = submitit.AutoExecutor(folder=arguments.folder or file.parent / "submitit", cluster="slurm")
    executor.update_parameters(
        timeout_min=60, cpus_per_task=1, mem_gb=0.5, slurm_partition=arguments.partition, slurm_job_name="campaign"
    )
    job = executor.submit(campaign, str(file))
    print(json.dumps(job.result(), default=str))


if __name__ == "__main__":
    main()
