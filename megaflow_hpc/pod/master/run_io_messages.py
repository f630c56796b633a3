"""Messages between rank 0's loop and its I/O thread: *requests* to the thread, *reports* back, each through a queue.

A message is handed over: whoever sent it does not touch it, or what it holds, again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaflow_hpc.ledger.rules import Outlook
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.live import Asked, PodActivity
from megaflow_hpc.types import Rollout

# --- requests ---


class PendingResult(NamedTuple):
    """A result to be journalled."""

    outcome: Outcome
    block: int
    epoch: int
    record: bytes


class StoreResults(NamedTuple):
    """Has results journalled, in this order; each comes back in a :class:`Durable`."""

    results: list[PendingResult]


@dataclass(frozen=True)
class ClaimBlock:
    """Asks for a block; answered by one :class:`Claimed`."""


@dataclass(frozen=True)
class ListEndpoints:
    """Asks for a look at the engines; :class:`EndpointsChanged` where something changed."""


class ShowProgress(NamedTuple):
    """How far the pod is, for its lease to say."""

    running: int
    queued: int
    stored: int
    core_s: float
    """Core-seconds that the allocation has cost so far."""
    tokens: int = 0
    """Tokens that the engines have sampled for rollouts of this pod."""
    tokens_per_s: float = 0.0
    """Of the last half minute."""


class ShowActivity(NamedTuple):
    """What viewers are shown of this pod; ``None``: nothing any more."""

    activity: PodActivity | None


@dataclass(frozen=True)
class RequestWork:
    """Asks other pods to fill free slots; 0 withdraws that."""

    slots: int


@dataclass(frozen=True)
class LookForWorkRequests:
    """Asks which pods request work; each request is reported once, by :class:`WorkRequested`."""


@dataclass(frozen=True)
class HandOff:
    """Hands rollouts that were not started, with their blocks, to other pods; see :meth:`ClaimedBlocks.hand_off`."""

    rollouts: list[tuple[int, Rollout]]
    each: int


@dataclass(frozen=True)
class Stop:
    """Ends the thread when everything before is done, as far as it can be."""

    release: bool = False
    """Gives unfinished blocks back."""
    histories: dict[str, History] = field(default_factory=dict)
    """What the next pods are told of the rollouts that go back, by id."""


Request = (
    StoreResults
    | ClaimBlock
    | ListEndpoints
    | ShowProgress
    | ShowActivity
    | RequestWork
    | LookForWorkRequests
    | HandOff
    | Stop
)

# --- reports ---


@dataclass(frozen=True)
class Durable:
    """Results that are on the disk, and count."""

    results: tuple[PendingResult, ...]


@dataclass(frozen=True)
class Claimed:
    """The answer to :class:`ClaimBlock`; no block where there is nothing to claim."""

    block: ClaimedBlock | None
    seconds: float
    """What the claim took."""


@dataclass(frozen=True)
class EndpointsChanged:
    """The engines that there are."""

    endpoints: list[dict[str, Any]]
    """The decoded endpoint files."""
    names: list[str]
    unanswered: set[str]
    """Policies whose rollouts wait for an engine."""


@dataclass(frozen=True)
class WorkRequested:
    """Another pod asks for so many slots to be filled."""

    slots: int


@dataclass(frozen=True)
class HandedOff:
    """So many :class:`HandOff` are in the ledger now."""

    count: int


@dataclass(frozen=True)
class LimitExceeded:
    """A limit of the whole campaign is passed."""

    why: str


@dataclass(frozen=True)
class RunState:
    """What the thread knows after a turn. Posted when it changes, before the reports that follow from it."""

    held: int = 0
    """Blocks that are claimed and not done."""
    closes_at: float = float("-inf")
    """When this pod's fence closes, by the ledger's clock."""
    seen: Outlook = field(default_factory=Outlook)
    """At the last claim."""
    claimed_all: bool = False
    """No block was free at the last claim."""
    stuck_since: float | None = None
    """Since when the run directory refuses to be written, by the monotonic clock."""


@dataclass(frozen=True)
class TurnEnded:
    """The thread is done with all that was asked, or will try it again."""

    at: float
    """By the monotonic clock."""


@dataclass(frozen=True)
class Stopped:
    """The last report."""

    error: BaseException | None = None
    """What ended the thread against its will."""
    finished: bool = False
    """Every block of the campaign is done."""


Report = (
    Durable
    | Claimed
    | EndpointsChanged
    | WorkRequested
    | HandedOff
    | LimitExceeded
    | Asked
    | RunState
    | TurnEnded
    | Stopped
)
