"""Lends a trained policy's engine GPUs to the trainer for each step (``slurm.trainer.share: sleep``).

::

    trainer   requests the GPUs ───────────► moves onto them, steps, publishes, moves off ─► ends its request
    server      └► holds calls, engine sleeps ─► grants them    engine wakes, loads the version, calls continue ◄┘

Trainer and server communicate through two files (:class:`~megaflow_hpc.rundir.training.SharedGpu`). The engine first
completes the calls in flight. New calls wait at the proxy, as they do while weights change. An engine that fails to
sleep or wake is killed, which also frees the GPUs, and restarted once they are free. If the server was killed, its
engine is restarted in the same way, with the newest weights.

vLLM's sleep mode (``vllm/entrypoints/serve/dev/sleep``) has two levels. Level 1 keeps the weights in host memory, level
2 discards them. After level 2, the server wakes the weights, loads them from their files, and then wakes the KV cache.
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
"""Timeout in seconds for going to sleep and for waking. Each moves up to a few hundred gigabytes."""
POLL_INTERVAL_S = 0.2
"""Seconds between polls of the trainer's file while the trainer has the GPUs."""


class Sleeper:
    """Puts one server's engine to sleep while the trainer has the GPUs.

    Args:
        gpu: The two files through which trainer and server communicate.
        level: vLLM's sleep level, 1 or 2.
        weights: Chooses and loads the weights of a woken engine.
        leave: Set when the server must exit.
        say: Writes a line to the server's log.
    """

    def __init__(
        self, gpu: SharedGpu, level: int, weights: WeightUpdater, leave: asyncio.Event, say: Callable[[str], None]
    ) -> None:
        self._gpu, self._level, self._weights, self._leave, self._say = gpu, level, weights, leave, say
        self._wake_s = 0.0

    async def until_free(self) -> None:
        """Lends the GPUs to the trainer while the trainer requests them. Call this while no engine is using the
        GPUs."""
        granted = ""
        while not self._leave.is_set() and (turn := self._gpu.wanted()):
            if turn != granted:
                with contextlib.suppress(OSError):  # retried in the next iteration
                    self._gpu.give(GpuGrant(turn, self._wake_s))
                    self._say("the trainer has the GPUs")
                    granted, self._wake_s = turn, 0.0
            await asyncio.sleep(POLL_INTERVAL_S)

    @contextlib.asynccontextmanager
    async def turn(self, proxy: Proxy) -> AsyncIterator[bool]:
        """Puts the engine to sleep while the trainer requests the GPUs. Held calls continue after the context ends.

        Yields:
            True if the engine has slept. After level 2, it then has the newest weights.

        Raises:
            ModelServiceError: The engine failed to sleep or wake, and must be killed.
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
                await asyncio.Event().wait()  # until cancelled, because the trainer may still have the GPUs
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
