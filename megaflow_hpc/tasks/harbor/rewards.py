"""Reads and validates reward files from a host directory to which programs in the sandbox may have written anything."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaflow_hpc.host.files import open_directory
from megaflow_hpc.types import MAX_REWARD, ONLY_PARTS, Artifact, main_reward, whole_rewards

MAX_REWARD_BYTES = 65536
"""Maximum size of a reward file in bytes."""
MAX_REWARD_COUNT = 64
"""Maximum number of rewards in a file, not counting the rewards of turns."""
MAX_NAME_LENGTH = 100
"""Maximum length of a reward name in characters. Names become columns of the trajectory file."""

REWARD_FILES = ("reward.json", "reward.txt")
"""Reward files in Harbor's order of precedence."""

LOGS_LIMIT = 1 << 20
MAX_LOGS = 64
MAX_LOG_ENTRIES = 10_000
"""Maximum number of entries in ``/logs/verifier`` to inspect."""


def read_rewards(logs: Path) -> dict[str, float]:
    """Reads the named rewards from ``/logs/verifier``.

    Raises:
        ValueError: The reward is missing or not a finite number, or the two files disagree. Also raised if a file has
            no reward for the whole rollout.
    """
    by_file: dict[str, dict[str, float]] = {}
    with _open_logs(logs) as directory:
        for name in REWARD_FILES:
            data = _read_plain(directory, name, MAX_REWARD_BYTES)
            if data is not None:
                by_file[name] = parse_rewards(name, data.decode("utf-8", "replace"))
    if not by_file:
        raise ValueError("no reward: neither /logs/verifier/reward.txt nor reward.json was written")
    named = list(by_file.values())
    first, last = main_reward(named[0]), main_reward(named[-1])
    if first is None or last is None:
        raise ValueError(ONLY_PARTS)
    if not math.isclose(first, last, rel_tol=1e-6):
        raise ValueError(f"reward.json says {first:g} and reward.txt {last:g}")
    return next(iter(by_file.values()))


def read_logs(logs: Path) -> list[Artifact]:
    """Reads the other small regular files in ``/logs/verifier``."""
    artifacts: list[Artifact] = []
    left = LOGS_LIMIT
    with contextlib.suppress(ValueError), _open_logs(logs) as directory:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MAX_LOG_ENTRIES))
        for name in names:
            if name in REWARD_FILES or len(artifacts) >= MAX_LOGS:
                continue
            with contextlib.suppress(ValueError):
                if data := _read_plain(directory, name, left):
                    artifacts.append(Artifact(f"verifier/{name}", data))
                    left -= len(data)
    return artifacts


@contextlib.contextmanager
def _open_logs(logs: Path) -> Iterator[int]:
    """Opens the log directory, even if the tests have changed its mode."""
    try:
        directory = open_directory(str(logs))
    except OSError as error:
        raise ValueError(f"/logs/verifier: cannot be read ({error.strerror})") from None
    try:
        yield directory
    finally:
        os.close(directory)


def _read_plain(directory: int, name: str, limit: int) -> bytes | None:
    """Reads a regular file. Returns ``None`` if it is missing.

    Raises:
        ValueError: The file is larger than ``limit`` bytes, is a symlink, FIFO or device, or cannot be read.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"/logs/verifier/{name}: not a plain file that can be read ({error.strerror})") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"/logs/verifier/{name}: not a plain file that can be read")
        if status.st_size > limit:  # checked first, because a sparse file can be arbitrarily large
            raise ValueError(f"/logs/verifier/{name}: larger than {limit} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def parse_rewards(name: str, text: str) -> dict[str, float]:
    """Parses a reward file into rewards by name. A bare number is named ``reward``."""
    if not text.strip():
        raise ValueError(f"{name} is empty; expected a number")
    if name.endswith(".txt"):
        try:
            value: object = float(text)
        except ValueError:
            raise ValueError(f"{name} holds {text.strip()[:80]!r}; expected a number") from None
    else:
        try:
            value = json.loads(text, object_pairs_hook=_object)
        except _DuplicateKey as error:
            raise ValueError(f"{name} names {str(error)[:MAX_NAME_LENGTH]!r} twice") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON ({error})") from None
    named: dict[str, Any] = value if isinstance(value, dict) else {"reward": value}
    if not named:
        raise ValueError(f"{name} names no reward")
    if (count := len(whole_rewards(named))) > MAX_REWARD_COUNT:
        raise ValueError(f"{name} names {count} rewards besides those of turns; at most {MAX_REWARD_COUNT} are kept")
    rewards: dict[str, float] = {}
    for key, number in named.items():
        if not key or len(key) > MAX_NAME_LENGTH or not key.isprintable():
            raise ValueError(
                f"{name}: a reward is called {key[:MAX_NAME_LENGTH]!r}; expected up to {MAX_NAME_LENGTH} characters"
            )
        rewards[key] = _number(name, key, number)
    return rewards


class _DuplicateKey(Exception):
    """A JSON object has a duplicate key, for which parsers may return different rewards."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise _DuplicateKey(key)
    return members


def _number(name: str, key: str, number: object) -> float:
    if not isinstance(number, int | float):
        shown = f"a {type(number).__name__}"  # not the value, because a list may be long
        if isinstance(number, str):
            shown = repr(number[:80])
        raise ValueError(f"{name}: {key} is {shown}; expected a finite number")
    if isinstance(number, float) and math.isnan(number):
        raise ValueError(f"{name}: {key} is nan; expected a finite number")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{name}: {key} is too large for 32 bits; expected a finite number")
    return float(number)
