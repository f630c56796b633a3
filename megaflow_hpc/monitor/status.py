"""Counts by state, pods, servers, failures, rate and time to completion: ``status --json`` and what ``run`` shows.

A :class:`Monitor` reads each event file on from where it stopped, at first from where the pod's summary ends, and how
far pods are in their leases, or of many pods in the report of the one that reads the leases for all; so the first look
is quick at any age of the run, and looking often is cheap.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megaflow_hpc.config.campaign import pass_threshold_of
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.leader import COORDINATOR, Leader
from megaflow_hpc.ledger.report import FEW, Progress, process_here, progress_of, reported
from megaflow_hpc.monitor.causes import broken_verifiers, causes
from megaflow_hpc.monitor.engines import servers
from megaflow_hpc.monitor.outcomes import Outcomes
from megaflow_hpc.monitor.pod_view import PodView
from megaflow_hpc.monitor.state import Facts, lives
from megaflow_hpc.monitor.training import TrainerJob, Trainings
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.events import EventReader, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.pods import summary
from megaflow_hpc.rundir.pods.running import RunningRollouts
from megaflow_hpc.rundir.pods.summary import Summary
from megaflow_hpc.rundir.record import read_jobs, read_run

IDLE_S = 60.0
"""A pod that has had nothing to run for this long is shown as idle."""
ENGINES_S = 10.0
"""How often the files of more than a few engines are read."""
LISTED = 10_000
"""Rollouts that ended well and are listed where there are too many to list all."""
STALE_S = 60.0
"""A pod whose last event is older than this is shown as silent."""


class Monitor:
    """Follows one run directory."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        planned = read_run(run)
        self.name, self._total = planned.name, planned.total
        self._added: dict[str, int] = {}
        """Rollouts that were added to the plan, by the record that says it."""
        self._pass_threshold = pass_threshold_of(planned.campaign)
        self._marks = Marks(run)
        self._is_pool = planned.campaign.get("pool") is not None and not planned.packed
        training = planned.config.training if planned.campaign.get("training") else None
        self._trainings = Trainings(run, training) if training else None
        self._events: EventReader[Summary] = EventReader(run.events, begin=summary.begin)
        self._outcomes = Outcomes()
        self._pods: dict[str, PodView] = {}
        self._processes: dict[str, Identity] = {}
        """Of pods that run on this host outside of Slurm, or did."""
        self._coordinator = Leader(run, COORDINATOR)
        self._ledger = Ledger(run)
        self.running = RunningRollouts()
        """Which rollouts run, and where."""
        self._servers: list[dict[str, Any]] = []
        self._servers_at = 0.0
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
            if name in self._pods:
                self._pods[name].hear(progress)
        self._began = min(self._began, time.monotonic())

    def list_rollouts(self, within: int | None = None) -> None:
        """Has :attr:`rollouts` list those that ended well too; to be called before the first look.

        Args:
            within: Where all event files together have more bytes, only those are listed that end from now on, the last
                :data:`LISTED` of them.
        """
        size = 0 if within is None else sum(path.stat().st_size for path in self.run.events.glob("*.jsonl"))
        if within is None or size <= within:
            self._outcomes, self._events = Outcomes(None), EventReader(self.run.events)
        else:
            self._outcomes = Outcomes(LISTED)

    def _progress(self) -> Iterator[tuple[str, Progress]]:
        if len(self._pods) > FEW and self._coordinator.holder():
            yield from reported(self._coordinator).progress.items()
            return
        for name, lease in self._ledger.leases().items():
            if (process := process_here(lease)) is not None:
                self._processes[name] = process
            if (progress := progress_of(lease)) is not None:
                yield name, progress

    def warnings(self, pods: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns :meth:`idle_warning` and, if all rollouts are listed, one for each verifier that always fails."""
        found = self.idle_warning(pods)
        return [*found, *broken_verifiers(self.rollouts.values())] if self._outcomes.lists_all else found

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
        self._outcomes.settle(stored)

    def at_work(self) -> list[tuple[str, float]]:
        """Returns the job id of the pod and the begin, in seconds UTC, of each rollout that runs."""
        active = {name: pod.job_id for name, pod in self._pods.items() if pod.active}
        return [(active[place.pod], place.began_at) for place in self.running.longest(active)]

    @property
    def rollouts(self) -> dict[str, RolloutEvent]:
        """The stored rollouts that are listed, by id: those that ended badly, and as :meth:`list_rollouts` says."""
        return self._outcomes.listed

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
        total = self._total + sum(self._added.values())
        counts, failed = self._outcomes.by_status(total), self._outcomes.failures
        jobs = None if live_jobs is None else set(live_jobs) - set(pending)
        pods = [self._pod(pod, jobs, asked_at) for pod in self._pods.values()]
        running = sum(pod["running"] for pod in pods)
        stored = counts.total()
        states = ("completed", "truncated", "failed", "cancelled")
        rollouts = {
            "pending": max(0, total - stored - running),
            "running": running,
            **{state: counts[state] for state in states},
            "total": total,
        }
        unstarted = [asdict(pod) for pod in self._marks.unstarted()]
        rate = self._outcomes.rate()
        left, waits_for = max(0, total - stored), [] if self._finished else self._marks.open
        alive = [pod["pod"] for pod in pods if pod["state"] in ("started", "draining")]
        # One that was counted twice may stand for one that runs.
        idle = bool(waits_for) and not left and not self.running.longest(alive)
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
            "servers": self._engines(),
            "unstarted": unstarted,
            **({"training": self._trainings.status(trainers)} if self._trainings else {}),
            "failures": dict(Counter(event.kind for event in failed)),
            "first_failures": [asdict(cause) for cause in causes(self.run, failed, self.running.last)],
            "retries": dict(self.running.retries),
            "failed_at": self.running.by_cause(),
            "tokens_per_s": round(sum(pod["tokens_per_s"] for pod in pods), 1),
            "rate_per_s": round(rate, 3),
            "eta_s": round(left / rate) if goes_on and left else (0 if not left else None),
        }

    def _engines(self) -> list[dict[str, Any]]:
        """Many engines, whose files are read one by one, are looked at less often than pods."""
        now = time.monotonic()
        if len(self._servers) <= FEW or self._finished or now - self._servers_at >= ENGINES_S:
            self._servers, self._servers_at = servers(self.run, self._finished), now
        return [*self._servers]

    def _pod(self, pod: PodView, jobs: Collection[str] | None, asked_at: float) -> dict[str, Any]:
        state, silent_s = pod.state, self._silent_s(pod)
        if pod.active and not self._lives(pod, jobs, asked_at, by_silence=False):
            state = "gone"
        elif pod.active and silent_s > STALE_S:
            state = "silent"
        works = state in ("started", "draining") and not self._finished  # its last word is older than the end
        idle_s = pod.seen_at - pod.busy_at if state == "started" and not (pod.running or pod.queued) else 0.0
        return {
            "pod": pod.name,
            "state": state,
            "node": pod.node,
            "job_id": pod.job_id,
            "workers": pod.workers,
            "slots": pod.slots,
            "running": pod.running if works else 0,
            "stored": pod.stored,
            "tokens_per_s": pod.tokens_per_s if works else 0.0,
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

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per policy: rollouts, statuses, mean reward, how many were solved, and what an evaluation says of them.

        Of those that are listed: after :meth:`settle`, of all.
        """
        return self._outcomes.policies(self._pass_threshold)
