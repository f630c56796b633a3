"""What goes wrong with rollouts, whose fault it is, and what is done about it: pure.

A *cause* is finer than the ``error_kind`` that is stored: it decides what is done. Each cause has a bound of its own
and is counted for itself, so that a rollout which met two dead engines has lost none of its retries after a bad node.

=================  ============  =======  ==========================================================================
cause              stored as     retries  what it is
=================  ============  =======  ==========================================================================
``agent``          agent         0        the scaffold failed; such a rollout is completed and verified, not failed
``model``          model         2        no engine answered
``sandbox-start``  sandbox       3        no sandbox came up; counts against the rank, which is left out in the end
``sandbox-lost``   sandbox       2        the sandbox went away while it was needed
``node``           node          3        the worker rank was lost
``user``           user          0        the task, the scaffold's code or the configuration is wrong
``walltime``       not at all    16       the allocation ended first; goes back with its block
``preemption``     not at all    16       Slurm took the allocation back; goes back with its block
=================  ============  =======  ==========================================================================

The last two are nobody's failure: they are kept as attempts and nothing is judged. They may happen to a
rollout :data:`MAX_INTERRUPTIONS` times, and to an element of the array ``slurm.requeues`` times. A rollout that had
most of a walltime :data:`TOO_SHORT` times in a row, with nothing kept, takes longer than that and fails at once.

*Systematic* failures are those that say more about the campaign than about a rollout: when nearly all of the last
results failed for one cause, going on would burn the allocation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megaflow_hpc.types import ErrorKind

Cause = Literal["agent", "model", "sandbox-start", "sandbox-lost", "node", "walltime", "preemption", "user"]


class Rule(NamedTuple):
    """What follows from one cause."""

    kind: ErrorKind
    """As it is stored."""
    retries: int
    """Further attempts after the first that ended so."""
    blames_rank: bool = False
    """Whether it speaks against the rank on which it happened."""


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
"""Walltimes in a row that end a rollout, which had most of each, before it fails: it takes longer than that."""
MAX_FAILURES = 6
"""Failures of all causes together after which a rollout is given up."""

NEARLY_ALL = 0.9
"""Share of the last results that failed for one cause, from which on failures are systematic."""
SYSTEMATIC_LAST = 32
"""Number of latest results of a pod in which systematic failures are looked for."""
BAD_STARTS = 4
"""Sandboxes in a row that did not start on a rank while others had theirs, after which it gets no more work."""


def may_retry(causes: Sequence[str]) -> bool:
    """Tells whether a rollout is tried again after attempts that failed for these causes, in order."""
    last = causes[-1]
    rule = RULES.get(last)
    return rule is not None and causes.count(last) <= rule.retries and len(causes) < MAX_FAILURES


class Pattern:
    """Tells systematic failures from bad luck.

    Args:
        last: Number of latest results that are compared.
    """

    def __init__(self, last: int) -> None:
        self._last: deque[str] = deque(maxlen=last)
        self._enough = last

    def add(self, cause: str) -> None:
        """Takes in a final result; ``cause`` is empty where it did not fail."""
        self._last.append(cause)

    @property
    def systematic(self) -> str:
        """Why to stop; empty while failures are not systematic."""
        if len(self._last) < self._enough:
            return ""
        ((cause, count),) = Counter(self._last).most_common(1)
        if not cause or count < NEARLY_ALL * self._enough:
            return ""
        return f"{count} of the last {self._enough} rollouts failed for one cause, {cause}"


class Blame:
    """Finds ranks that cannot start sandboxes although others can; where none can, image or campaign is at fault."""

    def __init__(self) -> None:
        self._good = 0
        """Results, of any rank, that had a sandbox."""
        self._bad: dict[int, tuple[int, int]] = {}
        """Rank → (starts in a row that failed, good results before them)."""
        self._named: set[int] = set()

    def add(self, rank: int, cause: str) -> bool:
        """Takes in a result of ``rank``; True for the one failure too many, once for each rank."""
        rule = RULES.get(cause)
        if rule is None or not rule.blames_rank:
            self._good += cause != "node"
            self._bad.pop(rank, None)
            return False
        failed, before = self._bad.get(rank, (0, self._good))
        self._bad[rank] = failed + 1, before
        if rank in self._named or failed + 1 < BAD_STARTS or self._good == before:
            return False
        self._named.add(rank)
        return True
