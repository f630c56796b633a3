"""Waits until an environment is healthy, as Docker's HEALTHCHECK does."""

from __future__ import annotations

import asyncio
import time

from megaflow_hpc.errors import SetupError
from megaflow_hpc.tasks.harbor.data import Healthcheck
from megaflow_hpc.types import Sandbox


async def wait_healthy(who: str, sandbox: Sandbox, check: Healthcheck) -> None:
    """Runs the check's command until it succeeds. Failures within the start period do not count.

    Args:
        who: name of the task or step for the message.
        sandbox: the sandbox to check.
        check: the check; without a command, returns at once.

    Raises:
        SetupError: it failed ``retries`` times.
    """
    if not check.command:
        return
    started = time.monotonic()
    failures = 0
    while True:
        result = await sandbox.exec(check.command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            raise SetupError(
                f"task {who}: not healthy: {check.command!r} ended with {result.exit_code}: {result.stderr[-300:]}"
            )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
