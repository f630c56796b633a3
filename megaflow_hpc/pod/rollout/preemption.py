"""Checkpoints of rollouts that are interrupted when an allocation ends, because of preemption or walltime.

A resumable agent stops before its next turn: the gateway refuses the turn, and the agent returns its state. The state
is written to a checkpoint, together with the sandbox's files and the recording. Rollouts of other agents continue for
as long as permitted. A rollout restarts from the beginning if its state is uncertain. This is the case if background
processes were still running in its sandbox, or if a command was running when Slurm signalled every process of the step.

::

    RUN/partial/
      <job>.<rank>/                           checkpoints of the runners of one worker rank
        <digest of the rollout's id>.<8 hex>  one checkpoint
      <pod>.<start>.json                      histories of unfinished rollouts, written by rank 0

A checkpoint file consists of a digest of the rest, the length of a msgpack map, the map (trajectory so far, recorder,
agent state, step), and the sandbox's packed layer. A complete file is published by renaming it. The process that
resumes from it deletes it, so each state is used only once. If a checkpoint is missing, damaged, too large or of
another version, the rollout restarts from the beginning.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import secrets
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.snapshot import Snapshot, pack
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host import wire
from megaflow_hpc.host.atomic import new_file
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import StepVerdict
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Artifact, Verdict

# --- checkpoints ---


FORMAT = 3
_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.sha256().digest_size
COPIED = (
    *("status", "error_kind", "error", "rewards", "seed", "inexact", "constrained"),
    *("messages", "parents", "sequences", "turns", "artifacts", "images"),
)
"""Names of the trajectory fields that the next attempt copies from a checkpoint. Fields in :data:`TIMES` are summed,
and fields in :data:`PEAKS` keep the maximum."""
TIMES = ("setup_s", "agent_s", "verify_s", "cpu_s")
PEAKS = ("memory_peak_mb", "disk_peak_mb")


class DamagedError(Exception):
    """Raised if a file is not a checkpoint, is damaged, or has another version."""


class CheckpointQuota:
    """Limits the total size of checkpoints in bytes. Thread-safe."""

    def __init__(self, left: float = math.inf) -> None:
        self._left = left
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Reserves ``count`` bytes before they are written. Raises SandboxError if fewer are left."""
        with self._lock:
            if count > self._left:
                raise SandboxError("partial rollouts take all the disk space that this rank may use for them")
            self._left -= count

    def give_back(self, count: int) -> None:
        """Frees ``count`` reserved bytes whose file was not published."""
        with self._lock:
            self._left += count


class CutShort(Exception):
    """Raised when the allocation ends and the gateway has refused the agent's next turn.

    Args:
        agent: State of the agent, or ``None`` if the agent cannot be resumed.
        recorded: State of the recorder of the agent's model calls.
    """

    def __init__(self, agent: dict[str, Any] | None, recorded: dict[str, Any]) -> None:
        super().__init__()
        self.agent, self.recorded = agent, recorded
        self.checkpoint = ""
        """Name of the checkpoint to resume from. Empty if there is none."""
        self.why = "its agent gave no state"
        """Reason why there is no checkpoint."""

    def __str__(self) -> str:
        turns = len(self.recorded["recording"]["turns"])
        after = f"cut short after turn {turns}" if turns else "cut short before its first turn"
        return f"{after}; {'its state was kept' if self.checkpoint else f'it restarts from the beginning: {self.why}'}"


