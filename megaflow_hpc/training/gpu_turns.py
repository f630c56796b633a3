"""Alternates between a trainer and its policy's engine on shared GPUs (``slurm.trainer.share: sleep``).

    turns = GpuTurns(flow)
    turns.take(step.number)                      # the engine sleeps now
    ...                                          # move onto the GPUs, step, publish, move off them
    turns.give()                                 # the engine wakes and loads the published weights

Each rank of a distributed trainer has its own ``GpuTurns``. Call :meth:`GpuTurns.give` only after all ranks have moved
off the GPUs. If the campaign shares no GPUs, both methods do nothing.
"""

from __future__ import annotations

import os
import time

from megaflow_hpc.host.process import Identity
from megaflow_hpc.rundir.training import SharedGpu
from megaflow_hpc.training.dataflow import FIRST_POLL_S, MAX_POLL_S, SAY_INTERVAL_S, Dataflow


class GpuTurns:
    """Lets a trainer and its policy's engine use the same GPUs in turn."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self.shared = flow.record.config.slurm.trainer.share == "sleep"
        """True if the trainer and the engine share GPUs."""
        self._gpu = SharedGpu(flow.run, flow.policy)
        # If there are several ranks, use their parent process (torch's launcher), because it ends last.
        process = Identity.of(os.getppid() if flow.ranks > 1 else os.getpid())
        assert process is not None
        self._process = process

    def take(self, step: int) -> float:
        """Waits until the engine sleeps. Returns how many seconds the engine needed after the last turn to wake and
        load weights.

        Args:
            step: identifier of this turn. It must be the same on all ranks and different for each turn.

        Raises:
            LedgerError: a later trainer has taken over.
        """
        if not self.shared:
            return 0.0
        turn = f"{self._process}.{step}"
        began, pause, reported = time.monotonic(), FIRST_POLL_S, False
        if not self._flow.rank:
            self._flow.check()
            self._gpu.want(turn, self._process)
        while (turn_given := self._gpu.given(turn)) is None:
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)
            if not reported and time.monotonic() - began > SAY_INTERVAL_S:
                reported = True
                self._flow.tell(f"waits for the engine of {self._flow.policy} to release the GPUs")
        return turn_given.wake_s

    def give(self) -> None:
        """Releases the GPUs to the engine. Call this only after all ranks have moved off the GPUs."""
        if self.shared and not self._flow.rank:
            self._gpu.release()
