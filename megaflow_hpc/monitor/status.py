"""Computes the status of a campaign: ``status --json``, and the progress that ``run`` and ``watch`` show.

A :class:`Monitor` reads each event file from where its last poll stopped. The first poll starts at the end of the
pod's summary. Progress is read from the pods' leases. If there are many pods, it is read from the report of the pod
that reads all leases.

The first poll of an old run is therefore fast, and later polls are cheap. The cost grows with the number of pods but
not with the number of starts. A later start of a pod condenses the events of earlier starts.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from megaflow_hpc.config.campaign import pass_threshold_of
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.accounts import Progress, progress_of
from megaflow_hpc.ledger.leader import COORDINATOR, FEW, Leader, reported
from megaflow_hpc.ledger.lease import process_here
from megaflow_hpc.monitor.outcomes import Outcomes, broken_verifiers, causes, failing_agents
from megaflow_hpc.monitor.state import PodView, lives, run_state
from megaflow_hpc.monitor.training import TrainerJob, Trainings
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import why_lost
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.pods.running import RunningRollouts
from megaflow_hpc.rundir.record import read_jobs, read_run
from megaflow_hpc.rundir.summaries import Condensed, Summary

IDLE_S = 60.0
"""A pod is shown as idle after this many seconds without work."""
ENGINES_INTERVAL_S = 10.0
"""Seconds between reads of the engine files, if there are many, and between reads of a lost pod's log."""
LISTED = 10_000
"""Number of latest successful rollouts to list if there are too many to list all."""
CLOCKS_DIFFER_S = 2.0
"""Tolerated difference between the clocks of two hosts, in seconds."""
STALE_S = 60.0
"""A pod is shown as silent after this many seconds without an event."""


