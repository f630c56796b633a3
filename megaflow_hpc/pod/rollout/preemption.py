"""Handles the end of an allocation for a runner's rollouts, by preemption or walltime.

Agents that can be resumed stop before their next turn. The gateway refuses that turn, and the agent returns its state.
The state is written to a checkpoint with the sandbox's files and the recording (checkpoint.py). Other rollouts continue
for as long as permitted. A rollout restarts from the beginning if its state is uncertain: background processes were
still running in its sandbox, or a command was running when Slurm signalled every process of the step.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.checkpoint import Checkpoint, CheckpointQuota, DamagedError, new_name
from megaflow_hpc.tasks import checkout
from megaflow_hpc.texts import printable

MAX_CHECKPOINT_BYTES = 256 * 10**6
"""Maximum size of one checkpoint. If a sandbox's files are larger, the rollout restarts from the beginning."""
MAX_CAMPAIGN_BYTES = 200e9
"""Maximum total size of a campaign's checkpoints. Each worker rank may use an equal share."""


class Preemption:
    """Writes checkpoints when a runner's allocation ends, and reads those of earlier allocations.

    Args:
        folder: directory for checkpoints. If ``None``, none are written.
        max_bytes: maximum size of one checkpoint.
        max_rank_bytes: maximum total size of this rank's checkpoints, including those of its earlier starts.
    """

    def __init__(
        self, gateway: ModelGateway, folder: Path | None, max_bytes: int, max_rank_bytes: float = math.inf
    ) -> None:
        self._gateway, self.folder = gateway, folder
        self._max_bytes, self._max_rank_bytes = max_bytes, max_rank_bytes
        self.owner = "0"
        """Name of this rank's directory in ``folder``. It is the same in every start of the rank."""
        self._quota: CheckpointQuota | None = None
        self.preempted = False
        """True once Slurm has signalled every process of the step. Processes that end afterwards may not have
        failed."""
        self._suspending = self._now = False
        self._resumable: dict[str, ApptainerSandbox] = {}
        """Running rollouts whose agents can be resumed, with their sandboxes."""
        self._interrupted: set[str] = set()
        """Rollouts whose sandbox was running a command when the signal arrived."""

    @property
    def kind(self) -> str:
        """Error kind of an attempt that ends now: ``preemption``, ``walltime``, or empty."""
        if self.preempted:
            return "preemption"
        return "walltime" if self._suspending else ""

    def suspend(self, now: bool) -> None:
        """Stops agents before their next turn. If ``now`` is true, also aborts pending model calls."""
        self._suspending, self._now = True, self._now or now
        for rollout in self._resumable:
            self._gateway.suspend(rollout, now)

    def preempt(self) -> None:
        """Records that Slurm signalled the step, and suspends agents immediately.

        Slurm sends several signals. Only the first one shows which rollouts were running a command, because afterwards
        no agent waits for the model.
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
        """Makes a rollout suspendable while its agent runs. The rollout must be open at the gateway."""
        if self.folder is None:
            yield  # without a directory for checkpoints, suspending is pointless
            return
        self._resumable[rollout] = sandbox
        try:
            if self._suspending:
                self._gateway.suspend(rollout, self._now)
            yield
        finally:
            del self._resumable[rollout]

    async def save(self, rollout: str, checkpoint: Checkpoint, sandbox: ApptainerSandbox) -> tuple[str, str]:
        """Publishes a checkpoint.

        Returns:
            The name of its file, or an empty name and the reason why the rollout restarts from the beginning.
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
        """Returns the quota left after the checkpoints of earlier starts. Creates the directory if needed. Raises
        OSError."""
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
        """Rejects a layer that is too large before it is copied. Ignores unreadable files."""
        command = ["du", "-s", "-B1", "--", os.path.join(sandbox.directory, "layer", "upper")]  # trees of any depth
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.split()
        if output and int(output[0]) > self._max_bytes:
            raise SandboxError(f"its files take more than {self._max_bytes} bytes")

    async def load(self, name: str) -> Checkpoint | None:
        """Reads a checkpoint. Returns ``None`` if it is missing or damaged."""
        if not name or self.folder is None:
            return None
        try:
            return await asyncio.to_thread(Checkpoint.read, self.folder / name)
        except DamagedError as error:
            print(printable(f"{error}; the rollout starts anew"), file=sys.stderr)
            return None

    def remove(self, name: str) -> None:
        """Deletes a checkpoint from which a rollout has resumed, so that no other process uses it."""
        if name and self.folder is not None:
            with suppress(OSError):
                (self.folder / name).unlink()
