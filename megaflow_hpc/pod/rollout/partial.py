"""Partial rollouts: what is kept of a rollout that an allocation's end cut short between two turns.

::

    RUN/partial/
      <job>.<rank>/                           what the runners of one worker rank kept
        <digest of the rollout's id>.<8 hex>  one partial rollout
      <pod>.<start>.json                      what became of rollouts there (histories.py), by rank 0

A file is a digest of what follows, the length of a msgpack map, the map (trajectory so far, recorder, agent's state,
where in its steps), and the sandbox's packed layer. It appears by a rename when it is whole, and is removed by whoever
begins with it: a state is used once. Nothing depends on it: one that is missing, damaged, of another version or larger
than allowed means that the rollout starts anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import struct
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megaflow_hpc.environments.sandbox.snapshot import Snapshot, pack
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host import wire
from megaflow_hpc.tasks.formats import StepVerdict
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Artifact, Verdict

FORMAT = 2
_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.sha256().digest_size
_CHUNK = 1 << 20
CARRIED = (
    *("status", "error_kind", "error", "seed", "inexact", "constrained"),
    *("messages", "parents", "sequences", "turns", "artifacts"),
)
"""What of a trajectory goes over to the next attempt as it is; the rest is that attempt's own, but times are added up
and of peaks the highest stays."""
TIMES = ("setup_s", "agent_s", "verify_s", "cpu_s")
PEAKS = ("memory_peak_mb", "disk_peak_mb")


class Damaged(Exception):
    """A file is no partial rollout, or one of another version."""


class Room:
    """Bytes that may still be kept, by threads that write at the same time."""

    def __init__(self, left: float = math.inf) -> None:
        self._left = left
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Takes bytes before they are written.

        Raises:
            SandboxError: so many are not left.
        """
        with self._lock:
            if count > self._left:
                raise SandboxError("partial rollouts take all the disk space that this rank may use for them")
            self._left -= count

    def give_back(self, count: int) -> None:
        """Gives back what was taken for a file that did not come about."""
        with self._lock:
            self._left += count


class CutShort(Exception):
    """The allocation ends, and an agent was kept from its next turn.

    Args:
        agent: its state; ``None`` where it cannot go on.
        recorded: the recorder's.
    """

    def __init__(self, agent: dict[str, Any] | None, recorded: dict[str, Any]) -> None:
        super().__init__()
        self.agent, self.recorded = agent, recorded
        self.kept = ""
        """File with which the rollout goes on."""
        self.why = "its agent gave no state"
        """Why it starts anew, where there is no such file."""

    def __str__(self) -> str:
        turns = len(self.recorded["recording"]["turns"])
        after = f"cut short after turn {turns}" if turns else "cut short before its first turn"
        return f"{after}; {'its state was kept' if self.kept else f'it starts anew: {self.why}'}"


@dataclass
class Partial:
    """A rollout between two turns of an agent."""

    trajectory: Trajectory
    """Of the steps before the one under way."""
    step: int
    """Number of the step under way, from 0."""
    verdicts: list[StepVerdict]
    """Of the steps before it."""
    agent_s: float
    """Seconds that the agent has taken in this step."""
    agent: dict[str, Any]
    recorded: dict[str, Any]
    breaches: list[str] = field(default_factory=list)
    """Limits that its commands have passed in this step."""
    note: bytes = b""
    """What the host knows of the checkout in the sandbox."""
    layer: Snapshot | None = None
    """The sandbox's files."""

    def write(self, path: Path, limit: int, room: Room) -> None:
        """Publishes it at ``path``, whole or not at all. ``layer`` must be a directory.

        Raises:
            SandboxError: it takes more than ``limit`` bytes, or than there is room for.
            OSError: it cannot be written.
            TypeError, ValueError, OverflowError: something in it cannot be packed.
        """
        assert self.layer is not None
        head = {
            "format": FORMAT,
            **vars(self),
            "trajectory": self.trajectory.to_record(),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "layer": {"image": self.layer.image, "marks": self.layer.marks},
        }
        data = wire.pack(head)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        hashed: _Hashed | None = None
        try:
            with open(temporary, "xb", opener=_private) as file:
                hashed = _Hashed(file, room)
                file.write(bytes(_DIGEST))
                hashed.write(_LENGTH.pack(len(data)))
                hashed.write(data)
                pack(self.layer, hashed.write, limit - len(data))
                file.seek(0)
                file.write(hashed.digest())
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            if hashed is not None:
                room.give_back(hashed.taken)
            raise
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @classmethod
    def read(cls, path: Path) -> Partial:
        """Reads a file that :meth:`write` published.

        Raises:
            Damaged: with the reason why there is none to go on with.
        """
        try:
            with open(path, "rb") as file:
                digest = file.read(_DIGEST)
                hashed = hashlib.sha256()
                while chunk := file.read(_CHUNK):
                    hashed.update(chunk)
                if hashed.digest() != digest:
                    raise Damaged(f"{path}: damaged")
                file.seek(_DIGEST)
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                head = wire.unpack(file.read(length))
                offset = file.tell()
            if head.pop("format") != FORMAT:
                raise Damaged(f"{path}: of another version")
            head["trajectory"] = Trajectory.from_record(head["trajectory"])
            head["verdicts"] = [_verdict(verdict) for verdict in head["verdicts"]]
            head["layer"] = Snapshot(str(path), head["layer"]["image"], head["layer"]["marks"], offset)
            return cls(**head)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise Damaged(f"{path}: {error!r}") from error

    def carry_over(self, trajectory: Trajectory) -> None:
        """Makes a trajectory that has just begun go on from this one."""
        for name in CARRIED:
            setattr(trajectory, name, getattr(self.trajectory, name))
        for name in (*TIMES, *PEAKS):
            both = [n for n in (getattr(self.trajectory, name), getattr(trajectory, name)) if n is not None]
            setattr(trajectory, name, (sum(both) if name in TIMES else max(both)) if both else None)

    @property
    def turns(self) -> int:
        """Model calls so far."""
        return len(self.trajectory.turns) + len(self.recorded["recording"]["turns"])


def new_name(rollout_id: str) -> str:
    """A file name for a partial rollout that no other has, whoever runs the same rollout at the same time."""
    return f"{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}.{secrets.token_hex(4)}"


class _Hashed:
    """Writes to a file and knows the digest of what it wrote."""

    def __init__(self, file: BinaryIO, room: Room) -> None:
        self._file, self._room, self._hash = file, room, hashlib.sha256()
        self.digest = self._hash.digest
        self.taken = 0

    def write(self, data: bytes) -> int:
        """Writes ``data``, adds it to the digest, and returns the number of bytes written."""
        self._room.take(len(data))
        self.taken += len(data)
        self._hash.update(data)
        return self._file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _verdict(record: dict[str, Any]) -> StepVerdict:
    fields = record["verdict"]
    artifacts = [Artifact(**artifact) for artifact in fields["artifacts"]]
    return StepVerdict(record["name"], Verdict(**{**fields, "artifacts": artifacts}))