class Monitor:
    """Computes the status of a run from its directory. Reads only what was added since the last poll."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        planned = read_run(run)
        self.name, self._planned = planned.name, planned.total
        self._added: dict[str, int] = {}
        """Maps the record of each batch that was added to the plan to the batch's number of rollouts."""
        self._pass_threshold = pass_threshold_of(planned.campaign)
        self._marks = Marks(run)
        self._is_pool = planned.campaign.get("pool") is not None and not planned.packed
        training = planned.config.training if planned.campaign.get("training") else None
        self._trainings = Trainings(run, training) if training else None
        self._events = EventReader(run.events, use_summaries=True, restart=self._restart)
        self._outcomes = Outcomes()
        self._starts: dict[str, PodView] = {}
        """Views of pod starts whose events are read one by one, by ``<pod>.<start>``."""
        self._condensed: dict[str, Condensed] = {}
        """Summaries of each pod's earlier starts, whose events were condensed, by pod name."""
        self._last_condensed: dict[str, PodView] = {}
        """View of each pod's last condensed start, by pod name. Shown if no later start has events."""
        self._lost: dict[str, tuple[float, str]] = {}
        """Maps each start of a lost pod to (monotonic time when its log was read, cause found in the log)."""
        self._processes: dict[str, Identity] = {}
        """Processes of pods that ran on this host outside of Slurm, by ``<pod>.<start>``."""
        self._coordinator = Leader(run, COORDINATOR)
        self._ledger = Ledger(run)
        self.running = RunningRollouts()
        """Running rollouts and where they run."""
        self._servers: list[dict[str, Any]] = []
        self._servers_at = 0.0
        self._finished = False
        self._first_look_at = math.inf
        """Monotonic time at which the first poll ended. Events read by the first poll may be of any age."""

    # --- reading ---

    def refresh(self) -> None:
        """Reads everything appended since the last poll."""
        self._finished = self._marks.finished  # read first, so that all events before the flag are visible
        for record in self._ledger.added() - self._added.keys():
            self._added[record] = self._ledger.rollouts_added(record)
        for name, events in self._events.read():
            if events and isinstance(events[0], Condensed):
                self._condense(name, events[0])
                continue
            pod = self._starts.setdefault(name, PodView(name))
            for event in events:
                if isinstance(event, Summary):
                    pod.adopt(event)
                    self.running.adopt(name, event)
                    self._outcomes.adopt(event)
                    continue
                pod.apply(event)
                self.running.apply(name, event)
                if isinstance(event, RolloutEvent):
                    self._outcomes.apply(event)
        for rollout in self._outcomes.between_pods(self.running.ids):
            self.running.forget(rollout)
        for name, progress in self._progress():
            if name in self._starts:
                self._starts[name].update(progress)
        self._first_look_at = min(self._first_look_at, time.monotonic())

    def _condense(self, name: str, condensed: Condensed) -> None:
        """Replaces the starts of a pod up to ``name`` with their condensed events."""
        if not condensed.seen:
            self.running.adopt(name, condensed)
            self._outcomes.adopt(condensed)
        last = PodView(name)
        for view in [view for view in self._starts.values() if view.pod == last.pod and 0 <= view.start <= last.start]:
            self.running.drop(view.name)
            del self._starts[view.name]
        if condensed.last is not None:
            last.adopt(msgspec.structs.replace(condensed, events=condensed.last))
            self._last_condensed[last.pod] = last
        kept = {"digests": b"", "events": [], "ended_badly": [], "ended_well": {}, "failures": {}, "sizes": {}}
        self._condensed[last.pod] = msgspec.structs.replace(condensed, **kept)

    def _restart(self) -> None:
        """Discards all collected state. Called if events were condensed before this process had read all of them."""
        self._outcomes = Outcomes(self._outcomes.limit)
        self._starts, self._condensed, self._last_condensed, self.running = {}, {}, {}, RunningRollouts()

    @property
    def _pods(self) -> list[PodView]:
        """The latest start of each pod, sorted by name."""
        latest = dict(self._last_condensed)
        for view in self._starts.values():
            if view.pod not in latest or latest[view.pod].start <= view.start:
                latest[view.pod] = view
        return [latest[pod] for pod in sorted(latest)]

    def _progress(self) -> Iterator[tuple[str, Progress]]:
        if len(self._pods) > FEW and self._coordinator.holder():
            yield from reported(self._coordinator).progress.items()
            return
        for name, lease in self._ledger.leases().items():
            if (process := process_here(lease)) is not None:
                self._processes[name] = process
            if (progress := progress_of(lease)) is not None:
                yield name, progress

    def list_rollouts(self, max_bytes: int | None = None) -> None:
        """Makes :attr:`rollouts` include successful rollouts, except those in condensed events.

        Call it before the first poll.

        Args:
            max_bytes: Maximum total size of the event files. If they are larger, only the latest :data:`LISTED`
                rollouts that end after this call are listed.
        """
        size = 0 if max_bytes is None else sum(path.stat().st_size for path in self.run.events.glob("*.jsonl"))
        if max_bytes is None or size <= max_bytes:
            self._outcomes, self._events = Outcomes(None), EventReader(self.run.events, restart=self._restart)
        else:
            self._outcomes = Outcomes(LISTED)

    def settle(self, stored: Iterable[RolloutEvent]) -> None:
        """Replaces all outcomes collected from events with the stored rollouts."""
        self.refresh()
        self._outcomes.settle(stored)

    # --- results ---

    @property
    def rollouts(self) -> dict[str, RolloutEvent]:
        """Listed rollouts by id: all unsuccessful rollouts, and the successful ones requested with
        :meth:`list_rollouts`."""
        return self._outcomes.listed

    @property
    def lists_all(self) -> bool:
        """True if :attr:`rollouts` contains every stored rollout."""
        return self._outcomes.lists_all

    def summary(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of each policy over the listed rollouts. After :meth:`settle`, all rollouts are
        listed."""
        return self._outcomes.policies(self._pass_threshold)

    def at_work(self) -> list[tuple[str, float]]:
        """Returns (job id of the pod, start in Unix seconds) for each running rollout."""
        active = {pod.name: pod.job_id for pod in self._pods if pod.active}
        return [(active[place.pod], place.began_at) for place in self.running.longest(active)]

    def warnings(self, pods: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns warnings about idle pods. If all rollouts are listed, also about agents and verifiers that always
        fail."""
        warnings = self.idle_warning(pods)
        if not self.lists_all:
            return warnings
        rollouts = self.rollouts.values()
        return [*warnings, *failing_agents(rollouts), *broken_verifiers(rollouts)]

    def errors(self) -> list[dict[str, Any]]:
        """Returns the causes of errors in verified rollouts, in the format of ``first_failures`` in :meth:`status`.

        Complete only if all rollouts are listed.
        """
        return [asdict(cause) for cause in causes(self.run, self._outcomes.errors, self.running.last)]

    def idle_warning(self, pods: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns a warning if some pods are idle while other pods have claimed more rollouts than they can run.

        Args:
            pods: The value of ``pods`` in :meth:`status`.
        """
        idle = [pod for pod in pods if "idle_s" in pod]
        queued = sum(pod.queued for pod in self._pods if pod.active)
        if not idle or not queued:
            return []
        longest = max(pod["idle_s"] for pod in idle)
        return [
            f"{len(idle)} of {sum(pod['state'] == 'started' for pod in pods)} pods have nothing to run (for up to "
            f"{longest} s) while others have claimed {queued} waiting rollouts: samples of one group stay together; "
            f"release some pods with: megaflow-hpc scale {self.run} --pods N"
        ]

    def status(
        self,
        live_jobs: Collection[str] | None = None,
        pending: Collection[str] = (),
        asked_at: float = math.inf,
        trainers: Mapping[str, TrainerJob] | None = None,
    ) -> dict[str, Any]:
        """Returns the content of ``status --json``.

        Args:
            live_jobs: Array elements that Slurm still has. They tell silent pods from dead ones. ``None`` if
                unknown.
            pending: Elements of ``live_jobs`` that are pending.
            asked_at: Monotonic time of the Slurm query. A pod whose lease was written later is alive.
            trainers: Running or queued trainers, by policy. ``None`` if unknown.
        """
        self.refresh()
        total = self._planned + sum(self._added.values())
        counts, failed = self._outcomes.by_status(total), self._outcomes.failures
        stored = counts.total()
        remaining = max(0, total - stored)
        jobs = None if live_jobs is None else set(live_jobs) - set(pending)
        views = self._pods
        pods = self._rows(views, jobs, asked_at)
        running = sum(pod["running"] for pod in pods)
        started = {view.pod for view in views}  # their leases may have been removed
        unstarted = [asdict(pod) for pod in self._marks.unstarted() if pod.pod not in started]
        waits_for = self._waits_for(remaining, pods)
        state = run_state(
            finished=self._finished,
            cancelled=self._marks.cancelled,
            serves=self._is_pool and bool(EndpointFiles(self.run).serving()),
            alive=any(self._lives(pod, jobs, asked_at, self._silent_s(pod)) for pod in views),
            waits=bool(waits_for),
            submitted=any(pod["job_id"] for pod in pods) or bool(read_jobs(self.run)),
            queued=None if live_jobs is None else bool(live_jobs),
            started=bool(pods or unstarted),
        )
        rate = self._outcomes.rate()
        eta_s: int | None = 0
        if remaining:
            continues = rate and state not in ("finished", "cancelled", "stopped")
            eta_s = round(remaining / rate) if continues else None
        return {
            "run": str(self.run),
            "state": state,
            **({"waits_for": waits_for} if waits_for else {}),
            "rollouts": {
                "pending": max(0, total - stored - running),
                "running": running,
                **{status: counts[status] for status in ("completed", "truncated", "failed", "cancelled")},
                "total": total,
            },
            "pods": pods,
            "servers": self._engines(),
            "unstarted": unstarted,
            **({"training": self._trainings.status(trainers)} if self._trainings else {}),
            "failures": dict(Counter(event.kind for event in failed)),
            "first_failures": [asdict(cause) for cause in causes(self.run, failed, self.running.last)],
            "retries": dict(self.running.retries),
            "failed_at": self.running.by_cause(),
            "models": msgspec.to_builtins(self._outcomes.models),
            "tokens_per_s": round(sum(pod["tokens_per_s"] for pod in pods), 1),
            "rate_per_s": round(rate, 3),
            "eta_s": eta_s,
        }

    def _waits_for(self, remaining: int, pods: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the consumers that the run is waiting for, because only they can add rollouts."""
        if self._finished or remaining:
            return []
        # A rollout that was counted twice may hide one that is still running.
        present = [pod["pod"] for pod in pods if pod["state"] in ("started", "draining")]
        return [] if self.running.longest(present) else self._marks.open

    def _engines(self) -> list[dict[str, Any]]:
        """Returns the engine servers. Reads their files less often if there are many."""
        now = time.monotonic()
        if len(self._servers) <= FEW or self._finished or now - self._servers_at >= ENGINES_INTERVAL_S:
            self._servers, self._servers_at = servers(self.run, self._finished), now
        return [*self._servers]

    def _rows(self, pods: Sequence[PodView], jobs: Collection[str] | None, asked_at: float) -> list[dict[str, Any]]:
        """Returns a row for each pod: its latest start, with stored rollouts and starts counted over all starts."""
        self._lost = {pod.name: self._lost[pod.name] for pod in pods if pod.name in self._lost}
        starts = Counter(view.pod for view in self._starts.values())
        stored: Counter[str] = Counter()
        for view in self._starts.values():
            stored[view.pod] += view.stored
        for pod, condensed in self._condensed.items():
            starts[pod] += condensed.starts
            stored[pod] += condensed.stored
        return [
            {**self._pod(pod, jobs, asked_at), "stored": stored[pod.pod], "starts": starts[pod.pod]} for pod in pods
        ]

    def _why_lost(self, pod: PodView) -> str:
        """Returns the reason why a pod ended without a final event, according to its log. Empty if unknown.

        An empty result is cached only briefly, because the log may be written later.
        """
        asked_at, why = self._lost.get(pod.name, (-math.inf, ""))
        if not why and time.monotonic() - asked_at >= ENGINES_INTERVAL_S:
            why = why_lost(self.run, pod.name)
            self._lost[pod.name] = time.monotonic(), why
        return why

    def _pod(self, pod: PodView, jobs: Collection[str] | None, asked_at: float) -> dict[str, Any]:
        state, silent_s = pod.state, self._silent_s(pod)
        if pod.active and not self._lives(pod, jobs, asked_at, silent_s=0.0):
            state = "gone"
        elif pod.active and silent_s > STALE_S:
            state = "silent"
        why = pod.why or (self._why_lost(pod) if state in ("gone", "lost") else "")
        works = state in ("started", "draining") and not self._finished  # the last progress report may predate its end
        idle_s = pod.seen_at - pod.busy_at if state == "started" and not (pod.running or pod.queued) else 0.0
        return {
            "pod": pod.name,
            "state": state,
            "node": pod.node,
            "job_id": pod.job_id,
            "workers": pod.workers,
            "slots": pod.slots,
            "running": pod.running if works else 0,
            "tokens_per_s": pod.tokens_per_s if works else 0.0,
            **({"silent_s": round(silent_s)} if state == "silent" else {}),
            **({"idle_s": round(idle_s)} if idle_s >= IDLE_S else {}),
            **({"why": why} if why else {}),
            **({"excluded": pod.excluded} if pod.excluded else {}),
        }

    def _lives(self, pod: PodView, jobs: Collection[str] | None, asked_at: float, silent_s: float) -> bool:
        """Returns whether a pod is alive. If neither Slurm nor the process table knows, decides by ``silent_s``."""
        if not pod.active:
            return False
        asked_wall = time.time() - (time.monotonic() - asked_at)  # another process may have queried Slurm, minutes ago
        if pod.grown_at > max(self._first_look_at, asked_at) or pod.seen_at > asked_wall + CLOCKS_DIFFER_S:
            return True  # written after Slurm was queried
        process = self._processes.get(pod.name)
        return lives(
            ended=False,
            runs=None if jobs is None or not pod.job_id else pod.job_id in jobs,
            process=process.alive() if process else None,
            silent_s=silent_s,
        )

    @property
    def heard_s(self) -> float:
        """Seconds since this process last saw a pod write. Infinite before the second poll."""
        grown_at = max((pod.grown_at for pod in self._pods if pod.active), default=0.0)
        return time.monotonic() - grown_at if grown_at > self._first_look_at else math.inf

    def _silent_s(self, pod: PodView) -> float:
        """Returns the seconds since the pod's last sign of life.

        Uses the local clock. On the first poll, also uses the pod's clock.
        """
        unseen_s = time.monotonic() - pod.grown_at
        return unseen_s if pod.grown_at > self._first_look_at else max(unseen_s, time.time() - pod.seen_at)


def servers(run: RunDir, over: bool) -> list[dict[str, Any]]:
    """Returns the engine servers of a run, with the cause of each failure.

    Args:
        over: Whether the campaign has ended. If so, servers that are not serving are omitted.
    """
    files = EndpointFiles(run)
    shown: list[dict[str, Any]] = []
    for server in files.serving():
        entry: dict[str, Any] = {
            "server": server.server,
            "policy": server.policy,
            "node": server.node,
            "job_id": server.job_id,
            "model_name": server.model_name,
            "weight_version": server.weight_version,
            "template": server.template,
            "waiting": server.waiting,
            "state": "down" if server.down else "serving",
        }
        if server.down:
            entry["cause"] = server.down
        if refused := server.refused:
            entry["cause"] = f"weights {refused.version} could not be loaded: {refused.cause}"
        shown.append(entry)
    others = [(failed, "failed") for failed in files.failed()]
    if not over:
        others += [(starting, "down" if starting.down else "starting") for starting in files.starting()]
    for other, state in others:
        shown.append(
            {
                "server": other.server,
                "policy": other.policy,
                "job_id": other.job_id,
                "cause": other.cause,
                "log": other.log,
                "state": state,
            }
        )
    return sorted(shown, key=lambda entry: str(entry["server"]))


def pool_warnings(run: RunDir) -> list[str]:
    """Returns a warning for each engine pool that the campaign uses and that does not respond."""
    warnings = []
    with suppress(OSError):  # memberships of another user's run are not readable
        for member in EndpointFiles(run).memberships():
            pool = EnginePool(member.pool)
            if closed := pool.closed:
                warnings.append(f"{member.policy}: {closed}; until then its rollouts fail")
            elif not pool.serving(member.theirs):
                warnings.append(
                    f"{member.policy}: no server of the engine pool {member.pool} responds, so rollouts wait; "
                    f"see: megaflow-hpc status {member.pool}"
                )
    return warnings
