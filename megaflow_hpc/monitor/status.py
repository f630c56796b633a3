"""Counts by state, pods, servers, failures, rate and time to completion: ``status --json`` and what ``run`` shows.

A :class:`Monitor` reads each event file on from where it stopped, and how far pods are in their leases, or of many pods
in the report of the one that reads the leases for all; so looking often is cheap.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.leader_lease import COORDINATOR, LeaderLease
from megaflow_hpc.ledger.report import FEW, Progress, process_here, progress_of, reported
from megaflow_hpc.monitor.causes import causes
from megaflow_hpc.monitor.engines import servers
from megaflow_hpc.monitor.evaluation import evaluate
from megaflow_hpc.monitor.running import RunningRollouts
from megaflow_hpc.monitor.state import Facts, lives
from megaflow_hpc.monitor.training import TrainerJob, Trainings
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    EventReader,
    PodEvent,
    ProgressEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
)
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_jobs, read_run
from megaflow_hpc.types import without_round

RATE_WINDOW_S = 300.0
IDLE_S = 60.0
"""A pod that has had nothing to run for this long is shown as idle."""
STALE_S = 60.0
"""A pod whose last event is older than this is shown as silent."""


@dataclass
class PodView:
    """One start of one pod as its events tell."""

    name: str
    state: str = "starting"
    node: str = ""
    job_id: str = ""
    running: int = 0
    stored: int = 0
    workers: int = 0
    slots: int = 0
    seen_at: float = 0.0
    tokens_per_s: float = 0.0
    why: str = ""
    excluded: dict[str, str] = field(default_factory=dict)
    """Nodes that get no more work, and why."""
    queued: int = 0
    """Rollouts that it has claimed and not started."""
    busy_at: float = 0.0
    """When it last started a rollout or ended one, by its own clock; seconds UTC."""
    grown_at: float = 0.0
    """When we last saw its file grow, by our own clock; a node's own may be off."""
    live: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def active(self) -> bool:
        """Whether the pod has started and not ended."""
        return self.state in ("started", "draining")


