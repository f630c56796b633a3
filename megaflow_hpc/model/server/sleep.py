"""The engine of a trained policy leaves its GPUs to the trainer for each step (``slurm.trainer.share: sleep``).

::

    trainer   wants the GPUs ────────────────► moves onto them, steps, publishes, moves off ─► wants them no more
    server        └► holds calls, engine sleeps ─► gives them        engine wakes, loads the version, calls go on ◄┘

Both speak through two files (:class:`~megaflow_hpc.rundir.training.SharedGpu`). Calls that come meanwhile wait at the
proxy, as they do while weights change; those that the engine is answering are answered first. An engine that does not
sleep or wake is ended, which frees the GPUs as well, and started anew when they are free: so is one whose server was
killed, with the newest weights.

vLLM's endpoints (``vllm/entrypoints/serve/dev/sleep``): level 1 keeps the weights in the host's memory, level 2
nowhere. After it weights are woken first, loaded from their files, and only then the KV cache is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from megaflow_hpc.model.server.proxy import Proxy, Serving
from megaflow_hpc.model.server.weight_updates import RELOADERS, WeightUpdater, post
from megaflow_hpc.rundir.training import GpuGrant, SharedGpu

MOVE_S = 300.0
"""Timeout in seconds of falling asleep and of waking: some hundred gigabytes to the host's memory and back."""
LOOK_S = 0.2
"""Seconds between two looks for the trainer's file while it has the GPUs."""


class Sleeper:
    """Puts one server's engine to sleep while the trainer has the GPUs.

    Args:
        gpu: Where trainer and server meet.
        level: vLLM's level of sleep, 1 or 2.
        leave: Set when the server is to leave.
        say: Gets a line for the server's log.
    """

    def __init__(
        self, gpu: SharedGpu, level: int, weights: WeightUpdater, leave: asyncio.Event, say: Callable[[str], None]
    ) -> None:
        self._gpu, self._level, self._weights, self._leave, self._say = gpu, level, weights, leave, say
        self._wake_s = 0.0

    async def until_free(self) -> None:
        """Gives the GPUs to the trainer as long as it wants them; call it while no engine of ours uses them."""
        given = ""
        while not self._leave.is_set() and (turn := self._gpu.wanted()):
            if turn != given:
                with contextlib.suppress(OSError):  # it is tried again
                    self._gpu.give(GpuGrant(turn, self._wake_s))
                    self._say("the trainer has the GPUs")
                    given, self._wake_s = turn, 0.0
            await asyncio.sleep(LOOK_S)

    @contextlib.asynccontextmanager
    async def turn(self, proxy: Proxy) -> AsyncIterator[bool]:
        """A context before which the engine sleeps for as long as the trainer wants the GPUs; calls go on behind it.

        Yields whether it slept; at level 2 it has woken with the newest weights.

        Raises:
            ModelServiceError: The engine does not sleep or wake, and must be ended.
        """
        if not self._gpu.wanted():
            yield False
            return
        async with proxy.hold(continued=False):
            began = time.monotonic()
            await post(proxy, f"/sleep?level={self._level}", {}, MOVE_S)
            self._say(f"asleep after {time.monotonic() - began:.1f} s")
            await self.until_free()
            if self._leave.is_set():
                await asyncio.Event().wait()  # to be cancelled; the trainer may yet have the GPUs
            began = time.monotonic()
            await self._wake(proxy)
            yield True
            self._wake_s = time.monotonic() - began
            self._say(f"awake after {self._wake_s:.1f} s")

    async def _wake(self, proxy: Proxy) -> None:
        if self._level == 1:
            await post(proxy, "/wake_up", {}, MOVE_S)
            return
        await post(proxy, "/wake_up?tags=weights", {}, MOVE_S)
        version = await asyncio.to_thread(self._weights.whole, self._weights.choose())
        await RELOADERS["vllm"](proxy, version, False)
        proxy.serving = Serving(version)
        await post(proxy, "/wake_up?tags=kv_cache", {}, MOVE_S)
