"""Reward files: read from a directory on the host, whatever the sandbox made of it, and checked before they count."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.host.files import open_directory
from megaflow_hpc.tasks.formats import LARGEST
from megaflow_hpc.types import Artifact, Verdict

REWARD_LIMIT = 65536
"""Bytes of a reward file; more is garbage."""
MOST_REWARDS = 64
LONGEST_NAME = 100
"""Each name becomes a column of every trajectory."""

REWARD_FILES = ("reward.json", "reward.txt")
"""In Harbor's order."""

LOGS_LIMIT = 1 << 20
MOST_LOGS = 64
MOST_SEEN = 10_000
"""Entries of ``/logs/verifier`` that are looked at."""


def read_rewards(logs: Path) -> dict[str, float]:
    """Reads the named rewards of ``/logs/verifier``.

    Raises:
        ValueError: the reward is missing or not a finite number, or the two files disagree.
    """
    found: dict[str, dict[str, float]] = {}
    with _opened(logs) as directory:
        for name in REWARD_FILES:
            data = _read_plain(directory, name, REWARD_LIMIT)
            if data is not None:
                found[name] = parse_rewards(name, data.decode("utf-8", "replace"))
    if not found:
        raise ValueError("no reward: neither /logs/verifier/reward.txt nor reward.json was written")
    values = [Verdict.of(rewards).reward or 0.0 for rewards in found.values()]
    if not math.isclose(values[0], values[-1], rel_tol=1e-6):
        raise ValueError(f"reward.json says {values[0]:g} and reward.txt {values[-1]:g}")
    return next(iter(found.values()))


def read_logs(logs: Path) -> list[Artifact]:
    """Reads the other plain files that the tests left in ``/logs/verifier``, as far as they are small."""
    found: list[Artifact] = []
    left = LOGS_LIMIT
    with contextlib.suppress(ValueError), _opened(logs) as directory:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MOST_SEEN))
        for name in names:
            if name in REWARD_FILES or len(found) >= MOST_LOGS:
                continue
            with contextlib.suppress(ValueError):
                if data := _read_plain(directory, name, left):
                    found.append(Artifact(f"verifier/{name}", data))
                    left -= len(data)
    return found


@contextlib.contextmanager
def _opened(logs: Path) -> Iterator[int]:
    """A descriptor of the directory, whatever the tests made of its mode."""
    try:
        directory = open_directory(str(logs))
    except OSError as error:
        raise ValueError(f"/logs/verifier: cannot be read ({error.strerror})") from None
    try:
        yield directory
    finally:
        os.close(directory)


def _read_plain(directory: int, name: str, limit: int) -> bytes | None:
    """Reads a regular file; ``None`` if there is none.

    Raises:
        ValueError: it is larger than ``limit`` bytes, a link, a pipe or a device, or cannot be read.
    """
    try:
        # O_NONBLOCK: a pipe must not hold us.
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
        if status.st_size > limit:  # a sparse file can be as large as it likes
            raise ValueError(f"/logs/verifier/{name}: larger than {limit} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


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
            value = json.loads(text, object_pairs_hook=_once)
        except _Twice as error:
            raise ValueError(f"{name} names {str(error)[:LONGEST_NAME]!r} twice") from None
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


class _Twice(Exception):
    """A JSON object has a key twice, and who reads it chooses."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _Twice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return found


def _number(name: str, key: str, number: object) -> float:
    if not isinstance(number, int | float):
        said = repr(number[:80]) if isinstance(number, str) else f"a {type(number).__name__}"  # not what is in a list
        raise ValueError(f"{name}: {key} is {said}; expected a finite number")
    if isinstance(number, float) and math.isnan(number):
        raise ValueError(f"{name}: {key} is nan; expected a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{name}: {key} is beyond what 32 bits hold; expected a finite number")
    return float(number)
