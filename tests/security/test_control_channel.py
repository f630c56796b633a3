"""Attacks on the runner's output, from which the host reads how commands ended."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.pod.rollout.runner import log_briefly
from tests.support.sandboxes import Start

OPEN = "import os, time; pipe = os.open('/proc/1/fd/1', os.O_WRONLY); "
FLOODS = {
    "long numbers": "b'0 ' + b'9' * 4400 + b'\\n'",
    "no line end": "b'9' * 4096",
    "numbers of no worker": "b'77 0\\n' * 500",
    "workers that are not asked for": "b'0 up\\n1 dead\\n' * 300",
}


def python(program: str) -> list[str]:
    return ["python3", "-c", program]


@pytest.mark.parametrize(
    "bad", ["b'0 ' + b'9' * 4400", "b'9' * 70000 + b' 0'", "b'\\xff\\x00 7'", "b'0 1e4'", "b'-1 0'"]
)
async def test_a_line_that_is_no_answer_takes_none_with_it(start: Start, bad: str) -> None:
    """An answer that arrives in the same read is still handled."""
    program = (
        OPEN
        + f"bad = {bad}; os.write(pipe, bad + b'\\n'); os.write(pipe, bad[:3000] + b'\\n0 7\\n1 7\\n'); time.sleep(60)"
    )
    sandbox = await start()
    began = time.monotonic()
    code, seconds = (await sandbox.exec(python(program), timeout_s=50)).exit_code, time.monotonic() - began
    assert code == 7
    assert seconds < 40


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_its_sandbox_and_no_other(
    rootfs: str, scratch: Any, capfd: pytest.CaptureFixture[str], flood: str
) -> None:
    program = OPEN + f"data = {FLOODS[flood]}\nwhile True: os.write(pipe, data)"
    async with ApptainerProvider(scratch) as provider:
        async with (
            await provider.start(SandboxSpec(rootfs)) as one,
            await provider.start(SandboxSpec(rootfs)) as other,
        ):
            flooding = asyncio.create_task(one.exec(python(program), timeout_s=100))
            codes = set()
            while not flooding.done():
                codes.add((await other.exec("exit 5")).exit_code)
            flooded, after, others = await flooding, await one.exec("echo on"), codes
    assert (flooded.exit_code, flooded.timed_out) == (137, False)
    assert "filled its control channel" in flooded.stderr
    assert (after.exit_code, after.stdout, others) == (0, "on\n", {5})
    assert len(capfd.readouterr().err.splitlines()) <= 1


async def test_a_process_that_names_a_command_of_a_thousand_digits_is_limited_as_others(start: Start) -> None:
    hold = python("held = bytearray(300_000_000); import time; time.sleep(60)")
    sandbox = await start(memory_mb=100)
    words = ["env", "MEGAFLOW_COMMAND=" + "9" * 4400, *hold]
    ended = await sandbox.exec(words, timeout_s=50)
    assert (ended.exit_code, ended.timed_out) == (137, False)


async def test_a_callback_that_fails_again_and_again_is_logged_once_a_minute(capfd: pytest.CaptureFixture[str]) -> None:
    log_briefly(asyncio.get_running_loop())
    for number in range(1000):
        asyncio.get_running_loop().call_soon(int, f"no number {number}")
        await asyncio.sleep(0)
    (line,) = capfd.readouterr().err.splitlines()
    assert "no number 0" in line
