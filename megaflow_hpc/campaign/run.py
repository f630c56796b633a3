"""Starts, follows, scales, cancels, resumes and gathers a run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.campaign.autoscaler import Autoscaler
from megaflow_hpc.campaign.edits import Edits, lost_journals, restore_rooms
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.campaign.live_jobs import ASK_SLURM_S, trainers, waiting_servers
from megaflow_hpc.campaign.local import Launcher, living_pods, resolve_launcher
from megaflow_hpc.campaign.resume import ask_for, mark_gone, repeat
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger import Ledger, OpenLease
from megaflow_hpc.monitor.status import Monitor, pool_warnings
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.monitor.usage import JobUse, totals
from megaflow_hpc.resources import require_running
from megaflow_hpc.rundir.budget import CampaignBudget, spent_usd
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.events import RolloutEvent, rounded, shown
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN, Marks
from megaflow_hpc.rundir.overrides import Changes, overridden
from megaflow_hpc.rundir.record import check_version, read_run
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.accounting import efficiencies
from megaflow_hpc.slurm.ids import array_of, scancel

if TYPE_CHECKING:
    from megaflow_hpc.campaign.local import LocalPod
    from megaflow_hpc.slurm.submission import ArrayJob
    from megaflow_hpc.trajectories.reading.store import Row

HEARD_S = 10.0
"""A pod counts as running until this many seconds after its last event, even if Slurm reports something else."""


@dataclass(frozen=True)
class Cancelled:
    """Result of :meth:`Run.cancel`."""

    before: str
    """State of the run before cancelling."""
    jobs: list[str]
    """Jobs and arrays that were queued or running. If Slurm does not respond, all jobs of the run."""
    pods: list[str]
    """Pods on this host that are not Slurm jobs and now drain."""


class Run:
    """Handle of a run, to start, follow, scale, cancel, resume or gather it.

    >>> run = Run("runs/fix-bugs-…")                                  # doctest: +SKIP
    >>> run.wait()["state"], run.summary()["default"]["mean_reward"]  # doctest: +SKIP
    ('finished', 0.75)

    Args:
        path: The run directory.

    Raises:
        ConfigError: ``path`` is not a run directory.
    """

    def __init__(self, path: str | Path | RunDir) -> None:
        self.dir = path if isinstance(path, RunDir) else RunDir(path)
        self.record = read_run(self.dir)
        self.config = overridden(self.dir, self.record.config)
        self.edits = Edits(self.dir, self.record)
        """Edits of the run's files since planning."""
        self.ledger = Ledger(self.dir)
        self.monitor = Monitor(self.dir)
        self.slurm_jobs = Jobs(self.dir, self.config, self.record, self.ledger)
        self._marks = Marks(self.dir)
        self.local: LocalPod | None = None

    def __repr__(self) -> str:
        state = "unfinished"
        if self._marks.finished:
            state = "finished"
        elif self._marks.cancelled:
            state = "cancelled"
        return f"<Run {self.config.name!r} in {self.path}: {state}, {self.record.total} rollouts planned>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.dir.path

    @property
    def jobs(self) -> list[ArrayJob]:
        """submitit handles of the jobs that this process submitted."""
        return self.slurm_jobs.arrays.handles

    # --- start ---

    def start(self, launcher: Launcher = "slurm", ranks: int = 1) -> None:
        """Submits the arrays and the gather job, or starts a local pod of ``ranks`` MPI ranks. 1 means without MPI."""
        require_running(self.config.name)
        if resolve_launcher(launcher, self.config.slurm) == "slurm":
            self.slurm_jobs.start()
            return
        from megaflow_hpc.campaign.local import LocalPod

        self.local = LocalPod(self.dir, ranks, len(self.record.servers), self.config)

    # --- status ---

    def job_ids(self, role: str | None = None) -> list[str]:
        """Returns the ids of this run's arrays, filtered by role if given. Includes arrays submitted by hand."""
        return self.slurm_jobs.ids(role)

    def live_jobs(self, max_age_s: float = ASK_SLURM_S) -> set[str] | None:
        """Returns the array elements that Slurm still has. Returns ``None`` if Slurm is missing or does not respond."""
        live = self.slurm_jobs.live(max_age_s)
        return None if live is None else set(live)

    def status(self) -> dict[str, Any]:
        """Returns the status in the format of ``status --json``."""
        status = self._status(self._slurm_age_s)
        if servers := self.record.servers:
            registered = {server["server"] for server in status["servers"]}
            states = self.slurm_jobs.servers(self._slurm_age_s) or {}
            status["servers"] += waiting_servers(self.dir, [server.policy for server in servers], states, registered)
        ended = status["state"] in ("finished", "cancelled")
        status["queue"] = [] if ended else self.slurm_jobs.waiting(self._slurm_age_s)
        status["warnings"] = [*self.edits.warnings(), *self.monitor.warnings(status["pods"])]
        if ended or status["state"] == "stopped":
            status["warnings"] += lost_journals(self.dir, self.ledger)
        if not ended:
            status["warnings"] += self.slurm_jobs.refused(self._slurm_age_s)
            status["warnings"] += self.slurm_jobs.unreplaced()
            status["warnings"] += filter(None, [self.dir.full()])
            status["warnings"] += self.slurm_jobs.starving(status.get("training", {}), self._slurm_age_s)
        if self.record.pools and not ended:
            status["warnings"] += pool_warnings(self.dir)
        return status

    def _status(self, slurm_age_s: float) -> dict[str, Any]:
        """Returns the status from the run's files and from Slurm data of at most ``slurm_age_s`` seconds."""
        live = self.slurm_jobs.live(slurm_age_s)
        pending = [job for job, state in (live or {}).items() if state.waits]
        status = self.monitor.status(live, pending, self.slurm_jobs.asked_at, self._trainers())
        usd = CampaignBudget(self.dir, self.config.limits.model_dump()).limits()["usd"]
        if usd is not None:
            status["spent"] = {"usd": round(spent_usd(self.ledger.accounts()), 4), "limit": usd}
        return status

    def _trainers(self) -> dict[str, TrainerJob] | None:
        """Returns the trainers that are queued or running. Returns ``None`` if this is unknown."""
        if self.local is not None:
            here = os.uname().nodename
            return {policy: TrainerJob("running", node=here) for policy in self.local.training}
        return trainers(self.slurm_jobs.trainer_states(self._slurm_age_s) if self.config.training else {})

    @property
    def _slurm_age_s(self) -> float:
        """Maximum age of Slurm data in seconds. It is higher while pods write events."""
        return 6 * ASK_SLURM_S if self.monitor.heard_s < HEARD_S else ASK_SLURM_S

    def usage(self) -> dict[str, float]:
        """Returns the core-seconds and GPU-seconds allocated to all jobs, and the idle part of each.

        Raises:
            SiteError: Slurm accounting is missing or does not respond.
        """
        from megaflow_hpc.trajectories import open_trajectories

        uses, now = self.job_uses(), time.time()
        with open_trajectories(self.path) as store:
            ran = [(a.job_id, (a.started_at, a.finished_at)) for t in store for a in t.attempts]
        self.monitor.refresh()
        ran += [(pod, (began_at, now)) for pod, began_at in self.monitor.at_work()]
        return totals(uses, ran)

    def job_uses(self) -> list[JobUse]:
        """Returns every start of every job of this run, with allocated and used resources.

        Raises:
            SiteError: Slurm accounting is missing or does not respond.
        """
        roles = {job: role for role in ("gather", "servers", "trainer", "pods") for job in self.job_ids(role)}
        now = time.time()
        return [
            JobUse(
                span=(start.started_at, start.ended_at or now),
                cores=start.cores,
                gpus=start.gpus,
                job=start.id,
                role=roles.get(array_of(start.id), "pods"),
                state=start.state,
                cpu_s=(start.cpu_s or None) if start.ended_at else None,  # 0: this Slurm does not measure it
                memory_asked_mb=start.memory_asked_mb,
                memory_peak_mb=start.memory_peak_mb,
            )
            for start in (efficiencies(roles) if roles else ())
        ]

    def pods_live(self) -> bool | None:
        """Returns whether any pod is queued or running. Returns ``None`` if this is unknown."""
        if self.local is not None:
            return self.local.look()
        live = self.slurm_jobs.live_pods(self._slurm_age_s)
        return None if live is None else bool(live)

    # --- wait ---

    @contextmanager
    def tended(self) -> Iterator[Callable[[], object]]:
        """Yields a function that adds missing pods and engine servers. The caller calls it at each poll.

        The function does nothing for another user's run.
        """
        if self.path.stat().st_uid != os.getuid():
            yield lambda: None
            return
        holder = f"{os.uname().nodename} process {os.getpid()}"
        autoscaler = Autoscaler(self.dir, self.record, self.slurm_jobs, holder, self.monitor)

        def tend() -> None:
            self.slurm_jobs.top_up()
            autoscaler.tick()

        try:
            yield tend
        finally:
            autoscaler.leave()

    def over(self, status: Mapping[str, Any] | None = None) -> bool:
        """Returns whether the campaign has ended or no pods are left.

        Args:
            status: A recent status. ``None`` reads the current status.
        """
        status = status or self.status()
        if self.config.is_pool and self.local is None:  # a pool has no pods, and serves until it is cancelled
            return status["state"] == "cancelled" or self.slurm_jobs.servers(self._slurm_age_s) == {}
        return status["state"] in ("finished", "cancelled") or (
            self.pods_live() is False and not self.slurm_jobs.replacing
        )

    def wait(
        self,
        timeout_s: float | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Follows the campaign to its end, gathers, and returns the status with the results of each policy.

        >>> run.wait(progress=lambda status: print(status["rollouts"]))   # doctest: +SKIP

        Args:
            timeout_s: Seconds to wait. Default: no limit.
            progress: Called with the status at each poll, about once a second.
            interrupted: Called on Ctrl-C, before a local pod drains.

        Raises:
            TimeoutError: The campaign did not end within ``timeout_s``. It continues to run.
        """
        self.follow(timeout_s, progress, interrupted)
        result = self.conclude()
        if progress:
            progress(result)
        return result

    def follow(
        self,
        timeout_s: float | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until the campaign ends or no pods are left.

        Args:
            progress: Called with the status at each poll.
            interrupted: Called on Ctrl-C, before a local pod drains, which may take a minute.

        Raises:
            TimeoutError: The campaign did not end within ``timeout_s`` seconds. It continues to run.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self.tended() as tend:
                while True:
                    status = self.status()
                    if progress:
                        progress(status)
                    tend()
                    if self.over(status):
                        break
                    if end is not None and time.monotonic() > end:
                        raise TimeoutError(
                            f"{self.dir}: not finished after {timeout_s:g} s; it continues, see: megaflow-hpc status"
                        )
                    time.sleep(1.0)
        except TimeoutError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                interrupted()
            if self.local is not None:
                self.local.stop()
            raise

    def conclude(self) -> dict[str, Any]:
        """Stops local processes and gathers. Returns the status, with result counts from the stored rollouts."""
        if self.local is not None:
            self.local.stop()
        self.gather()
        self._recount()
        status = self._status(0)
        status["warnings"] = self.monitor.warnings([])
        if status["state"] not in ("finished", "cancelled"):
            status["warnings"] += self.slurm_jobs.refused()
        return {
            **status,
            "errors": self.monitor.errors(),
            "policies": self.monitor.summary(),
            "trajectories": str(self.dir.trajectories),
        }

    def summary(self) -> dict[str, dict[str, Any]]:
        """Returns the results of each policy, from the rollouts that are stored so far.

        Returns:
            For each policy, ``rollouts``, ``statuses``, ``solved`` (at least ``pass_threshold``), ``mean_reward``,
            ``evaluation`` (mean and pass@k with 95 % intervals) and more, as ``run --json`` prints under ``policies``.

        Raises:
            ConfigError: A journal or ``trajectories.h5`` is damaged.
        """
        self._recount()
        return self.monitor.summary()

    def stored_rollouts(self) -> dict[str, RolloutEvent]:
        """Returns every stored rollout by id. Call :meth:`Monitor.list_rollouts` before the first status.

        If pods have started so often that earlier events were condensed, reads the rollouts from the trajectories.
        """
        if not self.monitor.lists_all:
            self._recount()
        return self.monitor.rollouts

    def _recount(self) -> None:
        """Counts the results again from stored rollouts. Event files are not fsynced, and may include records that a
        seal invalidates."""
        from megaflow_hpc.trajectories import open_trajectories

        with open_trajectories(self.path) as store:
            self.monitor.settle(
                RolloutEvent(
                    id=t.id,
                    status=t.status,
                    kind=t.error_kind,
                    error=shown(t.error),
                    reward=None if math.isnan(t.reward) else t.reward,
                    seconds=round(t.finished_at - t.started_at, 2),
                    turns=len(t.turns),
                    cpu_s=rounded(t.cpu_s, 2),
                    memory_peak_mb=rounded(t.memory_peak_mb, 1),
                    disk_peak_mb=rounded(t.disk_peak_mb, 1),
                )
                for t in store
            )

    def gather(self, rebuild: bool = False, stop: Callable[[], bool] = lambda: False) -> Path:
        """Writes ``trajectories.h5`` from the journals if it is out of date. With ``rebuild``, always writes it.

        Args:
            stop: Called after each row. If it returns true, gathering stops, and the next call continues.

        Raises:
            Unfinished: ``stop`` returned true.
        """
        from megaflow_hpc.trajectories import gather

        self.dir.check_ours()
        if self.ledger.finished:  # in case the last pod was killed before removing it
            remove_tree(self.dir.partial, ignore_errors=True)
        return gather(self.dir, self.ledger.seals(), rebuild=rebuild, stop=stop)

    def stream(self, after: Iterable[str] | None = None) -> Iterator[Row]:
        """Yields trajectories as they become durable, until the campaign ends. ``after`` lists ids to skip.

        >>> for trajectory in run.stream():                           # doctest: +SKIP
        ...     print(trajectory.id, trajectory.reward)

        Yields each id once, or twice if it first failed or was cancelled and later succeeded. To continue in another
        process, use :class:`~megaflow_hpc.trajectories.reading.follow.Follower`.
        """
        from megaflow_hpc.trajectories import follow

        return follow(self.dir, self.over, after or ())

    # --- control ---

    def scale(self, pods: int) -> dict[str, list[str]]:
        """Adds or removes pods until ``pods`` are queued or running."""
        if not site.has_slurm():
            raise SiteError("scale adds and removes Slurm jobs, but Slurm is not available here")
        self.dir.check_ours(to_run=True)
        return self.slurm_jobs.scale(pods)

    def scale_servers(self, servers: int, policy: str | None = None) -> list[str]:
        """Releases held engine servers until ``servers`` are queued or running. Idle servers exit on their own.

        Raises:
            ConfigError: The policy is unknown.
            SiteError: Slurm does not respond, or refuses the request.
        """
        policies = sorted({server.policy for server in self.record.servers})
        if policy is None and len(policies) == 1:
            (policy,) = policies
        if not policies:
            raise ConfigError(f"{self.path}: the campaign has no engine servers to scale; use --pods N")
        if policy is None or policy not in policies:
            raise ConfigError(f"--policy {policy or 'missing'}: engine servers are of {', '.join(policies)}; name one")
        return self.slurm_jobs.release(policy, servers)

    def cancel(self) -> Cancelled:
        """Cancels all jobs of this run and drains its pods on this host. Keeps stored results.

        A finished run stays finished. Only its remaining jobs are cancelled.

        Raises:
            SiteError: The run has Slurm jobs, but Slurm is missing on this machine or does not respond.
        """
        self.dir.check_ours()
        before, live = self.status()["state"], self.live_jobs(0)
        submitted, leases = set(self.job_ids()), self.ledger.leases().values()
        pods = living_pods(leases)
        if before != "finished":
            self._marks.cancel()
            if self.config.is_pool:
                EnginePool(self.path).close()
        if self.local is not None:
            self.local.stop()
        for directory in pods.values():
            with suppress(FileNotFoundError):  # it has just ended
                write_atomic(directory / DRAIN, "stopped")
        runs_locally = bool(leases) and not submitted
        ids = self.slurm_jobs.cancel() if submitted or not (runs_locally or before == "finished") else []
        if ids and not site.has_slurm():
            raise SiteError(
                f"jobs {' '.join(ids)}: run on Slurm, which is not available here; cancel them where sbatch is"
            )
        cancelled = set(ids) if live is None else {array_of(element) for element in live} | (set(ids) - submitted)
        return Cancelled(before, sorted(cancelled), sorted(pods))

    def check_stopped(self) -> None:
        """Checks that no pod is queued or running, because pods read the tasks only once.

        Raises:
            ConfigError: A pod is queued or running.
            SiteError: Slurm does not report which pods exist.
        """
        pods = sorted(living_pods(self.ledger.leases().values()))
        if not pods and self.job_ids():
            live = self.slurm_jobs.live_pods(0)
            if live is None:
                raise SiteError(f"{self.path}: Slurm does not report which pods exist; nothing was changed")
            pods = [pod.id for pod in live]
        if pods:
            raise ConfigError(
                f"{self.path}: {len(pods)} pods are queued or running (among them {pods[0]}) and do not know the new "
                f"tasks; wait for them, or stop them first (megaflow-hpc cancel {self.path}; stored results are kept)"
            )

    def _only_local(self) -> bool:
        """Returns whether pods of this run have started, all of them on a machine without Slurm jobs."""
        return bool(self.ledger.accounts()) and not self.job_ids()

    def _works(self, launcher: str) -> bool:
        """Returns whether a pod, or a server of an engine pool, is queued or running.

        Raises:
            SiteError: Slurm does not report it.
        """
        if self.local is not None or launcher != "slurm" or not self.job_ids():
            return bool(self.pods_live())
        live = self.slurm_jobs.servers(0) if self.config.is_pool else self.slurm_jobs.live_pods(0)
        if live is None:
            raise SiteError(f"{self.path}: Slurm does not report which jobs exist; nothing was submitted")
        return bool(live)

    def resume(
        self,
        failed: bool = False,
        only: Sequence[str] = (),
        launcher: Launcher = "auto",
        ranks: int = 1,
        limits: Mapping[str, float | None] | None = None,
        requests: Changes | None = None,
        accept_changes: bool = False,
    ) -> bool:
        """Runs all rollouts that are not stored yet. Returns false if all rollouts are stored.

        Args:
            failed: Also repeat the failed rollouts.
            only: Also repeat these rollouts if they failed (ids or shell patterns).
            limits: New values of ``core_hours``, ``gpu_hours``, ``wall`` or ``usd``. ``None`` removes a limit.
            requests: New ``time``, ``mem`` or ``partition`` of ``pods``, ``servers``, ``trainer`` or ``gather``, for
                jobs submitted from now on.
            accept_changes: Accept tasks whose files were changed after planning, and record the new digests.

        Raises:
            ConfigError: A limit of the campaign is exceeded, pods are running with other requests or other tasks,
                another minor version planned the run, or files are missing.
            SiteError: Slurm does not report which pods have ended. Nothing was changed.
        """
        self.dir.check_ours(to_run=True)
        check_version(self.record, self.dir)
        require_running(self.config.name)
        if launcher == "auto" and not requests and self._only_local():  # requests are for jobs
            launcher = "local"
        chosen = resolve_launcher(launcher, self.config.slurm)
        if not self.ledger.finished:
            restore_rooms(self.dir, self.record, self.ledger)
        budget = CampaignBudget(self.dir, self.config.limits.model_dump())
        budget.raise_to(limits or {})
        passed = budget.exceeded(self.ledger.accounts())
        if passed and not self.ledger.finished:
            name = passed.rpartition("limits.")[2].split(" ")[0]
            unit = "USD" if name == "usd" else "HOURS"
            raise ConfigError(f"{passed}; continue with: megaflow-hpc resume {self.dir} --limit {name}={unit}")
        if accept_changes:
            self.check_stopped()
            self.edits.accept_tasks()
        if requests:
            self.config = ask_for(requests, chosen, self.dir, self.record, self.slurm_jobs)
            self.slurm_jobs = Jobs(self.dir, self.config, self.record, self.ledger)
        if self._marks.cancelled and chosen == "slurm":
            self.slurm_jobs.until_gone()
        works = (self.config.is_pool or not accept_changes) and self._works(chosen)
        mark_gone(self.ledger)
        for consumer in self._marks.closed:
            OpenLease(self.dir, consumer).put()
        self._marks.uncancel()
        if self.config.is_pool:
            EnginePool(self.path).reopen()
        self._marks.forget_unstarted()
        if failed or only:
            repeat(self.dir, self.ledger, self.config, only)
        if self.ledger.finished:
            return False
        if works:
            if chosen == "slurm":
                self.slurm_jobs.revive()
                self.slurm_jobs.forgive()
            return True  # queued or running pods claim the added blocks
        left = self.job_ids() if chosen == "slurm" else []
        if left:
            scancel(left)  # engines of an earlier start, which will be replaced
            self.slurm_jobs.until_gone()
        self._marks.forget_refused()
        self.start(chosen, ranks)
        return True
