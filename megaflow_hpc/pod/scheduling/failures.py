"""Defines the causes of failed rollouts: how each is stored, how often to retry, and when to stop the pod.

A *cause* is more specific than the stored ``error_kind``, and each cause has its own retry limit. For example, a
rollout that failed twice because of dead engines can still be retried after a failure of its node.

=================  ============  =======  ==========================================================================
cause              stored as     retries  meaning
=================  ============  =======  ==========================================================================
``agent``          agent         0        the agent's program could not be started in the sandbox; other failures of
                                          agents are completed and verified, not failed
``model``          model         2        no engine responded
``sandbox-start``  sandbox       3        the sandbox did not start; ranks with repeated failed starts are excluded
``sandbox-lost``   sandbox       2        the sandbox was lost while it was needed
``service``        sandbox       2        a service of the rollout did not become healthy, or ended before the rollout
``node``           node          3        the worker rank was lost
``user``           user          0        the task, the scaffold's code or the configuration is wrong
``walltime``       not stored    16       the allocation ended first; the rollout is released with its block
``preemption``     not stored    16       Slurm preempted the allocation; the rollout is released with its block
=================  ============  =======  ==========================================================================

The last two are interruptions rather than failures, but they count as attempts. :data:`MAX_INTERRUPTIONS` limits them
for each rollout, and ``slurm.requeues`` for each array element. A rollout fails immediately if it has used most of a
walltime :data:`TOO_SHORT` times in a row without a checkpoint, because it needs a longer walltime.

Failures are *systematic* if nearly all of the latest results failed for the same cause, or if the agent's program could
not be started in any of a pod's first rollouts. Systematic failures indicate an error in the campaign, and continuing
would waste the allocation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from megaflow_hpc.types import ErrorKind


class Rule(NamedTuple):
    """How a failure with one cause is stored and retried."""

    kind: ErrorKind
    """``error_kind`` under which the failure is stored."""
    retries: int
    """Maximum number of retries after failures with this cause."""
    blames_rank: bool = False
    """True if the failure counts against the rank on which it happened."""


RULES: dict[str, Rule] = {
    "agent": Rule("agent", 0),
    "model": Rule("model", 2),
    "sandbox-start": Rule("sandbox", 3, blames_rank=True),
    "sandbox-lost": Rule("sandbox", 2),
    "service": Rule("sandbox", 2),
    "node": Rule("node", 3),
    "user": Rule("user", 0),
}

MAX_INTERRUPTIONS = 16
"""A rollout fails after more than this many interruptions by the end of an allocation."""
TOO_SHORT = 2
"""A rollout fails once the walltime has interrupted it this many times in a row. Interruptions count only if the
rollout ran for most of the walltime."""
MAX_FAILURES = 6
"""A rollout is not retried after this many failures, counted over all causes."""

NEARLY_ALL = 0.9
"""Share of the latest results that must have the same cause for failures to be systematic."""
SYSTEMATIC_LAST = 32
"""Number of latest results that a pod checks for systematic failures."""
FIRST_WITHOUT_PROGRAM = 8
"""A pod stops after this many results if the agent's program could not be started in any of them."""
BAD_STARTS = 4
"""A rank gets no more work after this many consecutive failed sandbox starts, if other ranks succeed."""


def may_retry(causes: Sequence[str]) -> bool:
    """Returns True if a rollout may be retried.

    Args:
        causes: Causes of all its failed attempts so far, in order.
    """
    last = causes[-1]
    rule = RULES.get(last)
    return rule is not None and causes.count(last) <= rule.retries and len(causes) < MAX_FAILURES


class Pattern:
    """Detects systematic failures among the results of a pod.

    Args:
        last: Number of latest results to consider.
    """

    def __init__(self, last: int) -> None:
        self._last: deque[str] = deque(maxlen=last)
        self._enough = last
        self._without_program: int | None = 0
        """Number of results so far. ``None`` once the agent's program could be started in one of them."""

    def add(self, cause: str) -> None:
        """Adds a final result. ``cause`` is empty if the rollout did not fail."""
        self._last.append(cause)
        if self._without_program is not None:
            self._without_program = self._without_program + 1 if cause == "agent" else None

    @property
    def systematic(self) -> str:
        """Reason for the pod to stop. Empty unless failures are systematic."""
        if (self._without_program or 0) >= FIRST_WITHOUT_PROGRAM:
            return (
                f"the agent's program could not be started in any of the first {self._without_program} rollouts; "
                "correct agent.args.command, or put the program into the tasks' images, and plan a new run"
            )
        if len(self._last) < self._enough:
            return ""
        ((cause, count),) = Counter(self._last).most_common(1)
        if not cause or count < NEARLY_ALL * self._enough:
            return ""
        return f"{count} of the last {self._enough} rollouts failed for one cause, {cause}"


class Blame:
    """Detects ranks that cannot start sandboxes although other ranks can. If no rank can, the image or the campaign is
    at fault."""

    def __init__(self) -> None:
        self._good = 0
        """Number of results with a started sandbox, over all ranks."""
        self._bad: dict[int, tuple[int, int]] = {}
        """For each rank, the number of consecutive failed starts, and the value of ``_good`` before the first of
        them."""
        self._named: set[int] = set()

    def add(self, rank: int, cause: str) -> bool:
        """Records the result of an attempt on ``rank``. Returns true when the rank is first found to be bad."""
        rule = RULES.get(cause)
        if rule is None or not rule.blames_rank:
            self._good += cause != "node"
            self._bad.pop(rank, None)
            return False
        failed, good_before = self._bad.get(rank, (0, self._good))
        failed += 1
        self._bad[rank] = failed, good_before
        if rank in self._named or failed < BAD_STARTS or self._good == good_before:
            return False
        self._named.add(rank)
        return True
