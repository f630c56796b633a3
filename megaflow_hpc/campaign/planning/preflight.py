"""Checks that pods can run with this Python. Warns about idle pods and rollouts that outlast the walltime."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable, Mapping

from megaflow_hpc.campaign.planning.draft import Draft, whole_groups
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mpi import LIBRARY_PROGRAM
from megaflow_hpc.ledger.blocks import count_blocks
from megaflow_hpc.resources import install
from megaflow_hpc.types import Task

PACKAGES_S = 60.0
"""Timeout in seconds for importing the pods' packages. A shared file system may be slow at first."""


def check_packages(config: CampaignConfig, slurm: bool) -> None:
    """Checks that this interpreter, which jobs use too, can import the packages that pods and engines need.

    A child process imports them, because loading an MPI library can crash. A missing MPI library is accepted if
    ``slurm.setup`` may provide it.

    Raises:
        SiteError: A package is missing or cannot be loaded. The message names package and remedy.
    """
    command = [sys.executable, "-c", "import aiohttp, cryptography\n"]
    if slurm and not config.is_pool:
        command[-1] += LIBRARY_PROGRAM
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PACKAGES_S, check=False)
    except subprocess.TimeoutExpired:
        return  # a slow import here does not mean that the nodes lack the packages
    why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    if done.returncode and ("No module named" in why or not config.slurm.setup):
        raise SiteError(
            f"{sys.executable}: pods cannot run with this Python: {why}; {install('run')} there, load the "
            "MPI module that mpi4py was built with, or write slurm.check: false if only the nodes of the "
            "jobs have it"
        )


def warnings(draft: Draft, where: Where, walltimes_s: Mapping[str, float | None]) -> list[str]:
    """Returns warnings about idle pods and about rollouts that may outlast a walltime.

    Args:
        walltimes_s: Walltimes of pods in seconds, by section of the campaign file. ``None`` if unknown.
    """
    if draft.config.is_pool:
        return []
    return [*_idle_pods(draft, where), *_cut_off(draft, where, walltimes_s)]


def _idle_pods(draft: Draft, where: Where) -> list[str]:
    config, pods = draft.config, draft.config.slurm.pods.total
    if config.training or pods == 1:  # a trainer requests rollouts round by round
        return []
    blocks = count_blocks(draft.rollouts, pods, whole=whole_groups(config))
    if blocks >= pods:
        return []
    groups = len(draft.rollouts.firsts())
    why = "which stay whole (scheduling: spare or signal_after)" if whole_groups(config) else ""
    of = f"{len(draft.rollouts)} rollouts in {groups} groups, {why}" if why else f"{len(draft.rollouts)} rollouts"
    idle = pods - blocks
    return [
        f"{where('slurm.pods.count')}: {pods} pods for {of}: {idle} of them will have nothing to do; {blocks} "
        f"{'are' if blocks > 1 else 'is'} enough"
    ]


def _cut_off(draft: Draft, where: Where, walltimes_s: Mapping[str, float | None]) -> list[str]:
    lines = []
    seen = set[float]()
    for key, walltime_s in walltimes_s.items():
        if walltime_s is None or math.isinf(walltime_s) or walltime_s in seen:
            continue
        seen.add(walltime_s)  # warn once about pools with equal walltimes
        lead = draft.config.slurm.lead_s
        left_s = walltime_s - lead
        long = [task for task in _own(draft) if longest_s(task, draft.policies.values()) > left_s]
        if not long:
            continue
        worst = max(longest_s(task, draft.policies.values()) for task in long)
        lines.append(
            f"{where(f'{key}.time')}: rollouts of {len(long)} of {len(_own(draft))} tasks may take up to "
            f"{worst:.0f} s (time-outs of agent and tests), and a pod runs them for {max(0, left_s):.0f} s, its "
            f"walltime less {lead} s: a rollout that is cut off twice fails; raise {key}.time, or lower "
            "agent.timeout_s"
        )
    return lines


def _own(draft: Draft) -> list[Task]:
    held_out = set(draft.held_out)
    return [task for task in draft.tasks if task.id not in held_out]


def longest_s(task: Task, policies: Iterable[Policy]) -> float:
    """Returns the maximum duration of a task's rollout in seconds, based on the agent and test timeouts."""
    timeouts = [agent.timeout_s or task.agent_timeout_s for policy in policies for agent in policy.agents]
    return max(timeouts, default=task.agent_timeout_s) + task.verifier_timeout_s
