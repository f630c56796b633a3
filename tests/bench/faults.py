"""What a cluster does to a campaign, done on purpose on a lab: each fault is one function of :class:`Faults`.

A fault names what it hit, or returns ``None`` where there was nothing to hit. Processes are killed by pid and start.
Daemons of the lab are killed by its record and started again by its own ``start``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.process import parent
from megaflow_hpc.slurm import site
from tests.support.labs import Lab, alive
from tests.support.processes import environment, kill, processes

KINDS = (
    "rank",
    "rank 0",
    "runner",
    "pod",
    "engine",
    "slurmd",
    "slurmctld",
    "preempt",
    "walltime",
    "scancel",
    "requeue",
)


def current_lab() -> Lab:
    """The lab whose Slurm ``SLURM_CONF`` names.

    Raises:
        SiteError: there is none; the daemons of a real cluster are not ours to kill.
    """
    directory = Path(os.environ.get("SLURM_CONF", "")).parent
    if not (directory / "lab.json").exists():
        raise SiteError('faults need a Slurm lab of your own: launchers/lab start, then eval "$(launchers/lab env)"')
    return Lab(directory)


class Faults:
    """The faults of one campaign on a lab; ``draw`` decides what each of them hits."""

    def __init__(self, lab: Lab, run: Run, draw: random.Random) -> None:
        self._lab, self._run, self._draw = lab, run, draw

    def strike(self, kind: str) -> str | None:
        """Deals out one fault of a kind; what it hit, or ``None`` where there was nothing to hit."""
        function: Callable[[], str | None] = getattr(self, "_" + kind.replace(" ", "_"))
        return function()

    def ranks(self, first: bool | None = None) -> list[tuple[int, str]]:
        """Pid and pod of the run's ranks: all, rank 0 only (``first``), or the others."""
        found = []
        for pid, words in processes():
            if "megaflow_hpc.pod" in words and str(self._run.path) in words and "srun" not in words[0]:
                variables = environment(pid)
                rank = int(variables.get("PMI_RANK") or variables.get("SLURM_PROCID") or 0)
                if first is None or (rank == 0) == first:
                    found.append((pid, variables.get("MEGAFLOW_POD", "")))
        return sorted(found)

    def _one(self, kind: str, candidates: list[tuple[int, str]]) -> str | None:
        if not candidates:
            return None
        pid, name = self._draw.choice(candidates)
        return f"{kind} {pid} of {name}" if kill(pid) else None

    def _rank(self) -> str | None:
        return self._one("worker rank", self.ranks(first=False))

    def _rank_0(self) -> str | None:
        return self._one("rank 0", self.ranks(first=True))

    def _runner(self) -> str | None:
        ranks = dict(self.ranks(first=False))
        runners = []
        for pid, words in processes():
            if "megaflow_hpc.pod.rollout.runner" in words and (above := parent(pid)) in ranks:
                runners.append((pid, ranks[above]))
        return self._one("runner", runners)

    def _engine(self) -> str | None:
        servers = {pid for pid, words in processes() if "megaflow_hpc.model.server" in words and self._ours(words)}
        below = {pid for pid, _ in processes() if parent(pid) in servers}
        return self._one("engine", [(pid, "the engine array") for pid in sorted(servers | below)])

    def _ours(self, words: list[str]) -> bool:
        return str(self._run.path) in words

    def _element(self) -> str | None:
        """A pod that runs, as Slurm calls it."""
        pods = self._run.slurm_jobs.live_pods(0) or []
        running = sorted(pod.id for pod in pods if pod.state == "RUNNING")
        return self._draw.choice(running) if running else None

    def _pod(self) -> str | None:
        if (pod := self._element()) is None:
            return None
        site.ask("scancel", "--signal=KILL", "--full", pod)
        return f"every process of pod {pod}, the batch shell too"

    def _scancel(self) -> str | None:
        if (pod := self._element()) is None:
            return None
        site.ask("scancel", pod)
        return f"element {pod}"

    def _requeue(self) -> str | None:
        if (pod := self._element()) is None:
            return None
        site.ask("scontrol", "requeue", pod)
        return f"element {pod}"

    def _walltime(self) -> str | None:
        """The element's walltime becomes so short that it is warned at once."""
        if (pod := self._element()) is None:
            return None
        elapsed = site.ask("squeue", "-h", "-j", pod, "-o", "%M").strip().split(":")
        minutes = sum(int(part) * 60**n for n, part in enumerate(reversed(elapsed[:-1])))
        site.ask("scontrol", "update", f"jobid={pod}", f"timelimit={minutes + 1}")
        return f"element {pod} has {minutes + 1} minutes in all"

    def _preempt(self) -> str | None:
        site.ask("sbatch", "-p", "cpu", "-N4", "--exclusive", "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 2")
        return "all pods, by an urgent job on their nodes"

    def _slurmd(self) -> str | None:
        nodes = sorted({variables["SLURMD_NODENAME"] for pid, _ in self.ranks() if (variables := environment(pid))})
        return self._daemon(f"slurmd-{self._draw.choice(nodes)}") if nodes else None

    def _slurmctld(self) -> str | None:
        return self._daemon("slurmctld")

    def _daemon(self, name: str) -> str | None:
        if not alive(self._lab.status()["daemons"][name]):
            return None
        self._lab.kill(name)
        down = self._draw.uniform(1, 6)
        time.sleep(down)
        self._lab.start()
        return f"{name}, down for {down:.0f} s"
