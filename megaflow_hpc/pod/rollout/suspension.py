"""The end of an allocation, as the rollouts of a runner meet it.

Agents that can be resumed are kept from their next turn: the gateway refuses it, the agent hands out its state, and
that is published with the sandbox's files and what was recorded (partial.py). Others go on while they may. What cannot
be kept as it was starts anew: a sandbox in which processes were left in the background, or in which a command ran when
Slurm signalled every process of the step.
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
from megaflow_hpc.pod.rollout.partial import Damaged, Partial, Room, new_name
from megaflow_hpc.tasks import checkout
from megaflow_hpc.texts import printable

PARTIAL_BYTES = 256 * 10**6
"""Maximum size of one partial rollout. The rollout starts anew if its sandbox's files take more."""
PARTIAL_TOTAL_BYTES = 200e9
"""Maximum size of all partial rollouts of a campaign. Each worker rank may use an equal part."""


class Suspension:
    """Keeps the rollouts of a runner when its allocation ends, and reads those that were kept.

    Args:
        folder: Directory for partial rollouts. ``None``: keep none.
        limit: Maximum number of bytes of one partial rollout.
        total: Maximum number of bytes of all that this rank keeps, its earlier starts included.
    """

    def __init__(self, gateway: ModelGateway, folder: Path | None, limit: int, total: float = math.inf) -> None:
        self._gateway, self._limit, self._total = gateway, limit, total
        self.folder = folder
        self.owner = "0"
        """Name of this rank's own directory there, the same in every start of it."""
        self._room: Room | None = None
        self.preempted = False
        """Whether Slurm has signalled every process of the step: what ends from now on may have ended of that."""
        self._suspending = self._now = False
        self._at_work: dict[str, ApptainerSandbox] = {}
        """Rollouts whose agents can be resumed and run."""
        self._interrupted: set[str] = set()
        """Those that the signal found at work in their sandboxes."""

    @property
    def kind(self) -> str:
        """Error kind of an attempt that is ended now: ``preemption``, ``walltime``, or empty."""
        return "preemption" if self.preempted else "walltime" if self._suspending else ""

    def suspend(self, now: bool) -> None:
        """Keeps agents from their next turn; with ``now`` a model call that no engine has answered is given up."""
        self._suspending, self._now = True, self._now or now
        for rollout in self._at_work:
            self._gateway.suspend(rollout, now)

    def preempt(self) -> None:
        """Takes note that Slurm signalled the step: agents are kept at once, and commands that ran are interrupted.

        Slurm signals more than once. Only the first time tells what ran: then nobody waits for a model any more.
        """
        if self.preempted:
            return
        self.preempted = self._suspending = self._now = True
        for rollout, sandbox in self._at_work.items():
            waiting = self._gateway.suspend(rollout, now=True)
            if not waiting or sandbox.busy:
                self._interrupted.add(rollout)

    @contextmanager
    def watching(self, rollout: str, sandbox: ApptainerSandbox) -> Iterator[None]:
        """The time in which the agent of a rollout runs that can be resumed; the rollout is open at the gateway."""
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
        """Publishes a partial rollout.

        Returns:
            Name of its file and nothing, or nothing and why the rollout starts anew.
        """
        assert self.folder is not None, "nothing else was suspended"
        if not partial.turns:
            return "", "it had not begun"
        if rollout in self._interrupted or sandbox.busy:
            return "", "processes were at work in its sandbox"
        name = f"{self.owner}/{new_name(rollout)}"
        try:
            room = self._kept()
            await asyncio.to_thread(self._check_size, sandbox)
            partial.note = checkout.read_note(sandbox)
            partial.layer = await sandbox.snapshot(Path(sandbox.directory, "kept"))
            await asyncio.to_thread(partial.write, self.folder / name, self._limit, room)
        except (SandboxError, OSError, ValueError, TypeError, OverflowError) as error:
            return "", str(error)
        return name, ""

    def _kept(self) -> Room:
        """Returns the room that this rank has beside what its earlier starts left there.

        Raises:
            OSError: the directory cannot be made or read.
        """
        if self._room is None:
            assert self.folder is not None, "nothing else was suspended"
            own = self.folder / self.owner
            own.mkdir(mode=0o700, exist_ok=True)
            used = 0
            for entry in os.scandir(own):
                with suppress(FileNotFoundError):  # somebody goes on with it
                    used += entry.stat().st_size
            self._room = Room(max(0, self._total - used))
        return self._room

    def _check_size(self, sandbox: ApptainerSandbox) -> None:
        """Before a large layer is copied in vain; what cannot be read counts for nothing here."""
        command = ["du", "-s", "-B1", "--", os.path.join(sandbox.directory, "layer", "upper")]  # trees of any depth
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.split()
        if said and int(said[0]) > self._limit:
            raise SandboxError(f"its files take more than {self._limit} bytes")

    async def read(self, name: str) -> Partial | None:
        """Reads a partial rollout to go on with; ``None`` where there is none, or it is damaged."""
        if not name or self.folder is None:
            return None
        try:
            return await asyncio.to_thread(Partial.read, self.folder / name)
        except Damaged as error:
            print(printable(f"{error}; the rollout starts anew"), file=sys.stderr)
            return None

    def remove(self, name: str) -> None:
        """Removes a partial rollout that somebody goes on with: a state is used once."""
        if name and self.folder is not None:
            with suppress(OSError):
                (self.folder / name).unlink()
