"""What a cluster does to a campaign, done on purpose on a lab: each fault is one function of :class:`Faults`.

A fault names what it hit, or returns ``None`` where there was nothing to hit. Processes are killed by pid and start.
Daemons of the lab are killed by its record and started again by its own ``start``. What stands still for a while
goes on by itself; :meth:`Faults.settle` waits for that.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.process import Identity, parent
from megaflow_hpc.ledger.leader import COORDINATOR as LEADER
from megaflow_hpc.ledger.leader import Leader
from megaflow_hpc.rundir.layout import RunDir
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
    "node lost",
    "rank 0 frozen",
    "worker frozen",
    "full drain",
    "slurmctld away",
    "refused requeue",
    "rate limit",
)
COORDINATOR = "coordinator"
"""A further kind, for drawn seeds only: the pod that surveys the ledger is killed while it does."""
OLD = "old-start-"
OLD_STARTS = 20_000
"""Leases of pods that ended earlier, which a survey reads."""
SURVEYED = 2000
"""Of these leases, as many are read when the coordinator is killed."""
SURVEY_S = 90.0
"""The next survey is awaited for so long."""
IN_OPEN = 0x20
"""Event of inotify: a file of the directory was opened."""

LOST_NODE_S = (35.0, 60.0)
"""For how long a node that Slurm has given up works on: a pod there finds out when it next renews its lease."""
FROZEN_RANK_0_S = 240.0
"""Longer than a lease lasts, so that others have the pod's blocks when it goes on."""
FROZEN_WORKER_S = (20.0, 60.0)
"""Rank 0 gives a worker up after 30 s."""
FULL_S = (5.0, 50.0)
AWAY_S = 60.0
"""For how long slurmctld is away while a pod asks for a requeue."""
LIMITED_S = (10.0, 60.0)
LIMITED = "limited"
"""File in ``TMPDIR``: while it is there, the ``scontrol`` of jobs (:func:`limit_requests`) refuses."""
LARGE_BYTES = 4 << 20
"""By so much a worker rank grows that has a large message in its hands."""
FULL_BYTES = 8192
"""No file may grow beyond: a journal does not, a lease needs no more."""


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def await_survey(leases: Path) -> bool:
    """Waits until a survey has read some leases of old starts; whether one has."""
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    try:
        libc.inotify_add_watch(events, os.fsencode(leases), IN_OPEN)
        opened, deadline = 0, time.monotonic() + SURVEY_S
        while opened < SURVEYED and time.monotonic() < deadline:
            with suppress(BlockingIOError):
                opened += os.read(events, 1 << 20).count(OLD.encode())
            time.sleep(0.002)
        return opened >= SURVEYED
    finally:
        os.close(events)


def leave_old_starts(run: RunDir, count: int = OLD_STARTS) -> None:
    """Writes the leases of pods that have ended in order, as weeks of replaced arrays leave them."""
    for number in range(count):
        pod = f"{OLD}{number}"
        lease = {"pod": pod, "start": "0", "host": "elsewhere", "pid": 7, "pid_start": 8, "counter": 3, "t": 1.79e9}
        lease |= {"began_at": 1.79e9, "ended": "released", "stored": 0}
        (run.ledger / "leases" / f"{pod}.0").write_text(json.dumps(lease))


def lift(who: Identity | None, most: int) -> None:
    """Lets the files of a process grow again up to its hard limit."""
    if who and who.alive():
        resource.prlimit(who.pid, resource.RLIMIT_FSIZE, (most, most))


def current_lab() -> Lab:
    """The lab whose Slurm ``SLURM_CONF`` names.

    Raises:
        SiteError: there is none; the daemons of a real cluster are not ours to kill.
    """
    directory = Path(os.environ.get("SLURM_CONF", "")).parent
    if not (directory / "lab.json").exists():
        raise SiteError('faults need a Slurm lab of your own: launchers/lab start, then eval "$(launchers/lab env)"')
    return Lab(directory)


