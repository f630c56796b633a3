"""One run: started, followed, scaled, cancelled, resumed and gathered."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaflow_hpc.campaign import demand
from megaflow_hpc.campaign.autoscaler import Autoscaler
from megaflow_hpc.campaign.edits import Edits, lost_journals, restore_rooms
from megaflow_hpc.campaign.jobs import ASK_SLURM_S, Jobs
from megaflow_hpc.campaign.local import living_pods
from megaflow_hpc.campaign.planning.draft import wanted, whole_groups
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.extras import require_running
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger import Ledger, OpenLease, read_blocks, write_blocks
from megaflow_hpc.ledger.leader_lease import SCALER, LeaderLease
from megaflow_hpc.ledger.report import process_here
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.events import RolloutEvent, shown
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN, Marks
from megaflow_hpc.rundir.overrides import Changes, overridden, override
from megaflow_hpc.rundir.record import check_version, read_run
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.slurm.ids import array_of, scancel

if TYPE_CHECKING:
    from megaflow_hpc.campaign.local import LocalPod
    from megaflow_hpc.monitor.usage import JobUse
    from megaflow_hpc.slurm.submission import ArrayJob
    from megaflow_hpc.trajectories.reading.row import Row

Launcher = Literal["auto", "local", "slurm"]

HEARD_S = 10.0
"""Seconds since its last event within which a pod counts as running, whatever Slurm says."""


def resolve_launcher(launcher: Launcher) -> Literal["local", "slurm"]:
    """Returns the launcher: ``auto`` is Slurm where there is one.

    Raises:
        SiteError: Slurm is asked for and not there.
    """
    if launcher == "auto":
        return "slurm" if site.has_slurm() else "local"
    if launcher == "slurm" and not site.has_slurm():
        raise SiteError("sbatch, squeue, srun: not found; load the site's Slurm module, or use --launcher local")
    return launcher


@dataclass(frozen=True)
class Cancelled:
    """What there was to cancel."""

    before: str
    """State of the run until then."""
    jobs: list[str]
    """Jobs and arrays that waited or ran; every one that there ever was, where Slurm cannot tell."""
    pods: list[str]
    """Pods on this host, outside of Slurm."""


class Run:
    """One run: started, followed, scaled, cancelled, resumed and gathered."""

    def __init__(self, path: str | Path | RunDir) -> None:
        self.dir = path if isinstance(path, RunDir) else RunDir(path)
        self.record = read_run(self.dir)
        self.config = overridden(self.dir, self.record.config)
        self.edits = Edits(self.dir, self.record)
        """What was edited since it was planned."""
        self.ledger = Ledger(self.dir)
        self.monitor = Monitor(self.dir)
        self.slurm_jobs = Jobs(self.dir, self.config, self.record, self.ledger)
        self._marks = Marks(self.dir)
        self.local: LocalPod | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.dir.path

    @property
    def jobs(self) -> list[ArrayJob]:
        """submitit's handles of what this process has submitted: state and cancel."""
        return self.slurm_jobs.arrays.handles

    # --- start ---

    def start(self, launcher: Launcher = "slurm", ranks: int = 1) -> None:
        """Queues the arrays and the gather job, or starts one local pod of ``ranks`` MPI ranks (1: no MPI)."""
        require_running(self.config.name)
        if resolve_launcher(launcher) == "slurm":
            self.slurm_jobs.start()
            return
        from megaflow_hpc.campaign.local import LocalPod

        self.local = LocalPod(self.dir, ranks, len(self.record.servers), self.config)

    # --- look ---

    def job_ids(self, role: str | None = None) -> list[str]:
        """Ids of every array of this run (``pods``, ``servers``, ``gather``), those submitted by hand included."""
        return self.slurm_jobs.ids(role)

    def live_jobs(self, max_age_s: float = ASK_SLURM_S) -> set[str] | None:
        """Returns the elements that Slurm still has; ``None`` without Slurm or while it does not answer."""
        live = self.slurm_jobs.live(max_age_s)
        return None if live is None else set(live)

    def status(self) -> dict[str, Any]:
        """The contract of ``status --json``."""
        live = self.live_jobs(self._slurm_age_s)
        status = self.monitor.status(live, self.slurm_jobs.asked_at, self._trainers())
        status["servers"] += self._waiting_servers({server["server"] for server in status["servers"]})
        status["queue"] = self.slurm_jobs.waiting(self._slurm_age_s)
        status["warnings"] = [*self.edits.warnings(), *self.monitor.idle_warning(status["pods"])]
        if status["state"] in ("finished", "cancelled", "stopped"):
            status["warnings"] += lost_journals(self.dir, self.ledger)
        if self.record.pools and status["state"] not in ("finished", "cancelled"):
            status["warnings"] += self.monitor.pool_warnings()
        return status

    def _trainers(self) -> dict[str, TrainerJob] | None:
        """Trainers that run or wait; ``None`` if nobody can tell now."""
        if self.local is not None:
            here = os.uname().nodename
            return {policy: TrainerJob("running", node=here) for policy in self.local.training}
        states = self.slurm_jobs.trainer_states(self._slurm_age_s) if self.config.training else {}
        if states is None:
            return None
        return {
            policy: TrainerJob("queued", state.id, reason=state.reason)
            if state.state == "PENDING"
            else TrainerJob("running", state.id, state.node)
            for policy, state in states.items()
        }

    @property
    def _slurm_age_s(self) -> float:
        """How old Slurm's word may be: while pods are seen to write there is little to ask."""
        return 4 * ASK_SLURM_S if self.monitor.heard_s < HEARD_S else ASK_SLURM_S

    def _waiting_servers(self, known: Collection[str]) -> list[dict[str, Any]]:
        """Engine servers that are in Slurm's queue, or on their way from there to an endpoint file."""
        found = []
        servers = self.record.servers
        for number, state in sorted((self.slurm_jobs.servers(self._slurm_age_s) or {}).items() if servers else ()):
            name = f"{servers[number].policy}.{number}"
            if name in known or not state.live:
                continue
            shown = {"server": name, "policy": servers[number].policy, "node": state.node, "job_id": state.id}
            if state.held:
                by = LeaderLease(self.dir, SCALER).holder()
                remedy = f"nobody lets it go: keep megaflow-hpc watch {self.dir} open, or use scale --servers"
                found.append({**shown, "state": "held", "cause": f"let go on demand by {by}" if by else remedy})
            else:
                found.append({**shown, "state": "queued" if state.state == "PENDING" else "starting"})
        return found

    def usage(self) -> dict[str, float]:
        """Core-seconds and GPU-seconds that all jobs held, and how many of them were idle; see :mod:`.monitor.usage`.

        Raises:
            SiteError: the site keeps no accounting, or it does not answer.
        """
        from megaflow_hpc.monitor.usage import totals
        from megaflow_hpc.trajectories import open_trajectories

        uses, now = self.job_uses(), time.time()
        with open_trajectories(self.dir.path) as store:
            ran = [(a.job_id, (a.started_at, a.finished_at)) for t in store for a in t.attempts]
        self.monitor.refresh()
        ran += [(pod, (began_at, now)) for pod, began_at in self.monitor.at_work()]
        return totals(uses, ran)

    def job_uses(self) -> list[JobUse]:
        """Every start of every job of this run: what it held, and what it used of that; none without jobs.

        Raises:
            SiteError: the site keeps no accounting, or it does not answer.
        """
        from megaflow_hpc.monitor.usage import JobUse

        role_of = {job: role for role in ("gather", "servers", "trainer", "pods") for job in self.job_ids(role)}
        now = time.time()
        return [
            JobUse(
                (one.use.started_at, one.use.ended_at or now),
                one.use.cores,
                one.use.gpus,
                one.use.id,
                role_of.get(array_of(one.use.id), "pods"),
                one.state,
                one.cpu_s if one.use.ended_at and one.cpu_s else None,  # none at all: Slurm gathers nothing
                one.memory_asked_mb,
                one.memory_peak_mb,
            )
            for one in (accounting.efficiencies(role_of) if role_of else ())
        ]

    def pods_live(self) -> bool | None:
        """Tells whether any pod is queued or running; ``None`` if Slurm cannot tell now."""
        if self.local is not None:
            return self.local.look()
        live = self.slurm_jobs.live_pods(self._slurm_age_s)
        return None if live is None else bool(live)

    # --- wait ---

    @contextmanager
    def tended(self) -> Iterator[Callable[[], object]]:
        """While this is open, pods and engine servers that are missing are added; call what it yields at each look.

        Nothing is added to another user's run.
        """
        if self.path.stat().st_uid != os.getuid():
            yield lambda: None
            return
        holder = f"{os.uname().nodename} process {os.getpid()}"
        autoscaler = Autoscaler(self.dir, self.record, self.slurm_jobs, holder)

        def tend() -> None:
            self.slurm_jobs.top_up()
            autoscaler.tick()

        try:
            yield tend
        finally:
            autoscaler.leave()

    def over(self, status: Mapping[str, Any] | None = None) -> bool:
        """Whether nothing more comes by itself: the campaign has ended or no pod is left. ``status``: if just asked."""
        status = status or self.status()
        if self.config.is_pool and self.local is None:  # it has no pods, and serves until it is cancelled
            return status["state"] == "cancelled" or self.slurm_jobs.servers(self._slurm_age_s) == {}
        return status["state"] in ("finished", "cancelled") or self.pods_live() is False

    def wait(
        self,
        timeout_s: float | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Follows until the campaign ends (or no pod is left), gathers, and returns :meth:`summary`.

        Args:
            progress: gets the status at each look.
            interrupted: called on Ctrl-C, before a pod of this process drains: that may take a minute.

        Raises:
            TimeoutError: ``timeout_s`` seconds passed first; the campaign goes on.
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
                            f"{self.dir}: not finished after {timeout_s:g} s; it goes on, see: megaflow-hpc status"
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
        if self.local is not None:
            self.local.stop()
        self.gather()
        self._recount()
        status = self.monitor.status(self.live_jobs(0), self.slurm_jobs.asked_at, self._trainers())
        if progress:
            progress(status)
        return {**status, "policies": self.monitor.summary(), "trajectories": str(self.dir.trajectories)}

    def gather(self, rebuild: bool = False) -> Path:
        """Writes ``trajectories.h5`` from the journals, if it is not up to date or ``rebuild``."""
        from megaflow_hpc.trajectories import gather

        self.dir.check_ours()
        if self.ledger.finished:  # the last pod removes it, unless it was killed then
            remove_tree(self.dir.partial, ignore_errors=True)
        return gather(self.dir, self.ledger.seals(), rebuild=rebuild)

    def _recount(self) -> None:
        """Lets what is stored decide: the event files are flushed, not fsynced, and know nothing of seals."""
        from megaflow_hpc.trajectories import open_trajectories

        with open_trajectories(self.dir.path) as store:
            self.monitor.settle(
                RolloutEvent(
                    id=t.id,
                    status=t.status,
                    kind=t.error_kind,
                    error=shown(t.error),
                    reward=None if math.isnan(t.reward) else t.reward,
                    seconds=round(t.finished_at - t.started_at, 2),
                    turns=len(t.turns),
                )
                for t in store
            )

    def stream(self, after: Iterable[str] | None = None) -> Iterator[Row]:
        """Trajectories as they become durable; ends with the campaign. ``after``: ids to leave out.

        Each id comes once, and a second time where it was given as failed or cancelled and succeeded later. To go on
        in another process see :class:`~megaflow_hpc.trajectories.reading.follow.Follower`.
        """
        from megaflow_hpc.trajectories import follow

        return follow(self.dir, self.over, after or ())

    # --- act ---

    def scale(self, pods: int) -> dict[str, list[str]]:
        """Adds or removes pods until ``pods`` are queued or running; see :meth:`Jobs.scale`."""
        if resolve_launcher("auto") != "slurm":
            raise SiteError("scale adds and removes jobs of Slurm, which is not here")
        self.dir.check_ours()
        return self.slurm_jobs.scale(pods)

    def scale_servers(self, servers: int, policy: str | None = None) -> list[str]:
        """Releases held engine servers until ``servers`` are queued or running; idle ones leave by themselves.

        Raises:
            ConfigError: No such policy.
            SiteError: Slurm does not answer, or refuses.
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
        """Cancels every job of this run, and drains its pods on this host; what is stored stays.

        A finished run stays so: only jobs that it has left are cancelled.

        Raises:
            SiteError: Slurm has its jobs, and is not here or does not answer.
        """
        self.dir.check_ours()
        before, live, known = self.status()["state"], self.live_jobs(0), set(self.job_ids())
        leases = self.ledger.leases().values()
        pods, local = living_pods(leases), bool(leases) and not known
        if before != "finished":
            self._marks.cancel()
            if self.config.is_pool:
                EnginePool(self.path).close()
        if self.local is not None:
            self.local.stop()
        for directory in pods.values():
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                write_atomic(directory / DRAIN, "stopped")
        ids = self.slurm_jobs.cancel() if known or not (local or before == "finished") else []
        if ids and not site.has_slurm():
            raise SiteError(f"jobs {' '.join(ids)}: are Slurm's, which is not here; cancel them where sbatch is")
        had = set(ids) if live is None else {array_of(element) for element in live} | (set(ids) - known)
        return Cancelled(before, sorted(had), sorted(pods))

    def resume(
        self,
        failed: bool = False,
        only: Sequence[str] = (),
        launcher: Launcher = "auto",
        ranks: int = 1,
        limits: Mapping[str, float | None] | None = None,
        requests: Changes | None = None,
    ) -> bool:
        """Continues: what is not stored is run, with ``failed`` also what failed. False if there was nothing to do.

        Args:
            limits: ``core_hours``, ``gpu_hours``, ``wall``, in the place of the campaign's own; ``None`` lifts one.
            requests: ``time``, ``mem_gb``, ``partition`` of ``pods``, ``servers``, ``trainer``, ``gather``: what jobs
                ask Slurm for from now on, in the place of the campaign's own.

        Raises:
            ConfigError: a limit of the campaign is passed already, pods run that have asked for something else, the run
                is of another minor version, or it was removed in part.
            SiteError: Slurm cannot say which pods are gone; nothing was changed.
        """
        self.dir.check_ours()
        check_version(self.record, self.dir)
        require_running(self.config.name)
        chosen = resolve_launcher(launcher)
        if not self.ledger.finished:
            restore_rooms(self.dir, self.record, self.ledger)
        budget = CampaignBudget(self.dir, self.config.limits.model_dump())
        budget.raise_to(limits or {})
        if (passed := budget.exceeded(self.ledger.leases())) and not self.ledger.finished:
            name = passed.rpartition("limits.")[2].split(" ")[0]
            raise ConfigError(f"{passed}; go on with: megaflow-hpc resume {self.dir} --limit {name}=HOURS")
        if requests:
            self._ask_for(requests, chosen)
        if self._marks.cancelled and chosen == "slurm":
            self.slurm_jobs.until_gone()
        self._mark_gone()
        for consumer in self._marks.closed:
            OpenLease(self.dir, consumer).put()
        self._marks.uncancel()
        if self.config.is_pool:
            EnginePool(self.path).reopen()
        self._marks.forget_unstarted()
        if failed or only:
            self._repeat(only)
        if self.ledger.finished:
            return False
        if self.pods_live():
            if chosen == "slurm" and self.config.training:
                self.slurm_jobs.restart_trainers()
            return True  # pods are queued or running; they take what was added
        if chosen == "slurm" and (left := self.job_ids()):
            scancel(left)  # engines of an earlier start; ours get new ones
            self.slurm_jobs.until_gone()
        self.start(chosen, ranks)
        return True

    def _ask_for(self, requests: Changes, launcher: str) -> None:
        """Changes what new jobs ask for; those that only wait in the queue with what it was before are cancelled."""
        if launcher != "slurm":
            raise ConfigError("--time, --mem and --partition are asked of Slurm, which does not run this campaign")
        pods = self.slurm_jobs.live_pods(0)
        if pods is None:
            pods = [] if not self.job_ids() else None
        if pods is None:
            raise SiteError(f"{self.dir}: Slurm does not say which pods there are; nothing was changed")
        if running := [pod.id for pod in pods if pod.state != "PENDING"]:
            raise ConfigError(
                f"{self.dir}: {len(running)} pods run (among them {running[0]}) and keep what they have asked for; "
                f"stop them first (megaflow-hpc cancel {self.dir}), nothing that is stored is lost"
            )
        override(self.dir, self.record.config, requests)
        self.config = overridden(self.dir, self.record.config)

        def where(key: str) -> str:
            return f"{self.dir.changed_requests}: {key}"

        site.check_site(self.config, where)
        demand.check_resources(self.config, self.record.server_groups, where)
        if pods:
            scancel(self.job_ids())
            self.slurm_jobs.until_gone()
        self.slurm_jobs = Jobs(self.dir, self.config, self.record, self.ledger)

    def _mark_gone(self) -> None:
        """Frees the blocks of pods that are provably no more."""
        leases, gone = self.ledger.leases(), self.ledger.gone()
        jobs = sorted({array_of(lease["job_id"]) for lease in leases.values() if lease["job_id"]})
        live = {job.id for job in accounting.live_jobs(jobs).values() if job.live} if jobs else set()
        for name, lease in leases.items():
            if name in gone:
                continue
            process = process_here(lease)
            if lease["job_id"] not in live if lease["job_id"] else process is not None and not process.alive():
                self.ledger.mark_gone(name)

    def _repeat(self, only: Sequence[str]) -> None:
        """Appends blocks with the rollouts that failed (of those, the ones that ``only`` names)."""
        from megaflow_hpc.trajectories.journal.winners import index

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
            if rollout.id in again and wanted(rollout, only)
        }
        if rollouts:
            whole = whole_groups(self.config)
            write_blocks(self.dir, list(rollouts.values()), self.config.slurm.pods.total, whole=whole)
