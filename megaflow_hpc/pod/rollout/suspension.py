"""The end of an allocation, as the rollouts of a runner meet it.

Agents that can be resumed are kept from their next turn: the gateway refuses it, the agent hands out its state, and
that is published with the sandbox's files and what was recorded (partial.py). Others go on while they may. What cannot
be kept as it was starts anew: a sandbox in which processes were left in the background, or in which a command ran when
Slurm signalled every process of the step.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.partial import Damaged, Partial, new_name
from megaflow_hpc.tasks import checkout


class Suspension:
    """
    Args:
        folder: where partial rollouts are published; ``None``: none are.
        limit: bytes of one.
    """

    def __init__(self, gateway: ModelGateway, folder: Path | None, limit: int) -> None:
        self._gateway, self._limit = gateway, limit
        self.folder = folder if limit else None
        self.preempted = False
        """Slurm has signalled every process of the step: what ends from now on may have ended of that."""
        self._suspending = self._now = False
        self._at_work: dict[str, ApptainerSandbox] = {}
        """Rollouts whose agents can be resumed and run."""
        self._interrupted: set[str] = set()
        """Those that the signal found at work in their sandboxes."""

    @property
    def kind(self) -> str:
        """Of what ends an attempt now."""
        return "preemption" if self.preempted else "walltime" if self._suspending else ""

    def suspend(self, now: bool) -> None:
        """Keeps agents from their next turn; with ``now`` a model call that no engine has answered is given up."""
        self._suspending, self._now = True, self._now or now
        for rollout in self._at_work:
            self._gateway.suspend(rollout, now)

    def preempt(self) -> None:
        """The step was signalled."""
        self.preempted = self._suspending = self._now = True
        for rollout, sandbox in self._at_work.items():
            waiting = self._gateway.suspend(rollout, now=True)
            if not waiting or sandbox.busy:
                self._interrupted.add(rollout)

    @contextmanager
    def watching(self, rollout: str, sandbox: ApptainerSandbox) -> Iterator[None]:
        """While the agent of a rollout runs that can be resumed; it is open at the gateway."""
        if self.folder is None:
            yield  # it would be stopped for nothing
            return
        self._at_work[rollout] = sandbox
        try:
            if self._suspending:
                self._gateway.suspend(rollout, self._now)
            yield
        finally:
            del self._at_work[rollout]

    async def keep(self, rollout: str, partial: Partial, sandbox: ApptainerSandbox) -> tuple[str, str]:
        """Publishes a partial rollout: its file's name, or nothing and why it starts anew."""
        assert self.folder is not None, "nothing else was suspended"
        if not partial.turns:
            return "", "it had not begun"
        if rollout in self._interrupted or sandbox.busy:
            return "", "processes were at work in its sandbox"
        name = new_name(rollout)
        try:
            await asyncio.to_thread(self._check_size, sandbox)
            partial.note = checkout.note(sandbox)
            partial.layer = await sandbox.snapshot(Path(sandbox.directory, "kept"))
            await asyncio.to_thread(partial.write, self.folder / name, self._limit)
        except (SandboxError, OSError, ValueError, TypeError, OverflowError) as error:
            return "", str(error)
        return name, ""

    def _check_size(self, sandbox: ApptainerSandbox) -> None:
        """Before a large layer is copied in vain; what cannot be read counts for nothing here."""
        size = 0
        for place, _, files in os.walk(os.path.join(sandbox.directory, "layer", "upper")):
            for name in files:
                with suppress(OSError):
                    size += os.lstat(os.path.join(place, name)).st_blocks * 512
            if size > self._limit:
                raise SandboxError(f"its files take more than {self._limit} bytes (scheduling.partial_mb)")

    async def read(self, name: str) -> Partial | None:
        """A partial rollout to go on with; ``None`` where that is not to be had."""
        if not name or self.folder is None:
            return None
        try:
            return await asyncio.to_thread(Partial.read, self.folder / name)
        except Damaged as error:
            print(f"{error}; the rollout starts anew", file=sys.stderr)
            return None

    def used(self, name: str) -> None:
        """Removes a partial rollout that somebody has begun with."""
        if name and self.folder is not None:
            with suppress(OSError):
                (self.folder / name).unlink()
