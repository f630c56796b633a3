"""Argument types shared by several verbs. Errors for invalid values state the expected form."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from megaflow_hpc.rundir.budget import LIMITS

ROLES = ("pods", "servers", "trainer", "gather")
"""Kinds of jobs in a campaign, named as in the section ``slurm``."""


def whole(least: int = 0) -> Callable[[str], int]:
    """Returns an argument type for integers of at least ``least``."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least {least}")
        return int(text)

    return read


def above_zero(text: str) -> float:
    """Parses a positive number, such as a time in seconds.

    Raises:
        ArgumentTypeError: The text is not a positive number.
    """
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def zero_or_more(text: str) -> float:
    """Parses a non-negative number.

    Raises:
        ArgumentTypeError: The text is not a non-negative number.
    """
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 0")
    return value


def share(text: str) -> tuple[int, int]:
    """Parses a share such as ``3/16``, the third of sixteen, into ``(3, 16)``.

    Raises:
        ArgumentTypeError: The text has another form, or the share does not exist.
    """
    number, _, shares = text.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{text}: give a share and the number of shares, from 1/16 to 16/16")
    return int(number), int(shares)


def limit(text: str) -> tuple[str, float | None]:
    """Parses the value of ``--limit``, such as ``core_hours=100`` or ``wall=none``.

    Raises:
        ArgumentTypeError: The limit is unknown, or the hours are not a number.
    """
    name, _, hours = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(LIMITS[:-1])} or {LIMITS[-1]}, as wall=24")
    if hours == "none":
        return name, None
    try:
        return name, above_zero(hours)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text}: expected hours above 0, as {name}=100, or {name}=none") from None


def request(key: str) -> Callable[[str], tuple[str, str, str | float | None]]:
    """Returns the argument type of ``--time``, ``--mem`` and ``--partition``: ``8:00:00`` or ``servers=8:00:00``.

    Args:
        key: The requested quantity: ``time``, ``mem_gb`` or ``partition``. The parsed value is ``(role, key, value)``.
    """

    def read(text: str) -> tuple[str, str, str | float | None]:
        role, separator, value = text.rpartition("=")
        role = role if separator else "pods"
        if role not in ROLES:
            raise argparse.ArgumentTypeError(f"{text}: expected a value, or {', '.join(f'{r}=…' for r in ROLES)}")
        if value == "none":
            return role, key, None
        return role, key, above_zero(value.removesuffix("G").removesuffix("GB")) if key == "mem_gb" else value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
