"""Handles ended attempts. It stores each attempt, retries it, or keeps it for the next pod.

This module applies the rules about failure causes, groups and bad ranks. Other modules define them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from megaflow_hpc.pod.master.drain import SIGNAL_S, Drain
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.master.storing import PendingResult
from megaflow_hpc.pod.outcome import Outcome, attempt_of
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.failures import (
    MAX_INTERRUPTIONS,
    SYSTEMATIC_LAST,
    TOO_SHORT,
    Blame,
    Pattern,
    may_retry,
)
from megaflow_hpc.pod.scheduling.groups import Groups, GroupStep
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work
from megaflow_hpc.rundir.events import AttemptEvent, WorkerEvent, shown
from megaflow_hpc.rundir.marks import PREEMPTED, WHY_DRAIN
from megaflow_hpc.trajectory import Attempt, Trajectory
from megaflow_hpc.types import VERIFIED, Status


class Results:
    """Handles every ended attempt, so that each rollout gets exactly one stored outcome."""

    def __init__(
        self,
        pod: Pod,
        scheduler: Scheduler,
        io: RunIo,
        ranks: Ranks,
        estimates: Estimates,
        drain: Drain,
    ) -> None:
        self._pod, self._scheduler, self._io, self._ranks = pod, scheduler, io, ranks
        self._estimates, self._drain = estimates, drain
        self._blame, self._pattern = Blame(), Pattern(SYSTEMATIC_LAST)
        self.groups = Groups(pod.group_rules())
        self.grouped = not pod.group_rules().idle
        self.histories: dict[str, History] = {}
        """Histories of rollouts that have been attempted but are not stored yet, by rollout id."""
        self._cut: set[str] = set()
        """Ids of rollouts interrupted by the end of this allocation."""
        self._cancelling: dict[str, str] = {}
        """Reasons for cancelling rollouts, by id, while the cancellation is in progress."""
        self.began: dict[str, float] = {}
        """Monotonic time at which each rollout last started, by rollout id."""
        self.stored = 0

    # --- ended attempts ---

    def ended(self, rank: int, outcome: Outcome) -> None:
        """Handles a result from ``rank``. Ignores the result if that attempt is not running on that rank."""
        work = self._scheduler.workers.finish(rank, outcome.id)
        if work is None or work.attempt != outcome.attempt:
            return
        if outcome.status != "cancelled" and self._blame.add(rank, outcome.cause):
            self._exclude(rank, outcome.error)
        self.settle(rank, work, outcome)

    def lost(self, rank: int, why: str) -> None:
        """Handles the rollouts that were running on a lost worker rank as failed attempts."""
        for work in self._scheduler.workers.leave(rank):
            self.settle(rank, work, self.outcome_without_run(work, "node", f"worker rank {rank} was lost: {why}"))

    def refuse(self) -> None:
        """Fails queued rollouts that are too large for any worker."""
        cpus, memory = self._pod.room
        for work in self._scheduler.remove_impossible():
            error = f"the task asks for {work.demand}, a rank has {cpus} cpus and {memory} MB"
            self.settle(-1, work, self.outcome_without_run(work, "user", error))

    def settle(self, rank: int, work: Work, outcome: Outcome) -> None:
        """Retries a failed attempt, keeps an interrupted one for the next pod, or stores the outcome."""
        why = self._cancelling.get(outcome.id)
        if outcome.status == "cancelled" and why is None:
            # A drain stopped the attempt, or Slurm signalled the step and the worker noticed first. The pod releases
            # the block, and the next pod continues this rollout.
            if not self._drain.active:  # wait only once, because this blocks the loop
                self._drain.read_word(SIGNAL_S)
            self._cut_short(work, outcome)
            self._drain.obey()
            self._drain.begin("a rollout was stopped by a signal to the step")
            return
        if outcome.status == "failed":
            if why is not None:
                outcome = self.outcome_without_run(work, "", why, "cancelled")
            elif self._retried(rank, work, outcome):
                return
        self._end(work, outcome)

    def _end(self, work: Work, outcome: Outcome) -> None:
        """Stores an outcome. Updates the expected durations and the rollout's group."""
        judged = outcome.status in VERIFIED
        if judged:
            before = self.histories.get(outcome.id)
            seconds = outcome.seconds + (before.kept_s if before else 0.0)
            self._estimates.observe(outcome.task_id, work.rollout.arm, seconds)
        self._cancelling.pop(outcome.id, None)
        self._store(work, outcome)
        if self.grouped:
            self._carry_out(self.groups.ended(work.rollout.group_id, outcome.id, outcome.reward if judged else None))

    def _store(self, work: Work, outcome: Outcome) -> None:
        self.histories.pop(outcome.id, None)
        self.began.pop(outcome.id, None)
        self._io.store(outcome, work.epoch, work.block)

    def _retried(self, rank: int, work: Work, outcome: Outcome) -> bool:
        """Retries a failed rollout if its cause allows it. Returns true if the rollout gets another attempt, in this
        pod or a later one."""
        if self._drain.active:
            # When a job ends, its engines and sandboxes fail. The pod that takes over the block retries.
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
        """Returns the outcome of an attempt that returned no result.

        Args:
            kind: ``error_kind`` of the trajectory.
        """
        trajectory = Trajectory.begin(
            work.rollout,
            work.attempt,
            status,
            error_kind=kind,
            error=error,
            job_id=self._pod.job_id,
            epoch=work.epoch,
        )
        return Outcome.of(trajectory, self.attempts(work.rollout.id))

    # --- consequences ---

    def _carry_out(self, step: GroupStep) -> None:
        """Cancels or promotes the rollouts that a group step names."""
        promoted = [self._scheduler.drop(rollout) for rollout in step.promote]
        self._scheduler.add(replace(work, deferred=False) for work in promoted if work is not None)
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
        """Returns the attempts of a rollout that ended without a final result."""
        history = self.histories.get(rollout)
        return history.attempts if history else ()

    def cut_short(self, preempted: bool) -> None:
        """Records that the end of the allocation interrupts all running rollouts. They restart in a later
        allocation."""
        kind = "preemption" if preempted else "walltime"
        for work in self._scheduler.workers.running_work():
            self._cut_short(work, self.outcome_without_run(work, kind, "cut short; it starts over", "cancelled"))

    def _cut_short(self, work: Work, outcome: Outcome) -> None:
        """Records an interrupted attempt. Fails the rollout if it has been interrupted too often."""
        history = self.histories.setdefault(outcome.id, History())
        kind = self._cut_kind(outcome)
        if not kind:  # the user or a limit ended the pod, which is not the rollout's fault
            outcome = replace(outcome, error_kind="", error=WHY_DRAIN.get(self._drain.word) or self._drain.paused)
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
        history.partial = outcome.checkpoint
        history.kept_s = history.kept_s + outcome.seconds if outcome.checkpoint else 0.0

    def _cut_kind(self, outcome: Outcome) -> str:
        """Returns ``walltime`` or ``preemption``. Returns an empty string if the user or a limit ended the pod."""
        word = self._drain.word
        if word in ("walltime", "now", PREEMPTED):
            return "walltime" if word == "walltime" else "preemption"
        if word in WHY_DRAIN or self._drain.paused:
            return ""
        return outcome.error_kind or "preemption"

    def _count_too_short(self, outcome: Outcome, kind: str, history: History) -> None:
        ran_s = time.monotonic() - self.began.get(outcome.id, math.inf)
        if outcome.checkpoint:
            history.too_short = 0
        elif kind == "walltime" and ran_s >= self._pod.walltime.whole_s / 2:
            history.too_short += 1

    def _cut_too_often(self, outcome: Outcome, history: History) -> str:
        """Returns the reason why an interrupted rollout fails. Returns an empty string if another attempt is
        allowed."""
        if history.too_short >= TOO_SHORT:
            return (
                f"the walltime ended it {history.too_short} times in a row after most of the "
                f"{self._pod.walltime.whole_s:.0f} s that an allocation leaves it, and it restarts each time; ask "
                "for more (megaflow-hpc resume RUN --failed --time D-HH:MM:SS), or bound its agent (timeout_s)"
            )
        if history.cuts > MAX_INTERRUPTIONS:
            return (
                f"allocations ended {history.cuts} times before it did; {outcome.error}; try it again in longer ones "
                "(megaflow-hpc resume RUN --failed --time D-HH:MM:SS)"
            )
        return ""

    # --- durable results ---

    def count(self, durable: Sequence[PendingResult]) -> None:
        """Counts durable results. Pauses the pod if nearly all of them failed for the same cause."""
        for result in durable:
            outcome = result.outcome
            failed = outcome.status == "failed"
            self.stored += 1
            self._pattern.add(outcome.cause if failed else "")
        self._drain.pause(self._pattern.systematic)
