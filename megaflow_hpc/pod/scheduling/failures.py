"""Causes of failed rollouts: whose fault each is, how often it is retried, and when to stop. Pure.

A *cause* is finer than the stored ``error_kind``. Each cause has its own limit of retries, so a rollout that met two
dead engines can still be retried after a bad node.

=================  ============  =======  ==========================================================================
cause              stored as     retries  meaning
=================  ============  =======  ==========================================================================
``agent``          agent         0        the scaffold failed; the rollout is completed and verified, not failed
``model``          model         2        no engine answered
``sandbox-start``  sandbox       3        no sandbox started; counts against the rank, which is excluded in the end
``sandbox-lost``   sandbox       2        the sandbox was lost while it was needed
``node``           node          3        the worker rank was lost
``user``           user          0        the task, the scaffold's code or the configuration is wrong
``walltime``       not stored    16       the allocation ended first; the rollout goes back with its block
``preemption``     not stored    16       Slurm preempted the allocation; the rollout goes back with its block
=================  ============  =======  ==========================================================================

The last two are not failures. They are kept as attempts. :data:`MAX_INTERRUPTIONS` limits them for a rollout, and
``slurm.requeues`` for an element of the array. A rollout that had most of a walltime :data:`TOO_SHORT` times in a row,
without a checkpoint, needs a longer one and fails at once.

Failures are *systematic* when nearly all of the last results failed for one cause. Then the campaign is to blame, and
continuing would waste the allocation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from megaflow_hpc.types import ErrorKind


class Rule(NamedTuple):
    """The consequences of one cause."""

    kind: ErrorKind
    """The stored ``error_kind``."""
    retries: int
    """Further attempts after the first failure."""
    blames_rank: bool = False
    """Whether the failure counts against its rank."""


RULES: dict[str, Rule] = {
    "agent": Rule("agent", 0),
    "model": Rule("model", 2),
    "sandbox-start": Rule("sandbox", 3, blames_rank=True),
    "sandbox-lost": Rule("sandbox", 2),
    "node": Rule("node", 3),
    "user": Rule("user", 0),
}

MAX_INTERRUPTIONS = 16
"""Interruptions by the end of an allocation after which a rollout fails."""
TOO_SHORT = 2
"""Walltimes in a row that may end a rollout which had most of each. Then it fails: it needs a longer one."""
MAX_FAILURES = 6
"""Failures for all causes together before a rollout is given up."""

NEARLY_ALL = 0.9
"""Share of the last results with one cause from which failures are systematic."""
SYSTEMATIC_LAST = 32
"""Number of latest results in which a pod looks for systematic failures."""
BAD_STARTS = 4
"""Failed sandbox starts in a row after which a rank gets no more work, if other ranks start theirs."""


def may_retry(causes: Sequence[str]) -> bool:
    """Tells whether a rollout may be retried after attempts that failed for these causes, in order."""
    last = causes[-1]
    rule = RULES.get(last)
    return rule is not None and causes.count(last) <= rule.retries and len(causes) < MAX_FAILURES


class Pattern:
    """Distinguishes systematic failures from bad luck.

    Args:
        last: number of latest results that are compared.
    """

    def __init__(self, last: int) -> None:
        self._last: deque[str] = deque(maxlen=last)
        self._enough = last

    def add(self, cause: str) -> None:
        """Adds a final result. ``cause`` is empty if it did not fail."""
        self._last.append(cause)

    @property
    def systematic(self) -> str:
        """The reason to stop, empty while failures are not systematic."""
        if len(self._last) < self._enough:
            return ""
        ((cause, count),) = Counter(self._last).most_common(1)
        if not cause or count < NEARLY_ALL * self._enough:
            return ""
        return f"{count} of the last {self._enough} rollouts failed for one cause, {cause}"


class Blame:
    """Finds ranks that cannot start sandboxes although others can. If no rank can, the image or campaign is wrong."""

    def __init__(self) -> None:
        self._good = 0
        """Results of any rank that had a sandbox."""
        self._bad: dict[int, tuple[int, int]] = {}
        """Rank → failed starts in a row, and good results of any rank before them."""
        self._named: set[int] = set()

    def add(self, rank: int, cause: str) -> bool:
        """Adds a result of ``rank``. Returns True once for each bad rank."""
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
