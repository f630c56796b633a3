"""What rank 0 needs to know of a finished attempt. The trajectory itself passes through it packed and unopened: a rank
that decoded every trajectory could hand out a fifth of the rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from megaflow_hpc.host.wire import Message, pack
from megaflow_hpc.rundir.events import RolloutEvent, shown
from megaflow_hpc.types import Attempt, Trajectory


@dataclass(slots=True)
class Outcome:
    """The end of one attempt, and its trajectory as a packed record."""

    id: str
    task_id: str
    policy: str
    attempt: int
    status: str
    error_kind: str
    error: str
    node: str
    job_id: str
    reward: float | None
    turns: int
    inexact: int
    started_at: float
    finished_at: float
    cause: str
    """Why it failed, as :mod:`megaflow_hpc.pod.scheduling.failures` tells causes apart; empty where it did not."""
    record: bytes
    partial: str = ""
    """Of one that was cut short: the file below ``RUN/partial`` with which it goes on, if any."""

    @classmethod
    def of(
        cls, trajectory: Trajectory, attempts: Sequence[Attempt] = (), cause: str = "", partial: str = ""
    ) -> Outcome:
        """Packs ``trajectory`` with ``attempts`` before it and its own.

        Args:
            cause: of the failure; default: its ``error_kind``.

        Raises:
            TypeError, ValueError, OverflowError: something in it cannot be packed.
        """
        trajectory.attempts = [*attempts, attempt_of(trajectory)]
        told = {name: getattr(trajectory, name) for name in _TOLD}
        cause = cause or (trajectory.error_kind if trajectory.status == "failed" else "")
        record = pack(trajectory.to_record())
        return cls(**told, turns=len(trajectory.turns), cause=cause, record=record, partial=partial)

    @property
    def seconds(self) -> float:
        return self.finished_at - self.started_at

    def to_event(self) -> RolloutEvent:
        """Returns the line of the event file that reports it as stored."""
        return RolloutEvent(
            id=self.id,
            status=self.status,
            kind=self.error_kind,
            error=shown(self.error),
            reward=self.reward,
            seconds=round(self.seconds, 2),
            turns=self.turns,
            inexact=self.inexact,
        )

    def to_message(self) -> Message:
        return {"op": "result", **{name: getattr(self, name) for name in _NAMES}}

    @classmethod
    def from_message(cls, message: Message) -> Outcome:
        told = message.copy()
        del told["op"]
        return cls(**told)

    def payload(self, epoch: int, block: int) -> bytes:
        """The journal's record: ``{kind, epoch, block, trajectory}`` in msgpack, the trajectory put in as it is."""
        return _before(epoch, block) + self.record


_NAMES = tuple(field.name for field in fields(Outcome))
_TOLD = tuple(name for name in _NAMES if name not in ("turns", "cause", "record", "partial"))
_KIND = b"\x84" + pack("kind") + pack("trajectory") + pack("epoch")  # a map of four pairs, its parts one by one
_OF_ATTEMPT = tuple(field.name for field in fields(Attempt))
_BLOCK = pack("block")
_TRAJECTORY = pack("trajectory")


@lru_cache(1024)
def _before(epoch: int, block: int) -> bytes:
    """What stands before the trajectory in a record."""
    return b"".join((_KIND, pack(epoch), _BLOCK, pack(block), _TRAJECTORY))


def attempt_of(ended: Trajectory | Outcome) -> Attempt:
    """An attempt as the trajectory of its rollout tells of it."""
    return Attempt(**{name: getattr(ended, name) for name in _OF_ATTEMPT})
