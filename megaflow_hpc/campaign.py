"""The facade: :class:`Campaign` plans and submits, :class:`Run` follows, resumes, cancels and yields results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from megaflow_hpc import config as config_module
from megaflow_hpc import plan as plan_module
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger, read_blocks, write_blocks
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.process import Identity
from megaflow_hpc.rundir import RunDir, new_run_name, write_json
from megaflow_hpc.slurm import accounting, script, site

if TYPE_CHECKING:
    from megaflow_hpc.local import LocalPod
    from megaflow_hpc.slurm.submission import ArrayJob
    from megaflow_hpc.trajectories.reader import Row

Launcher = Literal["auto", "local", "slurm"]

ASK_SLURM_S = 30.0
"""How often a following process asks squeue: one batched query, two a minute."""

GONE_S = 120.0
MAX_DEPENDENCIES = 16
"""Engines whose start pods wait for: any one of them is enough."""

LEAVE_S = 30.0
"""What engines may take to leave once the campaign is finished."""


class Campaign:
    """A validated campaign file, not yet a run.

    Args:
        fields: the campaign file's keys as Python values.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = config_module.parse(fields)
        self.base = Path.cwd()
        self.file: str | None = None
        self._node: yaml.Node | None = None
        self._text = ""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Campaign:
        campaign = cls.__new__(cls)
        campaign.config = config_module.load(path)
        campaign.base = Path(path).absolute().parent
        campaign.file = str(path)
        campaign._text = Path(path).read_text(encoding="utf-8")
        campaign._node = config_module.read_yaml(path)[1]
        return campaign

    def where(self, key: str) -> str:
        """``file:line`` of a dotted key, for messages."""
        if self.file is None:
            return f"campaign {self.config.name}"
        return f"{self.file}:{config_module.line_of(self._node, key.split('.')) or 1}"

    def _run_dir(self, run_dir: str | Path | None) -> RunDir:
        if run_dir is not None:
            return RunDir(run_dir)
        return RunDir(self.base / self.config.run_dir / new_run_name(self.config.name))

    def plan(self, run_dir: str | Path | None = None, only: Sequence[str] = (), launcher: Launcher = "auto") -> Run:
        """Makes the run directory; queues nothing."""
        slurm = resolve_launcher(launcher) == "slurm"
        if slurm:
            self.check_site()
        made = plan_module.make(self.config, self.base, self.where, self._text, only)
        run = self._run_dir(run_dir)
        plan_module.write(made, run, site.mpi_plugin() if slurm else "pmi2")
        return Run(run)

    def submit(
        self, launcher: Launcher = "slurm", run_dir: str | Path | None = None, only: Sequence[str] = (), ranks: int = 1
    ) -> Run:
        """Plans and queues (or starts, ``launcher="local"``)."""
        run = self.plan(run_dir, only, launcher)
        run.start(launcher, ranks)
        return run

    def dry_run(self, run_dir: str | Path | None = None, only: Sequence[str] = ()) -> list[script.Job]:
        """The jobs that :meth:`submit` would queue; touches nothing."""
        self.check_site()
        made = plan_module.make(self.config, self.base, self.where, self._text, only, build=False)
        run = self._run_dir(run_dir)
        gather = script.gather_job(self.config, run, "afterany:ID_OF_THE_POD_ARRAY")
        return [*jobs_of(self.config, run, made.server_groups), gather]

    def check_site(self) -> None:
        """Partitions and array sizes that the campaign names must exist here."""
        known = site.partitions()
        servers = any(policy.model for policy in self.config.policies().values())
        wanted = [("slurm.pods.partition", self.config.slurm.pods.partition)]
        if servers:
            wanted.append(("slurm.servers.partition", self.config.slurm.servers.partition))
        for key, name in wanted:
            for part in name.split(",") if name else ():
                if part not in known:
                    raise ConfigError(
                        f"{self.where(key)}: {key}: no partition {part!r} here; there are: {', '.join(sorted(known))}"
                    )
        if self.config.slurm.pods.count > site.max_array_size():
            raise ConfigError(
                f"{self.where('slurm.pods.count')}: slurm.pods.count: {self.config.slurm.pods.count} elements, "
                f"the site's MaxArraySize is {site.max_array_size()}; ask for fewer, larger pods"
            )


def resolve_launcher(launcher: Launcher) -> Literal["local", "slurm"]:
    """``auto`` is Slurm where there is one."""
    if launcher == "auto":
        return "slurm" if site.has_slurm() else "local"
    if launcher == "slurm" and not site.has_slurm():
        raise SiteError("sbatch, squeue, srun: not found; load the site's Slurm module, or use --launcher local")
    return launcher


def jobs_of(config: CampaignConfig, run: RunDir, server_groups: Sequence[Sequence[int]]) -> list[script.Job]:
    """The engine arrays and the pod array of a run; the gather job needs the pods' id and comes after."""
    servers = [script.server_job(config, run, count, gpus, first) for first, count, gpus in server_groups]
    return [*servers, script.pod_job(config, run)]


