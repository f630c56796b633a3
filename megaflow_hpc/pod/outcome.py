"""The outcome of an attempt, as a worker sends it to rank 0.

Rank 0 does not unpack the trajectory in it. Unpacking and repacking would triple rank 0's CPU time for each outcome:
from 2 to 6 us for 1 kB, and from 270 to 830 us for 2 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import msgspec

from megaflow_hpc.host.wire import Message, pack
from megaflow_hpc.rundir.budget import Used
from megaflow_hpc.rundir.events import RolloutEvent, rounded, shown
from megaflow_hpc.trajectory import Attempt, Trajectory

COST_FILE = "cost.json"
"""Name of the artifact with the token usage of judges and metered models."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one attempt. ``record`` is its packed trajectory."""

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
    """Cause of a failure (:mod:`megaflow_hpc.pod.scheduling.failures`). Empty if the attempt did not fail."""
    record: bytes
    checkpoint: str = ""
    """Checkpoint from which an interrupted rollout can resume, relative to ``RUN/partial``. Empty if there is none."""
    cpu_s: float | None = None
    memory_peak_mb: float | None = None
    disk_peak_mb: float | None = None
    models: Used = field(default_factory=dict)
    """Token usage of judges and metered models, by model."""

    @classmethod
    def of(
        cls, trajectory: Trajectory, attempts: Sequence[Attempt] = (), cause: str = "", checkpoint: str = ""
    ) -> Outcome:
        """Packs ``trajectory`` with the list of all attempts. The list contains the earlier ``attempts`` and this one.

        If the messages cannot be packed, for example because an agent nested a thousand lists, they are dropped. The
        rollout keeps its verdict.

        Args:
            cause: Cause of the failure. Default: the trajectory's ``error_kind``.

        Raises:
            TypeError, ValueError, OverflowError: A field other than the messages cannot be packed.
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
        copied = {name: getattr(trajectory, name) for name in _COPIED}
        cause = cause or (trajectory.error_kind if trajectory.status == "failed" else "")
        outcome = cls(**copied, turns=len(trajectory.turns), cause=cause, record=record, checkpoint=checkpoint)
        cost = next((artifact.data for artifact in trajectory.artifacts if artifact.name == COST_FILE), b"{}")
        outcome.models = msgspec.json.decode(cost, type=Used)
        return outcome

    @property
    def seconds(self) -> float:
        """Duration of the attempt in seconds."""
        return self.finished_at - self.started_at

    def to_event(self) -> RolloutEvent:
        """Returns the event for the pod's event file. It is written once the outcome is stored."""
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
            models=self.models,
        )

    def to_message(self) -> Message:
        """Returns the ``result`` message for rank 0. Omits the field names to save parsing time."""
        values = [getattr(self, name) for name in _NAMES]
        return {"op": "result", "outcome": [*values[:-1], msgspec.to_builtins(self.models)]}

    @classmethod
    def from_message(cls, message: Message) -> Outcome:
        """Parses a ``result`` message. Raises TypeError if fields are missing."""
        outcome = cls(*message["outcome"])
        outcome.models = msgspec.convert(outcome.models, Used)
        return outcome

    def payload(self, epoch: int, block: int) -> bytes:
        """Returns the journal record for this outcome: ``{kind, epoch, block, trajectory}``, packed with msgpack."""
        return _ENCODER.encode(
            {"kind": "trajectory", "epoch": epoch, "block": block, "trajectory": msgspec.Raw(self.record)}
        )


_NAMES = tuple(one.name for one in fields(Outcome))
_COPIED = tuple(name for name in _NAMES if name not in ("turns", "cause", "record", "checkpoint", "models"))
_ENCODER = msgspec.msgpack.Encoder()
_ATTEMPT_NAMES = tuple(one.name for one in fields(Attempt))


def attempt_of(ended: Trajectory | Outcome) -> Attempt:
    """Converts an ended attempt to an entry for the rollout's list of attempts."""
    return Attempt(**{name: getattr(ended, name) for name in _ATTEMPT_NAMES})
