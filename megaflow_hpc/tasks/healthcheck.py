"""Waits until an environment is healthy, as Docker's HEALTHCHECK does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.types import Sandbox


async def wait_healthy(who: str, sandbox: Sandbox, check: Mapping[str, Any]) -> None:
    """Runs ``check["command"]`` until it succeeds; failures within the start period do not count.

    Args:
        who: named in the message.
        check: Harbor's ``[environment.healthcheck]``, times in seconds.

    Raises:
        SandboxError: it failed ``retries`` times.
    """
    started = time.monotonic()
    grace_s = float(check.get("start_period_sec", 0))
    retries = int(check.get("retries", 3))
    failures = 0
    while True:
        result = await sandbox.exec(str(check["command"]), timeout_s=float(check.get("timeout_sec", 30)))
        if result.exit_code == 0:
            return
        within = time.monotonic() - started < grace_s
        failures += not within
        if failures >= retries:
            raise SandboxError(
                f"task {who}: not healthy: {check['command']!r} gave {result.exit_code}: {result.stderr[-300:]}"
            )
        await asyncio.sleep(float(check.get("start_interval_sec" if within else "interval_sec", 5)))