class Run:
    """One run directory: what happens there, and what to do about it."""

    def __init__(self, path: str | Path | RunDir) -> None:
        self.dir = path if isinstance(path, RunDir) else RunDir(path)
        self._content = self.dir.read_run()
        self.config = CampaignConfig.model_validate(self._content["campaign"])
        self.ledger = Ledger(self.dir)
        self.monitor = Monitor(self.dir)
        self.jobs: list[ArrayJob] = []
        self.local: LocalPod | None = None
        self._live: tuple[float, set[str] | None] = (-ASK_SLURM_S, None)

    @property
    def path(self) -> Path:
        return self.dir.path

    # --- start ---

    def start(self, launcher: Launcher = "slurm", ranks: int = 1) -> None:
        """Queues the arrays and the gather job, or starts one local pod of ``ranks`` MPI ranks (1: no MPI)."""
        if resolve_launcher(launcher) == "local":
            from megaflow_hpc.local import LocalPod

            self.local = LocalPod(self.dir, ranks, len(self._content["servers"]))
            return
        try:
            engines: list[str] = []
            for first, count, gpus in self._content["server_groups"]:
                engines += self._queue(script.server_job(self.config, self.dir, count, gpus, first))
            # Pods wait in the queue, not on a node, until an engine starts.
            dependency = "?".join(f"after:{engine}" for engine in engines[:MAX_DEPENDENCIES]) or None
            pods = self._queue(script.pod_job(self.config, self.dir, dependency=dependency))[0].split("_")[0]
            servers = sorted({engine.split("_")[0] for engine in engines})
            self._queue(script.gather_job(self.config, self.dir, f"afterany:{pods}", servers))
        except BaseException:
            self.cancel()  # half a campaign would hold GPUs for nothing
            raise

    def _queue(self, job: script.Job) -> list[str]:
        """Submits and writes down at once: a submission that breaks off half-way can still be cancelled."""
        from megaflow_hpc.slurm.submission import submit

        handles = submit(self.dir, job)
        self.jobs += handles
        array = handles[0].job_id.split("_")[0]
        self._content["jobs"].append({"role": job.role, "id": array, "elements": job.elements})
        write_json(self.dir.run_json, self._content)
        return [handle.job_id for handle in handles]

    def job_ids(self, role: str | None = None) -> list[str]:
        """Every array this run is known to have, those submitted by hand included once they have started."""
        ids = {job["id"] for job in self._content["jobs"] if role in (None, job["role"])}
        if role in (None, "pods"):
            ids |= {lease["job_id"].split("_")[0] for lease in self.ledger.leases().values() if lease.get("job_id")}
        return sorted(ids)

    # --- look ---

    def live_jobs(self, max_age_s: float = ASK_SLURM_S) -> set[str] | None:
        """Elements that Slurm still has; ``None`` without Slurm or while it does not answer."""
        asked, live = self._live
        if time.monotonic() - asked >= max_age_s:
            live = None
            if self.job_ids() and site.has_slurm():
                try:
                    live = {job.id for job in accounting.live_jobs(self.job_ids()).values() if job.live}
                except SiteError:
                    pass  # the controller is away for a while; the campaign goes on without it
            self._live = (time.monotonic(), live)
        return live

    def status(self) -> dict[str, Any]:
        """The contract of ``status --json``."""
        return self.monitor.status(self.live_jobs())

    def pods_live(self) -> bool | None:
        """Whether any pod is queued or running; ``None`` if that cannot be told now."""
        if self.local is not None:
            return self.local.running
        live = self.live_jobs()
        if live is None:
            return None
        pods = set(self.job_ids("pods"))
        return any(element.split("_")[0] in pods for element in live)

    # --- wait ---

    def wait(
        self, timeout_s: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Follows until the campaign ends (or no pod is left), gathers, and returns :meth:`summary`.

        Raises:
            TimeoutError: ``timeout_s`` seconds passed first; the campaign goes on.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                status = self.status()
                if progress:
                    progress(status)
                if status["state"] in ("finished", "cancelled") or self.pods_live() is False:
                    break
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(
                        f"{self.dir}: not finished after {timeout_s:g} s; it goes on, see: megaflow-hpc status"
                    )
                time.sleep(1.0)
        except TimeoutError:
            raise
        except BaseException:
            if self.local is not None:
                self.local.stop()
            raise
        if self.local is not None:
            self.local.stop()
        self.gather()
        self._recount()
        status = self.monitor.status(self.live_jobs(0))
        if progress:
            progress(status)
        return {**status, "policies": self.monitor.summary(), "trajectories": str(self.dir.trajectories)}

    def gather(self, rebuild: bool = False) -> Path:
        """Writes ``trajectories.h5`` from the journals, if it is not up to date or ``rebuild``."""
        from megaflow_hpc.trajectories import gather

        return gather(self.dir, self.ledger.seals(), rebuild=rebuild)

    def _recount(self) -> None:
        """Lets what is stored decide: the event files are flushed, not fsynced, and know nothing of seals."""
        from megaflow_hpc.trajectories import open_trajectories

        with open_trajectories(self.dir.path) as store:
            self.monitor.settle(
                {
                    t.id: {
                        "status": t.status,
                        "kind": t.error_kind,
                        "error": t.error[:300],
                        "reward": None if t.reward != t.reward else t.reward,
                        "seconds": round(t.finished_at - t.started_at, 2),
                        "turns": len(t.turns),
                    }
                    for t in store
                }
            )

    def stream(self, after: Iterable[str] | None = None) -> Iterator[Row]:
        """Trajectories as they become durable, each id once; ends with the campaign. ``after``: ids to leave out."""
        from megaflow_hpc.trajectories import follow

        def over() -> bool:
            return self.status()["state"] in ("finished", "cancelled") or self.pods_live() is False

        return follow(self.dir, over, after or ())

    # --- act ---

    def cancel(self) -> list[str]:
        """Asks Slurm to cancel everything of this run; what is durable stays. Returns the job ids."""
        self.dir.ledger.joinpath("cancelled").touch()
        if self.local is not None:
            self.local.stop()
        ids = self.job_ids()
        if ids and site.has_slurm():
            site.ask("scancel", "--quiet", *ids)  # jobs that have ended do not mind
        self._live = (-ASK_SLURM_S, None)
        return ids

    def end_servers(self, ids: Sequence[str]) -> list[str]:
        """Cancels those of these engine arrays that are there some time after the end; for the gather job."""
        end = time.monotonic() + LEAVE_S
        while live := {job.id.split("_")[0] for job in accounting.live_jobs(ids).values() if job.live}:
            if time.monotonic() > end:
                site.ask("scancel", *sorted(live))
                break
            time.sleep(LEAVE_S / 2)  # they look for the finished mark every few seconds and leave by themselves
        return sorted(live)

    def resume(
        self, failed: bool = False, only: Sequence[str] = (), launcher: Launcher = "auto", ranks: int = 1
    ) -> bool:
        """Continues: what is not stored is run, with ``failed`` also what failed. False if there was nothing to do.

        Raises:
            SiteError: Slurm cannot say which pods are gone; nothing was changed.
        """
        chosen = resolve_launcher(launcher)
        mark = self.dir.ledger / "cancelled"
        if mark.exists() and chosen == "slurm":
            self._until_gone()
        self._mark_gone()
        mark.unlink(missing_ok=True)
        if failed or only:
            self._repeat(only)
        if self.ledger.finished:
            return False
        if self.pods_live():
            return True  # pods are queued or running; they take what was added
        if chosen == "slurm" and (left := self.job_ids()):
            site.ask("scancel", "--quiet", *left)  # engines of an earlier start; ours get new ones
            self._until_gone()
        self.start(chosen, ranks)
        self._live = (-ASK_SLURM_S, None)
        return True

    def _until_gone(self) -> None:
        """Waits for jobs that were cancelled; Slurm gives their processes half a minute."""
        end = time.monotonic() + GONE_S
        while live := self.live_jobs(2.0):
            if time.monotonic() > end:
                raise SiteError(f"jobs {' '.join(sorted(live))} were cancelled and are still there; try again later")
            time.sleep(1.0)

    def _mark_gone(self) -> None:
        """Frees the blocks of pods that are provably no more."""
        leases, gone = self.ledger.leases(), self.ledger.gone()
        jobs = sorted({lease["job_id"].split("_")[0] for lease in leases.values() if lease["job_id"]})
        live = {job.id for job in accounting.live_jobs(jobs).values() if job.live} if jobs else set()
        here = os.uname().nodename
        for name, lease in leases.items():
            if name in gone:
                continue
            if lease["job_id"]:
                dead = lease["job_id"] not in live
            else:
                dead = lease["host"] == here and not Identity(lease["pid"], lease["pid_start"]).alive()
            if dead:
                self.ledger.mark_gone(name)

    def _repeat(self, only: Sequence[str]) -> None:
        """Appends blocks with the rollouts that failed (of those, the ones that ``only`` names)."""
        from megaflow_hpc.trajectories.winners import index

        winners = index(self.dir, self.ledger.seals()).winners
        again = {entry.id for entry in winners if entry.status in ("failed", "cancelled")}
        done = self.ledger.view().done
        blocks = read_blocks(self.dir)
        # A block that is not done yet will run its failures again by itself.
        again -= {rollout.id for block in blocks if block.number not in done for rollout in block.rollouts}
        rollouts = {
            rollout.id: rollout
            for block in blocks
            for rollout in block.rollouts
            if rollout.id in again and plan_module.wanted(rollout, only)
        }
        if rollouts:
            write_blocks(self.dir, list(rollouts.values()), self.config.slurm.pods.count)
            self.ledger.reopen()
