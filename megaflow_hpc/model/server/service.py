"""A service of the whole campaign: an element of the engine array that runs a program in a sandbox.

It registers under ``RUN/endpoints`` and exits like an engine server. Each start of the program has its own key, so
rollouts notice if the program was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import ssl
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.services.remote import ServiceListener
from megaflow_hpc.environments.services.running import RunningService
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.server.proxy import make_context
from megaflow_hpc.model.server.registration import Assignment, Registration
from megaflow_hpc.model.server.server import MAX_MISSING_POLLS, MAX_STARTS, STEADY_S
from megaflow_hpc.rundir.endpoints import Load
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.texts import printable
from megaflow_hpc.types import Service


class ServiceServer:
    """Runs one service of a campaign until it has to exit.

    Args:
        run: The campaign's run directory.
        what: Name of this server.
        record: The service's record in run.json, with ``image_file`` and the limits in ``sandbox``.
        poll_s: Seconds between polls of the run directory.
        beat_s: Seconds between heartbeats.
        backoff_s: Seconds before a failed service starts again. The third start waits five times as long.
    """

    def __init__(
        self, run: RunDir, what: Assignment, record: dict[str, Any], poll_s: float, beat_s: float, backoff_s: float
    ) -> None:
        self._run, self._what, self._poll_s, self._beat_s, self._backoff_s = run, what, poll_s, beat_s, backoff_s
        self._service = Service.from_dict(record)
        self._spec = SandboxSpec(
            image=record["image_file"],
            env=self._service.env,
            workdir=self._service.workdir,
            user=self._service.user,
            network="gateway",
            **record["sandbox"],
        )
        self._leave = asyncio.Event()
        self._steady = False
        """True if the latest start served for a while."""

    async def run(self) -> int:
        """Serves until the server has to exit. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            loop.add_signal_handler(number, self._leave.set)
        private = Path(tempfile.mkdtemp(prefix="megaflow-"))
        watcher = asyncio.create_task(self._watch())
        try:
            Registration(self._run, self._what).check_address()
            tls = None
            if os.environ.get("MEGAFLOW_TLS", "1") != "0":
                tls = make_context(private)
            async with ApptainerProvider() as provider:
                return await self._keep_running(provider, tls)
        except ConfigError as error:
            self._say(f"giving up: {error}")
            Registration(self._run, self._what).failed(str(error), lasting=True)
            return error.exit_status
        finally:
            watcher.cancel()
            remove_tree(private, ignore_errors=True)

    async def _keep_running(self, provider: ApptainerProvider, tls: tuple[ssl.SSLContext, str] | None) -> int:
        failures = 0
        while not self._leave.is_set():
            files = Registration(self._run, self._what)
            self._steady = False
            try:
                await self._serve(provider, files, tls)
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._backoff_s * (1 if failures == 1 else 5)):
                    await self._leave.wait()
        Registration(self._run, self._what).leave()
        return 0

    async def _serve(
        self, provider: ApptainerProvider, files: Registration, tls: tuple[ssl.SSLContext, str] | None
    ) -> None:
        """Runs the service once. Returns when the server has to exit.

        Raises:
            SandboxError: The service ended, or did not become healthy.
        """
        context, fingerprint = tls or (None, "")
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
                    next_beat = time.monotonic() + self._beat_s
                    with contextlib.suppress(OSError):  # unreachable file system; the next heartbeat retries
                        files.beat(0, None, Load(), "")
                await asyncio.wait(
                    {leaving, running.program}, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED
                )
                self._steady = time.monotonic() - began > STEADY_S
                if running.program.done():
                    raise running.error(running.program.result())
        finally:
            files.unregister()
            listener.stop()
            for task in (leaving, healthy):
                task.cancel()
            await running.stop()

    async def _watch(self) -> None:
        """Makes the server exit when the campaign ends or its directory has been deleted."""
        marks, missing = Marks(self._run), 0
        while not self._leave.is_set():
            await asyncio.sleep(self._poll_s)
            missing = 0 if self._run.run_json.exists() else missing + 1
            if marks.over or missing >= MAX_MISSING_POLLS:
                self._leave.set()

    def _say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        print(printable(f"{stamp} [{self._what.name}] {text}"), file=sys.stderr, flush=True)
