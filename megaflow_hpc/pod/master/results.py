"""Decides what becomes of an attempt that ended: stored, retried, or dropped because nobody needs it any more.

The rules for causes of failure, groups and bad ranks are in modules of their own. This module carries them out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.master.run_io_messages import PendingResult
from megaflow_hpc.pod.master.settings import Pod
from megaflow_hpc.pod.outcome import Outcome, attempt_of
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.failures import SYSTEMATIC_LAST, TOO_SHORT, Blame, Pattern, may_retry
from megaflow_hpc.pod.scheduling.groups import Groups, Step
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.rundir.events import AttemptEvent, WorkerEvent, shown
from megaflow_hpc.rundir.marks import WHY_DRAIN
from megaflow_hpc.trajectory import Attempt, Trajectory
from megaflow_hpc.types import VERIFIED, Status

SIGNAL_S = 1.0
"""Seconds that the supervisor may need to say why it was signalled, when workers heard of the signal first."""


class Results:
    """Takes in every attempt that ended, and sees each rollout to its one stored outcome.

    Args:
        drain: stops starting rollouts, for the reason it is given.
    """

    def __init__(
        self,
        pod: Pod,
        scheduler: Scheduler,
        io: RunIo,
        ranks: Ranks,
        estimates: Estimates,
        drain: Callable[[str], None],
    ) -> None:
        self._pod, self._scheduler, self._io, self._ranks = pod, scheduler, io, ranks
        self._estimates, self._drain = estimates, drain
        self._blame, self._pattern = Blame(), Pattern(SYSTEMATIC_LAST)
        self.groups = Groups(pod.group_rules())
        self.grouped = not pod.group_rules().idle
        self.histories: dict[str, History] = {}
        """Rollout that was tried and is not stored → what is known of it."""
        self._cut: set[str] = set()
        """Rollouts that the end of this allocation has cut short."""
        self._cancelling: dict[str, str] = {}
        """Rollout that was told to stop → why."""
        self.began: dict[str, float] = {}
        """When each rollout was last started, by the monotonic clock."""
        self.draining = False
        self.ending = ""
        """Why the supervisor ends this pod, a word of the drain file; empty while it does not."""
        self.paused = ""
        """Why the pod must not go on; empty while it may."""
        self.stored = 0

    # --- what ended ---

    def ended(self, rank: int, outcome: Outcome) -> None:
        """Takes in a result from ``rank``; one that nobody waits for is ignored."""
        work = self._scheduler.workers.finish(rank, outcome.id)
        if work is None or work.attempt != outcome.attempt:
            return
        if outcome.status != "cancelled" and self._blame.add(rank, outcome.cause):
            self._exclude(rank, outcome.error)
        self.settle(rank, work, outcome)

    def lost(self, rank: int, why: str) -> int:
        """Settles what ran on a worker rank that is gone; returns how many rollouts that were."""
        lost = self._scheduler.workers.leave(rank)
        for work in lost:
            self.settle(rank, work, self.outcome_without_run(work, "node", f"worker rank {rank} was lost: {why}"))
        return len(lost)

    def refuse(self) -> None:
        """Fails the queued rollouts that no worker could ever hold."""
        cpus, memory = self._pod.room
        for work in self._scheduler.impossible():
            error = f"the task asks for {work.demand}, a rank has {cpus} cpus and {memory} MB"
            self.settle(-1, work, self.outcome_without_run(work, "user", error))

    def settle(self, rank: int, work: Work, outcome: Outcome) -> None:
        """Retries a failure, keeps what was cut short for the next pod, or stores the outcome."""
        why = self._cancelling.get(outcome.id)
        if outcome.status == "cancelled" and why is None:
            # Stopped by a drain, or the step was signalled and the worker heard it first: the block goes back, and
            # whoever takes it goes on with this rollout.
            if not self.draining:  # once: the loop stands still meanwhile, and a pod may have many rollouts
                self.ending = self.ending or self._pod.why_drain(SIGNAL_S) or ""
            self._cut_short(work, outcome)
            self._drain(WHY_DRAIN.get(self.ending, "a rollout was stopped by a signal to the step"))
            return
        if outcome.status == "failed":
            if why is not None:
                outcome = self.outcome_without_run(work, "", why, "cancelled")
            elif self._goes_on(rank, work, outcome):
                return
        self._end(work, outcome)

    def _end(self, work: Work, outcome: Outcome) -> None:
        """Stores an outcome, and updates the estimates and the rollout's group."""
        judged = outcome.status in VERIFIED
        if judged:
            before = self.histories.get(outcome.id)
            seconds = outcome.seconds + (before.kept_s if before else 0.0)
            self._estimates.observe(outcome.task_id, outcome.policy, seconds)
        self._cancelling.pop(outcome.id, None)
        self._store(work, outcome)
        if self.grouped:
            self._carry_out(self.groups.ended(work.rollout.group_id, outcome.id, outcome.reward if judged else None))

    def _store(self, work: Work, outcome: Outcome) -> None:
        self.histories.pop(outcome.id, None)
        self.began.pop(outcome.id, None)
        self._io.store(outcome, work.epoch, work.block)

    def _goes_on(self, rank: int, work: Work, outcome: Outcome) -> bool:
        """Tells whether a rollout that failed has another attempt, here or in the pod that takes its block."""
        if self.draining:
            # The engines and sandboxes of an ending job fail; whoever takes the block tries again.
            return may_retry((*work.causes, outcome.cause))
        if not self._scheduler.retry(work, outcome.cause, rank):
            return False
        history = self.histories.setdefault(outcome.id, History())
        history.attempts.append(attempt_of(outcome))
        history.causes.append(outcome.cause)
        history.kept_s = 0.0
        self._pod.events.write(
            AttemptEvent(id=outcome.id, attempt=work.attempt, kind=outcome.cause, error=shown(outcome.error), rank=rank)
        )
        self.groups.requeued(work.rollout.group_id, outcome.id)
        return True

    def outcome_without_run(self, work: Work, kind: str, error: str, status: Status = "failed") -> Outcome:
        """Makes the outcome of an attempt of which nothing came back.

        Args:
            kind: ``error_kind`` of the trajectory.
        """
        known = {"error_kind": kind, "error": error, "job_id": self._pod.job_id, "epoch": work.epoch}
        trajectory = Trajectory.begin(work.rollout, work.attempt, status, **known)
        return Outcome.of(trajectory, self.attempts(work.rollout.id))

    # --- what follows ---

    def _carry_out(self, step: Step) -> None:
        """Does what the rules of groups ask for."""
        promoted = [self._scheduler.drop(rollout) for rollout in step.promote]
        self._scheduler.add(replace(work, later=False) for work in promoted if work is not None)
        for rollout in step.cancel:
            work = self._scheduler.drop(rollout)
            if work is not None:
                self._store(work, self.outcome_without_run(work, "", step.why, "cancelled"))
            rank = self._scheduler.workers.worker_of(rollout)
            if rank is not None:
                self._cancelling[rollout] = step.why
                self._pod.comm.send(rank, {"op": "cancel", "id": rollout})

    def _exclude(self, rank: int, error: str) -> None:
        node = self._ranks.ready.get(rank, "")
        self._scheduler.workers.exclude(rank)
        why = f"sandboxes do not start on {node}: {error[:300]}"
        self._pod.events.write(WorkerEvent(rank=rank, state="excluded", node=node, why=why))

    # --- the end of the allocation ---

    def attempts(self, rollout: str) -> Sequence[Attempt]:
        """Returns the attempts at a rollout that ended without a result that counts."""
        history = self.histories.get(rollout)
        return history.attempts if history else ()

    def cut_short(self, preempted: bool) -> None:
        """Notes that what still runs is cut short by the end of the allocation; the next one starts it anew."""
        kind = "preemption" if preempted else "walltime"
        for work in self._scheduler.workers.running_work():
            self._cut_short(work, self.outcome_without_run(work, kind, "cut short; it starts anew", "cancelled"))

    def _cut_short(self, work: Work, outcome: Outcome) -> None:
        """Notes that an attempt was cut short; a rollout to which that happened too often fails."""
        history = self.histories.setdefault(outcome.id, History())
        kind = self._cut_kind(outcome)
        if not kind:  # its user's decision, and nothing that a rollout could be blamed for
            outcome = replace(outcome, error_kind="", error=WHY_DRAIN.get(self.ending) or self.paused)
        elif outcome.id not in self._cut:
            self._cut.add(outcome.id)
            history.cuts += 1
            self._count_too_short(outcome, kind, history)
        event = AttemptEvent(id=outcome.id, attempt=work.attempt, kind=kind or "cancelled", error=shown(outcome.error))
        self._pod.events.write(event)
        if why := self._cut_too_often(outcome, history):
            self._store(work, self.outcome_without_run(work, "walltime", why))
            return
        history.attempts.append(attempt_of(outcome))
        history.partial = outcome.partial
        history.kept_s = history.kept_s + outcome.seconds if outcome.partial else 0.0

    def _cut_kind(self, outcome: Outcome) -> str:
        """Returns ``walltime`` or ``preemption``; empty where it was the user who ended the pod."""
        if self.ending in ("walltime", "now"):
            return "walltime" if self.ending == "walltime" else "preemption"
        return "" if self.ending in WHY_DRAIN or self.paused else outcome.error_kind or "preemption"

    def _count_too_short(self, outcome: Outcome, kind: str, history: History) -> None:
        ran_s = time.monotonic() - self.began.get(outcome.id, math.inf)
        if outcome.partial:
            history.too_short = 0
        elif kind == "walltime" and ran_s >= self._pod.walltime.whole_s / 2:
            history.too_short += 1

    def _cut_too_often(self, outcome: Outcome, history: History) -> str:
        """Returns why a rollout that was cut short fails; empty while it has another attempt."""
        most = self._pod.scheduling.cuts
        if history.too_short >= TOO_SHORT:
            return (
                f"the walltime ended it {history.too_short} times in a row after most of the "
                f"{self._pod.walltime.whole_s:.0f} s that an allocation leaves it, and it starts anew each time; ask "
                "for more (megaflow-hpc resume RUN --failed --time D-HH:MM:SS), or bound its agent (timeout_s)"
            )
        if history.cuts > most:
            return (
                f"allocations ended {history.cuts} times before it did (scheduling.cuts: {most}); {outcome.error}; try "
                "it again in longer ones (megaflow-hpc resume RUN --failed --time D-HH:MM:SS)"
            )
        return ""

    # --- what is durable ---

    def count(self, durable: Sequence[PendingResult]) -> None:
        """Counts results that are on the disk, and pauses the pod if failures look systematic."""
        for result in durable:
            outcome = result.outcome
            failed = outcome.status == "failed"
            self.stored += 1
            self._pattern.add(outcome.cause if failed else "")
        self.pause(self._pattern.systematic)

    def pause(self, why: str) -> None:
        """Stops the pod for a reason that starting it anew would not mend; does nothing without a reason."""
        if why and not self.paused and not self.draining:
            self.paused = why
            self._drain(why)