def limit_requests(scratch: Path) -> Path:
    """Makes a directory with a ``scontrol`` that refuses requests while a rate limit is on. Slurm has such limits since
    version 23.02 (rl_enable); labs may be older.

    Returns:
        The directory, which jobs have first on ``PATH``.
    """
    folder = scratch / "bin"
    folder.mkdir(exist_ok=True)
    real, refusal = shutil.which("scontrol"), "scontrol: error: RPC rate limit exceeded"
    wrapper = folder / "scontrol"
    wrapper.write_text(
        f"#!/bin/sh\n[ ! -e {scratch / LIMITED} ] || {{ echo '{refusal}' >&2; exit 1; }}\nexec {real} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    (scratch / LIMITED).unlink(missing_ok=True)
    return folder


class Faults:
    """The faults of one campaign on a lab; ``draw`` decides what each of them hits, ``away_s`` is the time for which
    slurmctld goes away."""

    def __init__(self, lab: Lab, run: Run, draw: random.Random, away_s: float = AWAY_S) -> None:
        self._lab, self._run, self._draw, self._away_s = lab, run, draw, away_s
        self._later: list[threading.Timer] = []

    def strike(self, kind: str) -> str | None:
        """Deals out one fault of a kind; what it hit, or ``None`` where there was nothing to hit."""
        function: Callable[[], str | None] = getattr(self, "_" + kind.replace(" ", "_"))
        return function()

    def settle(self) -> None:
        """Waits until nothing stands still any more, and opens nodes that Slurm has drained for it."""
        for timer in self._later:
            timer.join()
        for node in site.ask("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split():
            with suppress(SiteError):  # Slurm has opened it by itself meanwhile
                site.ask("scontrol", "update", f"nodename={node}", "state=resume")

    def _after(self, seconds: float, undo: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, undo)
        self._later.append(timer)
        timer.start()

    def _freeze(self, pids: Iterable[int], seconds: float) -> bool:
        """Stops processes by SIGSTOP for so long; whether there was one."""
        frozen = [who for pid in pids if (who := Identity.of(pid)) and who.send(signal.SIGSTOP)]
        for who in frozen:
            self._after(seconds, lambda who=who: who.send(signal.SIGCONT))  # type: ignore[misc]
        return bool(frozen)

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

    def _coordinator(self) -> str | None:
        """The pod that surveys the ledger for all is killed while it reads the leases of old starts."""
        leave_old_starts(self._run.dir)
        if not await_survey(self._run.dir.ledger / "leases"):
            return None
        leader = Leader(self._run.dir, LEADER).holder().rpartition(".")[0]
        for pid, pod in self.ranks(first=True):
            if pod == leader and kill(pid):
                return f"rank 0 {pid} of {pod}, which surveys the ledger with {OLD_STARTS} old starts"
        return None

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

    def _drain(self, pod: str) -> bool:
        """Signals the batch shell of a pod as Slurm does before the walltime, without Slurm; whether it was there."""
        for pid, name in self.ranks(first=True):
            directory = environment(pid).get("MEGAFLOW_POD_DIR", "")
            if name == pod and directory:
                shell = Identity.of(int(directory.rsplit(".", 2)[1].partition("-")[0]))
                return shell is not None and shell.send(signal.SIGUSR2)
        return False

    def _slurmctld_away(self) -> str | None:
        """A pod asks for a requeue while slurmctld is away for longer than its walltime lasts."""
        if (pod := self._element()) is None:
            return None
        self._lab.kill("slurmctld")
        try:
            drained = self._drain(pod)
            time.sleep(self._away_s)
        finally:
            self._lab.start()
        return f"for {self._away_s:.0f} s, and the walltime of {pod} is near" if drained else None

    def _refused_requeue(self) -> str | None:
        if (pod := self._element()) is None:
            return None
        site.ask("scontrol", "update", f"jobid={pod}", "requeue=0")
        return f"element {pod}, whose walltime is near" if self._drain(pod) else None

    def _rate_limit(self) -> str | None:
        if (pod := self._element()) is None:
            return None
        held, flag = self._draw.uniform(*LIMITED_S), Path(os.environ["TMPDIR"], LIMITED)
        flag.touch()
        self._after(held, lambda: flag.unlink(missing_ok=True))
        return f"of jobs for {held:.0f} s, and the walltime of {pod} is near" if self._drain(pod) else None

    def _node_lost(self) -> str | None:
        """Slurm takes a node for lost whose processes go on: its daemon and every srun there are out of reach."""
        if not (firsts := self.ranks(first=True)):
            return None
        pid, pod = self._draw.choice(firsts)
        node, held = environment(pid).get("SLURMD_NODENAME"), self._draw.uniform(*LOST_NODE_S)
        daemon = self._lab.status()["daemons"].get(f"slurmd-{node}")
        if not daemon or not alive(daemon):
            return None
        steps = [
            step
            for step, words in processes()
            if words and Path(words[0]).name == "srun" and self._ours(words)
            if environment(step).get("SLURMD_NODENAME") == node
        ]
        self._freeze([daemon["pid"], *steps], held)
        site.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

        def resume() -> None:
            with suppress(SiteError):  # its daemon, started anew meanwhile, has said that it is there
                site.ask("scontrol", "update", f"nodename={node}", "state=resume")

        self._after(held + 1, resume)
        return f"{node} with {pod}, which goes on for {held:.0f} s"

    def _rank_0_frozen(self) -> str | None:
        if not (firsts := self.ranks(first=True)):
            return None
        pid, pod = self._draw.choice(firsts)
        return f"rank 0 {pid} of {pod}, {FROZEN_RANK_0_S:.0f} s" if self._freeze([pid], FROZEN_RANK_0_S) else None

    def _worker_frozen(self) -> str | None:
        """A worker rank stops as it passes a large message on; after a while any that there is."""
        sizes: dict[int, int] = {}
        held, deadline = self._draw.uniform(*FROZEN_WORKER_S), time.monotonic() + 15
        workers = self.ranks(first=False)
        while time.monotonic() < deadline:
            for pid, pod in workers:
                size = resident(pid)
                if size - sizes.setdefault(pid, size) > LARGE_BYTES and self._freeze([pid], held):
                    return f"worker rank {pid} of {pod} within a large message, {held:.0f} s"
                sizes[pid] = min(size or sizes[pid], sizes[pid])
            time.sleep(2e-4)
        if not (workers := self.ranks(first=False)):
            return None
        pid, pod = self._draw.choice(workers)
        return f"worker rank {pid} of {pod}, {held:.0f} s" if self._freeze([pid], held) else None

    def _full_drain(self) -> str | None:
        """No file of a pod grows any more, as under a full quota, and then its walltime is near."""
        if not (firsts := self.ranks(first=True)):
            return None
        pid, pod = self._draw.choice(firsts)
        held = self._draw.uniform(*FULL_S)
        try:
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, most))
        except OSError:  # it is gone
            return None
        who = Identity.of(pid)
        self._after(held, lambda: lift(who, most))
        site.ask("scancel", "--batch", "--signal=USR2", pod)
        return f"{pod}, whose files do not grow for {held:.0f} s"
