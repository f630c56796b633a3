"""Judges what an agent left: its processes gone first, the tests uploaded after, the reward from a fresh directory.

Harbor's contract: ``tests/`` → ``/tests``, run ``test.sh`` in the work directory, read ``/logs/verifier/reward.json``
or ``reward.txt``. A test that fails is a reward; only a verifier that gives none is an error.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field

from megaflow_hpc.types import Sandbox, Task

REWARD_LIMIT = 65536
"""Bytes of a reward file; more is garbage."""


@dataclass(frozen=True)
class Verdict:
    """``error`` is empty exactly when there is a reward; ``output`` is what the tests printed, bounded."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    output: str = ""
    error: str = ""


async def verify(task: Task, sandbox: Sandbox) -> Verdict:
    """Runs the task's tests in the agent's sandbox.

    Whatever the agent put at ``/tests`` and ``/logs/verifier``, links too, is removed; its processes are killed
    before, so none can put it back.

    Raises:
        SandboxError: the sandbox was lost. What tests and rewards do wrong is in the verdict's ``error``.
    """
    harbor = task.metadata.get("harbor", {})
    await sandbox.kill_processes()
    # PATH as the image has it may hold directories the agent filled; these tools are looked up in the system's.
    cleaned = await sandbox.exec(
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin; if [ -L /logs ] || [ ! -d /logs ]; then rm -rf /logs; fi; "
        "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier",
        cwd="/",
        timeout_s=60,
    )
    if cleaned.exit_code:
        return Verdict(error=f"/tests and /logs/verifier cannot be cleared: {cleaned.stderr.strip()[-300:]}")
    await sandbox.upload(os.path.join(task.path, "tests"), "/tests")
    result = await sandbox.exec(
        ["bash", "/tests/test.sh"],
        cwd=task.workdir or None,
        env=dict(harbor.get("verifier_env", {})),
        timeout_s=task.verifier_timeout_s,
    )
    output = result.stdout + (f"\n--- stderr ---\n{result.stderr}" if result.stderr else "")
    if result.timed_out:
        return Verdict(output=output, error=f"tests/test.sh ran longer than its {task.verifier_timeout_s:g} s")
    try:
        rewards = await _read_rewards(sandbox)
    except ValueError as error:
        return Verdict(output=output, error=f"{error} (tests/test.sh ended with {result.exit_code})")
    reward = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
    return Verdict(reward=reward, rewards=rewards, output=output)


async def _read_rewards(sandbox: Sandbox) -> dict[str, float]:
    """``reward.json`` before ``reward.txt``, as Harbor; raises :class:`ValueError` with what is wrong."""
    for name in ("reward.json", "reward.txt"):
        path = f"/logs/verifier/{name}"
        # No link is followed: tests write a plain file.
        script = (
            f"[ -e {path} ] || exit 3; [ -f {path} ] && [ ! -L {path} ] || exit 4; head -c {REWARD_LIMIT + 1} {path}"
        )
        read = await sandbox.exec(script, cwd="/", timeout_s=60)
        if read.exit_code == 3:
            continue
        if read.exit_code or read.timed_out:
            raise ValueError(f"{path}: not a plain file that can be read")
        if len(read.stdout_bytes) > REWARD_LIMIT:
            raise ValueError(f"{path}: larger than {REWARD_LIMIT} bytes")
        return parse_rewards(name, read.stdout)
    raise ValueError("no reward: neither /logs/verifier/reward.txt nor reward.json was written")


def parse_rewards(name: str, text: str) -> dict[str, float]:
    """Named rewards of a reward file's text; a bare number is called ``reward``."""
    if not text.strip():
        raise ValueError(f"{name} is empty; expected a number")
    if name.endswith(".txt"):
        try:
            value: object = float(text)
        except ValueError:
            raise ValueError(f"{name} holds {text.strip()[:80]!r}; expected a number") from None
    else:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} is not JSON ({error})") from None
    named = value if isinstance(value, dict) else {"reward": value}
    if not named:
        raise ValueError(f"{name} names no reward")
    rewards: dict[str, float] = {}
    for key, number in named.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{name}: {key} is {number!r}; expected a finite number")
        rewards[str(key)] = float(number)
    return rewards