class Monitor:
    """Follows one run directory."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        planned = read_run(run)
        self.name, self._total = planned.name, planned.total
        self._added: dict[str, int] = {}
        """Rollouts that were added to the plan, by the record that says it."""
        self._evaluation: dict[str, Any] = planned.campaign.get("evaluation") or {}
        self._marks = Marks(run)
        self._is_pool = planned.campaign.get("pool") is not None and not planned.tasks
        training = planned.config.training if planned.campaign.get("training") else None
        self._trainings = Trainings(run, training) if training else None
        self._events = EventReader(run.events)
        self._rollouts: dict[str, RolloutEvent] = {}
        self._pods: dict[str, PodView] = {}
        self._processes: dict[str, Identity] = {}
        """Of pods that run on this host outside of Slurm, or did."""
        self._recent: list[float] = []
        """When rollouts were stored, of the last minutes."""
        self._coordinator = LeaderLease(run, COORDINATOR)
        self._ledger = Ledger(run)
        self._retries: Counter[str] = Counter()
        self.running = RunningRollouts()
        """Which rollouts run, and where."""
        self._finished = False
        self._began = math.inf
        """When the first look was over: what files held until then may be of any age."""

    def refresh(self) -> None:
        """Reads what was appended since the last look."""
        self._finished = self._marks.finished  # first: the events before the mark are there then
        for record in self._ledger.added() - self._added.keys():
            self._added[record] = self._ledger.rollouts_added(record)
        for name, events in self._events.read():
            pod = self._pods.setdefault(name, PodView(name))
            for event in events:
                self._apply(pod, event)
                self.running.apply(name, event)
        for name, progress in self._progress():
            known = self._pods.get(name)
            if known is not None and progress.t > known.seen_at:
                known.seen_at, known.grown_at = progress.t, time.monotonic()
                if known.active:
                    known.running, known.stored = progress.running, max(known.stored, progress.stored)
                    known.queued = progress.queued
                    known.tokens_per_s = progress.tokens_per_s
        self._began = min(self._began, time.monotonic())

    def _progress(self) -> Iterator[tuple[str, Progress]]:
        if len(self._pods) > FEW and self._coordinator.holder():
            yield from reported(self._coordinator).progress.items()
            return
        for name, lease in self._ledger.leases().items():
            if (process := process_here(lease)) is not None:
                self._processes[name] = process
            if (progress := progress_of(lease)) is not None:
                yield name, progress

    def _apply(self, pod: PodView, event: AnyEvent) -> None:
        pod.seen_at, pod.grown_at = event.t, time.monotonic()
        if isinstance(event, StartEvent | RolloutEvent | AttemptEvent) or not pod.busy_at:
            pod.busy_at = event.t
        match event:
            case PodEvent():
                pod.state = event.state
                pod.job_id = pod.job_id if event.job_id is None else event.job_id
                pod.node = pod.node if event.node is None else event.node
                pod.why = pod.why if event.why is None else event.why
                pod.stored = pod.stored if event.stored is None else event.stored
                if not pod.active:
                    pod.running = 0
            case ProgressEvent():
                pod.running, pod.stored = event.running, event.stored
            case WorkerEvent():
                if event.state == "ready":
                    pod.live[event.rank] = event.slots or 0
                else:
                    pod.live.pop(event.rank, None)
                if event.state == "excluded":
                    pod.excluded[event.node or ""] = event.why or ""
                pod.workers, pod.slots = len(pod.live), sum(pod.live.values())
            case AttemptEvent():
                if event.kind != "cancelled":  # its user's decision, not a fault
                    self._retries[event.kind] += 1
            case RolloutEvent():
                before = self._rollouts.get(event.id)
                # A later success replaces a failure (resume --failed); otherwise the first stored result stands.
                if before is None or before.status in ("failed", "cancelled"):
                    self._rollouts[event.id] = event
                self._recent.append(event.t)

    def idle_warning(self, pods: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns a sentence on pods without work while others have more than they can run, if there are any.

        Args:
            pods: As :meth:`status` shows them.
        """
        idle = [pod for pod in pods if "idle_s" in pod]
        queued = sum(pod.queued for pod in self._pods.values() if pod.active)
        if not idle or not queued:
            return []
        longest = max(pod["idle_s"] for pod in idle)
        return [
            f"{len(idle)} of {sum(pod['state'] == 'started' for pod in pods)} pods have nothing to run (for up to "
            f"{longest} s) while others have claimed {queued} rollouts that wait: samples of one group stay together; "
            f"let some go with: megaflow-hpc scale {self.run} --pods N"
        ]

    def settle(self, stored: Iterable[RolloutEvent]) -> None:
        """Replaces what the events say of rollouts by what is stored of them."""
        self.refresh()
        known, self._rollouts = self._rollouts, {}
        for rollout in stored:
            if before := known.get(rollout.id):
                rollout.inexact, rollout.t = before.inexact, before.t
            self._rollouts[rollout.id] = rollout

    def at_work(self) -> list[tuple[str, float]]:
        """Returns the job id of the pod and the begin, in seconds UTC, of each rollout that runs."""
        active = {name: pod.job_id for name, pod in self._pods.items() if pod.active}
        return [(active[place.pod], place.began_at) for place in self.running.longest(active)]

    @property
    def rollouts(self) -> dict[str, RolloutEvent]:
        """The stored rollouts, by id."""
        return self._rollouts

    def status(
        self,
        live_jobs: Collection[str] | None = None,
        pending: Collection[str] = (),
        asked_at: float = math.inf,
        trainers: Mapping[str, TrainerJob] | None = None,
    ) -> dict[str, Any]:
        """The contract of ``status --json``.

        Args:
            live_jobs: elements that Slurm still has, where the caller asked; tells a silent pod from a dead one.
            pending: of them, those that wait in the queue.
            asked_at: when it did (monotonic); a pod that was seen to write since then lives, whatever Slurm said.
            trainers: those that run or wait, by policy; ``None`` where the caller cannot tell.
        """
        self.refresh()
        counts = Counter(event.status for event in self._rollouts.values())
        jobs = None if live_jobs is None else set(live_jobs) - set(pending)
        pods = [self._pod(pod, jobs, asked_at) for pod in self._pods.values()]
        running = sum(pod["running"] for pod in pods)
        stored, total = sum(counts.values()), self._total + sum(self._added.values())
        states = ("completed", "truncated", "failed", "cancelled")
        rollouts = {
            "pending": max(0, total - stored - running),
            "running": running,
            **{state: counts[state] for state in states},
            "total": total,
        }
        unstarted = [asdict(pod) for pod in self._marks.unstarted()]
        rate = self._rate()
        left, waits_for = total - stored, [] if self._finished else self._marks.open
        idle = bool(waits_for) and left <= 0
        state = Facts(
            finished=self._finished,
            cancelled=self._marks.cancelled,
            serves=self._is_pool and bool(EndpointFiles(self.run).serving()),
            alive=any(self._lives(pod, jobs, asked_at, by_silence=True) for pod in self._pods.values()),
            waits=idle,
            submitted=any(pod["job_id"] for pod in pods) or bool(read_jobs(self.run)),
            queued=None if live_jobs is None else bool(live_jobs),
            started=bool(pods or unstarted),
        ).state
        goes_on = rate and state not in ("finished", "cancelled", "stopped")
        return {
            "run": str(self.run),
            "state": state,
            **({"waits_for": waits_for} if idle else {}),
            "rollouts": rollouts,
            "pods": pods,
            "servers": servers(self.run, self._finished),
            "unstarted": unstarted,
            **({"training": self._trainings.status(trainers)} if self._trainings else {}),
            "failures": dict(Counter(e.kind for e in self._rollouts.values() if e.status == "failed")),
            "first_failures": [asdict(cause) for cause in causes(self.run, self._rollouts.values(), self.running.last)],
            "retries": dict(self._retries),
            "failed_at": self.running.by_cause(),
            "tokens_per_s": round(sum(pod["tokens_per_s"] for pod in pods), 1),
            "rate_per_s": round(rate, 3),
            "eta_s": round(left / rate) if goes_on and left else (0 if not left else None),
        }

    def _pod(self, pod: PodView, jobs: Collection[str] | None, asked_at: float) -> dict[str, Any]:
        state, silent_s = pod.state, self._silent_s(pod)
        if pod.active and not self._lives(pod, jobs, asked_at, by_silence=False):
            state = "gone"
        elif pod.active and silent_s > STALE_S:
            state = "silent"
        lives = state in ("started", "draining")
        idle_s = pod.seen_at - pod.busy_at if state == "started" and not (pod.running or pod.queued) else 0.0
        return {
            "pod": pod.name,
            "state": state,
            "node": pod.node,
            "job_id": pod.job_id,
            "workers": pod.workers,
            "slots": pod.slots,
            "running": pod.running if lives else 0,
            "stored": pod.stored,
            "tokens_per_s": pod.tokens_per_s if lives else 0.0,
            **({"silent_s": round(silent_s)} if state == "silent" else {}),
            **({"idle_s": round(idle_s)} if idle_s >= IDLE_S else {}),
            **({"why": pod.why} if pod.why else {}),
            **({"excluded": pod.excluded} if pod.excluded else {}),
        }

    def _lives(self, pod: PodView, jobs: Collection[str] | None, asked_at: float, by_silence: bool) -> bool:
        """Whether a pod that has not ended lives; ``by_silence``: it does not where it is all that tells."""
        wrote = pod.grown_at > max(self._began, asked_at)  # since then it lives, whatever Slurm said
        process = self._processes.get(pod.name)
        return pod.active and (
            wrote
            or lives(
                ended=False,
                runs=None if jobs is None or not pod.job_id else pod.job_id in jobs,
                process=process.alive() if process else None,
                silent_s=self._silent_s(pod) if by_silence else 0.0,
            )
        )

    @property
    def heard_s(self) -> float:
        """Seconds, of our own clock, since any pod was seen to write; infinite before the second look."""
        grown = max((pod.grown_at for pod in self._pods.values() if pod.active), default=0.0)
        return time.monotonic() - grown if grown > self._began else math.inf

    def _silent_s(self, pod: PodView) -> float:
        """Seconds since the pod's last sign of life: of our clock from the second look on, of both before."""
        grown = time.monotonic() - pod.grown_at
        return grown if pod.grown_at > self._began else max(grown, time.time() - pod.seen_at)

    def _rate(self) -> float:
        now = time.time()
        self._recent = [t for t in self._recent if t >= now - RATE_WINDOW_S]
        if len(self._recent) < 2:
            return 0.0
        return len(self._recent) / max(1.0, now - min(self._recent))

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per policy: rollouts, statuses, mean reward, how many were solved, and what an evaluation says of them."""
        rows: dict[str, dict[str, Any]] = {}
        for rollout_id, event in self._rollouts.items():
            name, policy, _ = rollout_id.rsplit("/", 2)
            task, _ = without_round(name)
            start = {"rollouts": 0, "statuses": Counter[str](), "rewards": {}, "turns": 0, "seconds": 0.0, "inexact": 0}
            row = rows.setdefault(policy, start)
            row["rewards"].setdefault(task, []).append(event.reward)
            row["inexact"] += event.inexact
            row["rollouts"] += 1
            row["statuses"][event.status] += 1
            row["turns"] += event.turns
            row["seconds"] += event.seconds
        for row in rows.values():
            by_task = row.pop("rewards")
            row["evaluation"] = evaluate(by_task, **self._evaluation)
            rewards = [reward for given in by_task.values() for reward in given if reward is not None]
            row["statuses"] = dict(row["statuses"])
            row["solved"] = row["evaluation"]["passed"] if row["evaluation"] else 0
            row["mean_reward"] = round(sum(rewards) / len(rewards), 4) if rewards else None
        return dict(sorted(rows.items()))