@dataclass
class Checkpoint:
    """State of a rollout between turns of its agent."""

    trajectory: Trajectory
    """Trajectory of the completed steps."""
    step: int
    """Number of the current step, from 0."""
    verdicts: list[StepVerdict]
    """Verdicts of the completed steps."""
    agent_s: float
    """Seconds that the agent has spent on the current step."""
    agent: dict[str, Any]
    recorded: dict[str, Any]
    breaches: list[str] = field(default_factory=list)
    """Limits that the agent's commands have exceeded in the current step."""
    note: bytes = b""
    """Data about the checkout in the sandbox that the host needs later (:mod:`megaflow_hpc.tasks.checkout`)."""
    layer: Snapshot | None = None
    """Snapshot of the sandbox's files. ``None`` until it is taken."""

    def write(self, path: Path, max_bytes: int, quota: CheckpointQuota) -> None:
        """Writes the checkpoint to ``path`` atomically. Its layer must be a directory.

        Raises:
            SandboxError: The checkpoint exceeds ``max_bytes`` or the quota.
            OSError: The checkpoint cannot be written.
            TypeError, ValueError, OverflowError: A field cannot be packed.
        """
        assert self.layer is not None
        content = {
            "format": FORMAT,
            **vars(self),
            "trajectory": self.trajectory.to_record(),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "layer": {"image": self.layer.image, "marks": self.layer.marks},
        }
        data = wire.pack(content)
        output: _HashedFile | None = None
        try:
            with new_file(path, 0o600) as file:
                output = _HashedFile(file, quota)
                file.write(bytes(_DIGEST))
                output.write(_LENGTH.pack(len(data)))
                output.write(data)
                pack(self.layer, output.write, max_bytes - len(data))
                file.seek(0)
                file.write(output.digest())
        except BaseException:
            if output is not None:
                quota.give_back(output.written)
            raise

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads a checkpoint. Raises DamagedError if it is missing, damaged or of another version."""
        try:
            with open(path, "rb") as file:
                digest = file.read(_DIGEST)
                actual = hashlib.sha256()
                while chunk := file.read(1 << 20):
                    actual.update(chunk)
                if actual.digest() != digest:
                    raise DamagedError(f"{path}: damaged")
                file.seek(_DIGEST)
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                content = wire.unpack(file.read(length))
                offset = file.tell()
            if content.pop("format") != FORMAT:
                raise DamagedError(f"{path}: of another version")
            content["trajectory"] = Trajectory.from_record(content["trajectory"])
            content["verdicts"] = [_verdict(verdict) for verdict in content["verdicts"]]
            layer = content["layer"]
            content["layer"] = Snapshot(str(path), layer["image"], layer["marks"], offset)
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise DamagedError(f"{path}: {error!r}") from error

    def carry_over(self, trajectory: Trajectory) -> None:
        """Copies the results so far into the trajectory of the next attempt. Adds up times."""
        before = self.trajectory
        for name in COPIED:
            setattr(trajectory, name, getattr(before, name))
        for name in TIMES:
            setattr(trajectory, name, _combined(sum, getattr(before, name), getattr(trajectory, name)))
        for name in PEAKS:
            setattr(trajectory, name, _combined(max, getattr(before, name), getattr(trajectory, name)))

    @property
    def turns(self) -> int:
        """Number of model calls so far, over all steps."""
        return len(self.trajectory.turns) + len(self.recorded["recording"]["turns"])


def new_name(rollout_id: str) -> str:
    """Returns a unique file name for a checkpoint of this rollout, because several processes may run the same
    rollout."""
    return f"{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}.{secrets.token_hex(4)}"


class _HashedFile:
    """File wrapper that enforces a quota and hashes the written data."""

    def __init__(self, file: BinaryIO, quota: CheckpointQuota) -> None:
        self._file, self._quota, self._hash = file, quota, hashlib.sha256()
        self.digest = self._hash.digest
        self.written = 0

    def write(self, data: bytes) -> int:
        self._quota.take(len(data))
        self.written += len(data)
        self._hash.update(data)
        return self._file.write(data)


def _combined(combine: Any, *values: float | None) -> float | None:
    present = [value for value in values if value is not None]
    return combine(present) if present else None


def _verdict(record: dict[str, Any]) -> StepVerdict:
    fields = record["verdict"]
    artifacts = [Artifact(**artifact) for artifact in fields["artifacts"]]
    return StepVerdict(record["name"], Verdict(**{**fields, "artifacts": artifacts}))


# --- the end of an allocation ---


MAX_CHECKPOINT_BYTES = 256 * 10**6
"""Maximum size of a checkpoint in bytes. If a sandbox's files exceed it, the rollout restarts from the beginning."""
MAX_CAMPAIGN_BYTES = 200e9
"""Maximum total size of all checkpoints of a campaign, in bytes. Each worker rank gets an equal share."""


