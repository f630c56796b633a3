"""A service of the whole campaign: an element of the engine array that runs a program in a sandbox.

It registers under ``RUN/endpoints`` and exits like an engine server. Each start of the program has its own key, so
rollouts notice if the program was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import ssl
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.services.remote import ServiceListener
from megaflow_hpc.environments.services.running import RunningService
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.model.server.registration import Assignment, Registration
from megaflow_hpc.model.server.server import MAX_STARTS, STEADY_S, ElementServer
from megaflow_hpc.rundir.endpoints import Load
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Service


class ServiceServer(ElementServer):
    """Runs one service of a campaign until it has to exit. Takes the arguments of :class:`ElementServer`.

    Args:
        record: The service's record in run.json, with ``image_file`` and the limits in ``sandbox``.
    """

    def __init__(
        self, run: RunDir, what: Assignment, record: dict[str, Any], poll_s: float, beat_s: float, backoff_s: float
    ) -> None:
        super().__init__(run, what, poll_s, beat_s, backoff_s)
        self._service = Service.from_dict(record)
        self._spec = SandboxSpec(
            image=record["image_file"],
            env=self._service.env,
            workdir=self._service.workdir,
            user=self._service.user,
            network="gateway",
            **record["sandbox"],
        )
        self._steady = False
        """True if the latest start served for a while."""

    async def _serve(self, private: Path, context: ssl.SSLContext | None, fingerprint: str) -> int:
        failures = 0
        async with ApptainerProvider() as provider:
            while not self._leave.is_set():
                files = Registration(self.run_dir, self.what)
                self._steady = False
                try:
                    await self._run_service(provider, files, context, fingerprint)
                    return 0
                except SandboxError as error:
                    failures = 1 if self._steady else failures + 1
                    why = f"start {failures} of {MAX_STARTS}: {error}"
                    self._say(why)
                    if failures >= MAX_STARTS:
                        files.failed(str(error), lasting=False)
                        return 1
                    files.starts_again(why)
                finally:
                    files.unregister()
                await self._leaves_before_start(failures)
        Registration(self.run_dir, self.what).leave()
        return 0

    async def _run_service(
        self, provider: ApptainerProvider, files: Registration, context: ssl.SSLContext | None, fingerprint: str
    ) -> None:
        """Runs the service once. Returns when the server has to exit.

        Raises:
            SandboxError: The service ended, or did not become healthy.
        """
        service = self._service
        running = RunningService(service, await provider.start(self._spec))
        key = secrets.token_hex(32)
        listener = ServiceListener(key, service.ports, running.dialer)
        leaving = asyncio.create_task(self._leave.wait())
        healthy = asyncio.create_task(running.wait_healthy())
        try:
            await asyncio.wait({leaving, healthy}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                return
            healthy.result()
            await listener.start(context)
            url = files.register_service(listener.port, key, fingerprint)
            self._say(f"serving at {url}")
            began, next_beat = time.monotonic(), -math.inf
            while not self._leave.is_set():
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self.beat_s
                    with contextlib.suppress(OSError):  # unreachable file system; the next heartbeat retries
                        files.beat(0, None, Load(), "")
                await asyncio.wait({leaving, running.program}, timeout=self.beat_s, return_when=asyncio.FIRST_COMPLETED)
                self._steady = time.monotonic() - began > STEADY_S
                if running.program.done():
                    raise running.error(running.program.result())
        finally:
            files.unregister()
            listener.stop()
            for task in (leaving, healthy):
                task.cancel()
            await running.stop()
