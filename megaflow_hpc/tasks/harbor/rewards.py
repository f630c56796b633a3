"""Reward files: read from a directory on the host, whatever the sandbox made of it, and checked before they count."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

from megaflow_hpc.types import Artifact

REWARD_LIMIT = 65536
"""Bytes of a reward file; more is garbage."""
MOST_REWARDS = 64
LONGEST_NAME = 100
"""Each name becomes a column of every trajectory."""
LARGEST = 3.4028234663852886e38
"""Rewards are stored as float32."""

REWARD_FILES = ("reward.json", "reward.txt")
"""In Harbor's order."""

LOGS_LIMIT = 1 << 20
MOST_LOGS = 64


def read_rewards(logs: Path) -> dict[str, float]:
    """Reads the named rewards of ``/logs/verifier``.

    Raises:
        ValueError: there is none, or no finite number; says what is wrong.
    """
    for name in REWARD_FILES:
        data = read_plain(logs, name, REWARD_LIMIT + 1)
        if data is None:
            continue
        if len(data) > REWARD_LIMIT:
            raise ValueError(f"/logs/verifier/{name}: larger than {REWARD_LIMIT} bytes")
        return parse_rewards(name, data.decode("utf-8", "replace"))
    raise ValueError("no reward: neither /logs/verifier/reward.txt nor reward.json was written")


def read_plain(directory: Path, name: str, limit: int) -> bytes | None:
    """Reads the first ``limit`` bytes of a regular file; ``None`` if there is none.

    Raises:
        ValueError: it is a link, a pipe or a device, or cannot be read.
    """
    try:
        # O_NONBLOCK: a pipe must not hold us.
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"/logs/verifier/{name}: not a plain file that can be read ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"/logs/verifier/{name}: not a plain file that can be read")
        parts = []
        while limit > 0 and (part := os.read(descriptor, min(limit, 1 << 20))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_logs(logs: Path) -> list[Artifact]:
    """Reads the other plain files that the tests left in ``/logs/verifier``, as far as they are small."""
    found: list[Artifact] = []
    left = LOGS_LIMIT
    for name in sorted(os.listdir(logs)):
        if name in REWARD_FILES or len(found) >= MOST_LOGS:
            continue
        try:
            data = read_plain(logs, name, left + 1)
        except ValueError:
            continue
        if data and len(data) <= left:
            found.append(Artifact(f"verifier/{name}", data))
            left -= len(data)
    return found


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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON ({error})") from None
    named = value if isinstance(value, dict) else {"reward": value}
    if not named:
        raise ValueError(f"{name} names no reward")
    if len(named) > MOST_REWARDS:
        raise ValueError(f"{name} names {len(named)} rewards; at most {MOST_REWARDS} are kept")
    rewards: dict[str, float] = {}
    for key, number in named.items():
        if not key or len(key) > LONGEST_NAME or not key.isprintable():
            raise ValueError(
                f"{name}: a reward is called {key[:LONGEST_NAME]!r}; expected up to {LONGEST_NAME} characters"
            )
        rewards[key] = _number(name, key, number)
    return rewards


def _number(name: str, key: str, number: object) -> float:
    if not isinstance(number, int | float):
        raise ValueError(f"{name}: {key} is {str(number)[:80]!r}; expected a finite number")
    if isinstance(number, float) and math.isnan(number):
        raise ValueError(f"{name}: {key} is nan; expected a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{name}: {key} is beyond what 32 bits hold; expected a finite number")
    return float(number)
