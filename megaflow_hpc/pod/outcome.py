"""What rank 0 needs to know of a finished attempt. The trajectory itself passes through rank 0 packed and unopened.

Decoding it and packing it again would take three times the CPU time there: 6 us instead of 2 at 1 kB, 28 instead of 7
at 100 kB, 830 instead of 270 at 2 MB (median).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec

from megaflow_hpc.host.wire import Message, pack
from megaflow_hpc.rundir.events import RolloutEvent, rounded, shown
from megaflow_hpc.trajectory import Attempt, Trajectory


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
    constrained: int
    started_at: float
    finished_at: float
    cause: str
    """Why it failed, as :mod:`megaflow_hpc.pod.scheduling.failures` tells causes apart; empty where it did not."""
    record: bytes
    partial: str = ""
    """File below ``RUN/partial`` with which a rollout that was cut short goes on; empty without one."""
    cpu_s: float | None = None
    memory_peak_mb: float | None = None
    disk_peak_mb: float | None = None

    @classmethod
    def of(
        cls, trajectory: Trajectory, attempts: Sequence[Attempt] = (), cause: str = "", partial: str = ""
    ) -> Outcome:
        """Packs ``trajectory`` with ``attempts`` before it and its own; without messages that cannot be packed.

        Messages are an agent's word (a thousand lists in one another), and no reason to go without its verdict.

        Args:
            cause: of the failure; default: its ``error_kind``.

        Raises:
            TypeError, ValueError, OverflowError: something in it cannot be packed.
        """
        trajectory.attempts = [*attempts, attempt_of(trajectory)]
        try:
            record = pack(trajectory.to_record())
        except (TypeError, ValueError, OverflowError) as error:
            trajectory.messages, trajectory.parents = [], []
            for turn in trajectory.turns:
                turn.message = -1
            trajectory.error = "; ".join(filter(None, (trajectory.error, f"its messages cannot be kept: {error!r}")))
            trajectory.attempts = [*attempts, attempt_of(trajectory)]
            record = pack(trajectory.to_record())
        told = {name: getattr(trajectory, name) for name in _TOLD}
        cause = cause or (trajectory.error_kind if trajectory.status == "failed" else "")
        return cls(**told, turns=len(trajectory.turns), cause=cause, record=record, partial=partial)

    @property
    def seconds(self) -> float:
        """How long the attempt took."""
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
            constrained=self.constrained,
            cpu_s=rounded(self.cpu_s, 2),
            memory_peak_mb=rounded(self.memory_peak_mb, 1),
            disk_peak_mb=rounded(self.disk_peak_mb, 1),
        )

    def to_message(self) -> Message:
        """Returns the ``result`` message for rank 0: the values alone, whose names would take longer to read."""
        return {"op": "result", "outcome": [getattr(self, name) for name in _NAMES]}

    @classmethod
    def from_message(cls, message: Message) -> Outcome:
        """Reads a ``result`` message. Raises TypeError where fields are missing."""
        return cls(*message["outcome"])

    def payload(self, epoch: int, block: int) -> bytes:
        """Returns the journal's record: ``{kind, epoch, block, trajectory}`` in msgpack."""
        return _ENCODER.encode(
            {"kind": "trajectory", "epoch": epoch, "block": block, "trajectory": msgspec.Raw(self.record)}
        )


_NAMES = tuple(field.name for field in fields(Outcome))
_TOLD = tuple(name for name in _NAMES if name not in ("turns", "cause", "record", "partial"))
_ENCODER = msgspec.msgpack.Encoder()
_OF_ATTEMPT = tuple(field.name for field in fields(Attempt))


def attempt_of(ended: Trajectory | Outcome) -> Attempt:
    """Returns what a trajectory keeps of an attempt."""
    return Attempt(**{name: getattr(ended, name) for name in _OF_ATTEMPT})
