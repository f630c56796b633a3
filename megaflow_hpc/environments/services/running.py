"""Runs one service: its sandbox and program, health checks, and shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.services.forwarding import Dialer
from megaflow_hpc.errors import LimitError, SandboxError, ServiceError
from megaflow_hpc.types import ExecResult, Service

_MAX_OUTPUT_CHARACTERS = 1000
_FIRST_PAUSE_S = 0.1
"""Pause in seconds after a service's first health check. Later pauses double, up to the interval of the health
check."""
_OUTPUT_BYTES = 1 << 16
BUSY_S = 60.0
"""Seconds within which a service must respond after its rollout has ended. It may still be busy with the agent's
requests.
"""


@dataclass(frozen=True)
class PlannedService:
    """A service, and the specification of its sandbox."""

    service: Service
    spec: SandboxSpec


class RunningService:
    """Runs a service's program in a sandbox. The program starts immediately, and :meth:`stop` also stops the
    sandbox."""

    def __init__(self, service: Service, sandbox: ApptainerSandbox) -> None:
        self._service = service
        self.sandbox = sandbox
        self.dialer = Dialer(sandbox)
        self._output = bytearray()
        self.program = asyncio.create_task(self._run(service.command))
        """Task that ends with the service's program and returns the reason."""

    async def _run(self, command: Sequence[str]) -> str:
        words = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *command]
        try:
            ended: ExecResult = await self.sandbox.exec(words, on_output=self._keep)
        except LimitError as error:
            return str(error)
        except SandboxError as error:
            return f"its sandbox was lost: {error}"
        return f"its program ended with exit code {ended.exit_code}{f' ({ended.breach})' if ended.breach else ''}"

    def _keep(self, data: bytes) -> bool:
        self._output += data
        del self._output[:-_OUTPUT_BYTES]
        return True

    def error(self, why: str) -> ServiceError:
        """Returns an error that names the service, with the end of its output."""
        output = self._output.decode("utf-8", "replace").strip()[-_MAX_OUTPUT_CHARACTERS:]
        return ServiceError(f"service {self._service.name}: {why}; its output ends with: {output or '(nothing)'}")

    async def wait_healthy(self) -> None:
        """Checks the service until it is healthy.

        Raises:
            ServiceError: The service's program ended, or it did not become healthy in time.
        """
        check = self._service.health
        deadline = time.monotonic() + check.ready_s
        pause_s = min(_FIRST_PAUSE_S, check.interval_s)
        while True:
            problem = await self._problem()
            if self.program.done():
                raise self.error(f"{self.program.result()} before it was healthy")
            if not problem:
                return
            if time.monotonic() > deadline:
                raise self.error(f"not healthy after {check.ready_s:g} s: {problem}")
            await asyncio.wait([self.program], timeout=pause_s)
            pause_s = min(2 * pause_s, check.interval_s)

    async def _problem(self, or_unhealthy: bool = False) -> str:
        """Returns the reason why a health check failed, or an empty string if it succeeded.

        Args:
            or_unhealthy: Count any check that completes as a success, regardless of its exit code.
        """
        check = self._service.health
        if check.command:
            try:
                done = await self.sandbox.exec(list(check.command), timeout_s=check.timeout_s)
            except SandboxError as error:
                return str(error)
            if done.exit_code == 0 or (or_unhealthy and not done.timed_out):
                return ""
            words = (done.stderr or done.stdout).strip()[-300:]
            return f"its health check ended with {done.exit_code}: {words}"
        for port in self._service.ports:
            try:
                async with asyncio.timeout(check.timeout_s):
                    connection = await self.dialer.connect(port)
            except (OSError, SandboxError, TimeoutError) as error:
                return f"port {port} accepts no connection ({error})"
            connection.close()
        return ""

    async def check_alive(self) -> None:
        """Checks that the service's program is running and responds.

        An unhealthy service counts as alive, because the agent may have caused this, by mistake or to avoid a verdict.

        Raises:
            ServiceError: Its program or its sandbox has ended, or it has not answered for :data:`BUSY_S`.
        """
        deadline, check = time.monotonic() + BUSY_S, self._service.health
        if not self.program.done():  # the container reports ends in order, so this shows whether the program has ended
            with suppress(SandboxError):
                await self.sandbox.exec("true", timeout_s=BUSY_S)
            await asyncio.sleep(0)
        while not self.program.done() and (problem := await self._problem(or_unhealthy=True)):
            if time.monotonic() > deadline:
                raise self.error(f"it did not answer when the rollout had ended: {problem}")
            await asyncio.wait([self.program], timeout=check.interval_s)
        if self.program.done():
            raise self.error(f"{self.program.result()} while the rollout ran")

    async def stop(self) -> None:
        """Ends the service and removes its files."""
        self.dialer.close()
        try:
            await self.sandbox.stop()
        finally:
            self.program.cancel()