class Preemption:
    """Writes checkpoints when a runner's allocation ends, and reads checkpoints of earlier allocations.

    Args:
        folder: Directory for checkpoints. ``None`` disables checkpoints.
        max_bytes: Maximum size of one checkpoint.
        max_rank_bytes: Maximum total size of this rank's checkpoints, including those of its earlier starts.
    """

    def __init__(
        self, gateway: ModelGateway, folder: Path | None, max_bytes: int, max_rank_bytes: float = math.inf
    ) -> None:
        self._gateway, self.folder = gateway, folder
        self._max_bytes, self._max_rank_bytes = max_bytes, max_rank_bytes
        self.owner = "0"
        """Name of this rank's directory in ``folder``. All starts of the rank use the same one."""
        self._quota: CheckpointQuota | None = None
        self.preempted = False
        """True once Slurm has signalled every process of the step. If a process ends afterwards, it may not have
        failed."""
        self._suspending = self._now = False
        self._resumable: dict[str, ApptainerSandbox] = {}
        """Sandboxes of the running rollouts whose agents can be resumed, by rollout id."""
        self._interrupted: set[str] = set()
        """Ids of rollouts that were running a command in their sandbox when the signal arrived."""

    @property
    def kind(self) -> str:
        """Error kind of attempts that are interrupted now: ``preemption`` or ``walltime``. Empty unless the allocation
        is ending."""
        if self.preempted:
            return "preemption"
        return "walltime" if self._suspending else ""

    def suspend(self, now: bool) -> None:
        """Stops resumable agents before their next turn.

        Args:
            now: True to abort pending model calls too.
        """
        self._suspending, self._now = True, self._now or now
        for rollout in self._resumable:
            self._gateway.suspend(rollout, now)

    def preempt(self) -> None:
        """Records that Slurm signalled the step, and suspends resumable agents immediately.

        Slurm sends several signals. Only the first one shows which rollouts were running a command. After it, no agent
        waits for the model.
        """
        if self.preempted:
            return
        self.preempted = self._suspending = self._now = True
        for rollout, sandbox in self._resumable.items():
            waits_for_model = self._gateway.suspend(rollout, now=True)
            if not waits_for_model or sandbox.busy:
                self._interrupted.add(rollout)

    @contextmanager
    def watching(self, rollout: str, sandbox: ApptainerSandbox) -> Iterator[None]:
        """Context manager that allows a rollout to be suspended while its agent runs. The rollout must be open at the
        gateway."""
        if self.folder is None:
            yield  # suspending is pointless without a directory for checkpoints
            return
        self._resumable[rollout] = sandbox
        try:
            if self._suspending:
                self._gateway.suspend(rollout, self._now)
            yield
        finally:
            del self._resumable[rollout]

    async def save(self, rollout: str, checkpoint: Checkpoint, sandbox: ApptainerSandbox) -> tuple[str, str]:
        """Takes a snapshot of the sandbox and publishes the checkpoint.

        Returns:
            The name of the checkpoint file and an empty string. On failure, an empty string and the reason.
        """
        assert self.folder is not None, "nothing else was suspended"
        if not checkpoint.turns:
            return "", "it had not begun"
        if rollout in self._interrupted or sandbox.busy:
            return "", "processes were at work in its sandbox"
        name = f"{self.owner}/{new_name(rollout)}"
        try:
            quota = self._rank_quota()
            await asyncio.to_thread(self._check_size, sandbox)
            checkpoint.note = checkout.read_note(sandbox)
            checkpoint.layer = await sandbox.snapshot(Path(sandbox.directory, "kept"))
            await asyncio.to_thread(checkpoint.write, self.folder / name, self._max_bytes, quota)
        except (SandboxError, OSError, ValueError, TypeError, OverflowError) as error:
            return "", str(error)
        return name, ""

    def _rank_quota(self) -> CheckpointQuota:
        """Returns the rank's quota, reduced by the checkpoints of its earlier starts. Creates the rank's directory.
        Raises OSError."""
        if self._quota is None:
            assert self.folder is not None, "nothing else was suspended"
            own = self.folder / self.owner
            own.mkdir(mode=0o700, exist_ok=True)
            used = 0
            for entry in os.scandir(own):
                with suppress(FileNotFoundError):  # deleted by another process that resumed from it
                    used += entry.stat().st_size
            self._quota = CheckpointQuota(max(0, self._max_rank_bytes - used))
        return self._quota

    def _check_size(self, sandbox: ApptainerSandbox) -> None:
        """Raises SandboxError if the sandbox's files are too large. Called before they are copied. Ignores unreadable
        files."""
        command = ["du", "-s", "-B1", "--", os.path.join(sandbox.directory, "layer", "upper")]  # handles deep trees
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.split()
        if output and int(output[0]) > self._max_bytes:
            raise SandboxError(f"its files take more than {self._max_bytes} bytes")

    async def load(self, name: str) -> Checkpoint | None:
        """Reads a checkpoint. Returns ``None`` if ``name`` is empty, or if the checkpoint is missing or damaged."""
        if not name or self.folder is None:
            return None
        try:
            return await asyncio.to_thread(Checkpoint.read, self.folder / name)
        except DamagedError as error:
            print(printable(f"{error}; the rollout restarts from the beginning"), file=sys.stderr)
            return None

    def remove(self, name: str) -> None:
        """Deletes a checkpoint that has been loaded, so that no other process uses it."""
        if name and self.folder is not None:
            with suppress(OSError):
                (self.folder / name).unlink()
