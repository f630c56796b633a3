"""The trainer's side of GPUs that it shares with an engine, in a process that can be killed."""

from __future__ import annotations

import subprocess

from megaflow_hpc.host.process import Identity
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import GpuGrant, SharedGpu
from tests.support.serving import Servers, ask_engine
from tests.support.waiting import until


class Trainer:
    """A trainer in a process that can be killed."""

    def __init__(self, run: RunDir) -> None:
        (run.training / "default").mkdir(parents=True, exist_ok=True)
        self.gpu = SharedGpu(run, "default")
        self.process = subprocess.Popen(["sleep", "600"])
        found = Identity.of(self.process.pid)
        assert found is not None
        self.identity, self._turns = found, 0

    def want(self) -> str:
        self._turns += 1
        turn = f"{self.identity}.{self._turns}"
        self.gpu.want(turn, self.identity)
        return turn

    def take(self) -> GpuGrant:
        """Wait until the trainer has the GPUs."""
        turn = self.want()
        until(lambda: self.gpu.given(turn), "the GPUs are given", 30, 0.02)
        found = self.gpu.given(turn)
        assert found is not None
        return found

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


async def asleep(servers: Servers) -> bool:
    """Return whether the engine of the first server reports that it sleeps."""
    return bool((await ask_engine(servers, "/is_sleeping"))[1]["is_sleeping"])
