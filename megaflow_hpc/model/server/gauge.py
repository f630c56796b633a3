"""Measures one server's load: requests in flight, requests that wait, and for how long."""

from __future__ import annotations

import re

from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.server.load import Load
from megaflow_hpc.model.server.proxy import Proxy

QUEUES = re.compile(r"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
"""Matches the number of waiting requests in the metrics of vLLM and SGLang."""


class Gauge:
    """Measures one server's load between two readings."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._answered, self._at = 0, 0.0

    async def read(self, launch: Launch, now: float) -> Load:
        """Returns the load since the previous reading.

        Args:
            launch: The engine that the proxy is attached to.
            now: ``time.monotonic()``.
        """
        in_flight = self._proxy.in_flight
        waiting = max(0, in_flight - launch.slots) if launch.slots else 0
        if launch.metrics and (text := await self._proxy.metrics()):
            waiting = round(sum(float(value) for value in QUEUES.findall(text)))
        if self._proxy.tenants is not None:
            waiting += self._proxy.tenants.waiting
        answered, seconds = self._proxy.requests - in_flight - self._answered, now - self._at
        self._answered, self._at = self._proxy.requests - in_flight, now
        pace = max(answered, 1) / max(seconds, 1e-3)
        return Load(in_flight, waiting, round(waiting / pace, 1))
