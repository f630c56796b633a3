"""A trainer's turns on GPUs that it shares with its policy's engine (``slurm.trainer.share: sleep``).

    turns = GpuTurns(flow)
    turns.take(step.number)                      # the engine sleeps now
    ...                                          # move onto the GPUs, step, publish, move off them
    turns.give()                                 # it wakes, and loads what was published

Each rank of a distributed trainer has turns of its own; what none of them may do before all have moved off is
:meth:`GpuTurns.give`. Where the campaign shares nothing, both do nothing.
"""

from __future__ import annotations

import os
import time

from megaflow_hpc.host.process import Identity
from megaflow_hpc.rundir.training import SharedGpu
from megaflow_hpc.training.dataflow import SAY_INTERVAL_S, Dataflow

FIRST_S, LOOK_S = 0.05, 0.5
"""Seconds between two looks whether the engine sleeps: at first, and at most; each is twice as late as the last."""


class GpuTurns:
    """Takes the GPUs for this rank of a dataflow, and gives them back."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        planned = flow.record.config if flow.record.campaign else None
        self.shared = planned is not None and planned.slurm.trainer.share == "sleep"
        """Whether there is anything to take turns on."""
        self._gpu = SharedGpu(flow.run, flow.policy)
        # Of several ranks it is their parent, torch's launcher, that ends last.
        process = Identity.of(os.getppid() if flow.ranks > 1 else os.getpid())
        assert process is not None
        self._process = process

    def take(self, step: int) -> float:
        """Waits until the engine sleeps; returns the seconds in which it woke and loaded weights after the turn before.

        Args:
            step: which use it is for; the same in all ranks, and another one each time.

        Raises:
            LedgerError: a later trainer goes on.
        """
        if not self.shared:
            return 0.0
        turn, began, pause, said = f"{self._process}.{step}", time.monotonic(), FIRST_S, False
        if not self._flow.rank:
            self._flow.check()
            self._gpu.want(turn, self._process)
        while (given := self._gpu.given(turn)) is None:
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            if not said and time.monotonic() - began > SAY_INTERVAL_S:
                said = True
                self._flow.tell(f"waits for the engine of {self._flow.policy} to leave the GPUs to it")
        return given.wake_s

    def give(self) -> None:
        """Leaves the GPUs to the engine. Call it once no rank has anything on them."""
        if self.shared and not self._flow.rank:
            self._gpu.release()
