"""Services shared on a node. The first process that needs one starts it, and the campaign's other processes connect to
it.

::

    SCRATCH/services/<campaign>/  NAME.lock   held by the process that runs the service
                                  NAME.json   its socket and key, once it is healthy
                                  NAME.failed reason why it did not become healthy

If that process ends, the kernel releases its lock, and another process starts the service again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.services.remote import Address, RemoteServices, ServiceListener
from megaflow_hpc.environments.services.running import PlannedService, RunningService
from megaflow_hpc.errors import MegaflowError, SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.locks import lock_file
from megaflow_hpc.host.private import private_directory
from megaflow_hpc.texts import printable

LOCK_POLL_S = 1.0
MAX_STARTS = 3
"""Rollouts fail after this many consecutive failed starts. The service is still restarted."""
STEADY_S = 60.0
"""A service that ran for at least this many seconds resets the count of consecutive failures."""
MAX_PAUSE_S = 60.0


class NodeServices(RemoteServices):
    """The services of this node for one campaign. Bound to the event loop of the first :meth:`prepare`.

    Args:
        campaign: Name of the campaign's directory below ``SCRATCH/services``.
    """

    def __init__(self, provider: ApptainerProvider | None, campaign: str) -> None:
        super().__init__()
        self._starts, self._campaign = provider, campaign
        self._hosting: dict[str, asyncio.Task[None]] = {}

    @property
    def _provider(self) -> ApptainerProvider:
        assert self._starts is not None, "a task with services has a sandbox"
        return self._starts

    @property
    def _directory(self) -> Path:
        return self._provider.scratch / "services" / self._campaign

    def prepare(self, planned: PlannedService) -> None:
        """Starts the service unless another process of the node runs it. If that process ends, takes over."""
        name = planned.service.name
        if name not in self._hosting:
            private_directory(private_directory(self._directory.parent) / self._campaign)
            self._hosting[name] = asyncio.create_task(self._host(planned))

    def address(self, name: str) -> Address | None:
        try:
            file: Mapping[str, Any] = json.loads((self._directory / f"{name}.json").read_bytes())
            return Address(file["url"], file["key"], "")
        except (OSError, ValueError, KeyError):
            return None

    def failed(self, name: str) -> str:
        try:
            return (self._directory / f"{name}.failed").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    async def close(self) -> None:
        """Ends the services that this process runs."""
        for task in self._hosting.values():
            task.cancel()
        await asyncio.gather(*self._hosting.values(), return_exceptions=True)

    async def _host(self, planned: PlannedService) -> None:
        name = planned.service.name
        while True:
            try:
                private_directory(self._directory)  # the janitor may have removed it
                lock = lock_file(self._directory / f"{name}.lock", timeout_s=0)
            except (SiteError, OSError):
                await asyncio.sleep(LOCK_POLL_S)
                continue
            try:
                self._forget(name)  # left by a killed process
                await self._keep_running(planned)
            except OSError as error:  # scratch is full, or the janitor has removed the directory
                print(printable(f"service {name}: {error}"), file=sys.stderr)
                await asyncio.sleep(LOCK_POLL_S)
            finally:
                self._forget(name)
                with contextlib.suppress(OSError):
                    os.unlink(self._directory / f"{name}.lock")
                os.close(lock)

    async def _keep_running(self, planned: PlannedService) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._serve(planned)
            except (MegaflowError, OSError) as error:
                self._forget(planned.service.name)
                steady = asyncio.get_running_loop().time() - began > STEADY_S
                failures = 1 if steady else failures + 1
                if failures >= MAX_STARTS:
                    write_atomic(self._directory / f"{planned.service.name}.failed", str(error), 0o600)
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0**failures))

    async def _serve(self, planned: PlannedService) -> None:
        """Runs the service once.

        Raises:
            SandboxError: The service ended, or did not become healthy.
        """
        service = planned.service
        running = RunningService(service, await self._provider.start(planned.spec))
        key = secrets.token_hex(32)
        listener = ServiceListener(key, service.ports, running.dialer)
        try:
            await running.wait_healthy()
            url = await listener.start_on_socket(Path(running.sandbox.directory) / "service")
            write_atomic(self._directory / f"{service.name}.json", json.dumps({"url": url, "key": key}), 0o600)
            with contextlib.suppress(OSError):
                os.unlink(self._directory / f"{service.name}.failed")
            raise running.error(await asyncio.shield(running.program))
        finally:
            self._forget(service.name, "json")
            listener.stop()
            await running.stop()

    def _forget(self, name: str, *kinds: str) -> None:
        for kind in kinds or ("json", "failed"):
            with contextlib.suppress(OSError):
                os.unlink(self._directory / f"{name}.{kind}")
