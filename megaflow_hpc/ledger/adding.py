"""How blocks are added to a campaign that runs, once, whoever dies in between. Pure: no file is touched here.

A block's number is a name that one adder gets (``link``). So that a repeated call, or a second caller, finds what was
added before, a record ``ledger/added/<token>.0`` comes first, which one caller links: how the rollouts are cut, and at
which number the first block shall lie. All who have the token then link the same blocks at the same numbers. Where a
number is somebody else's, those that are left go to the number that the next record ``<token>.1`` names, and so on:
what is there never changes, so that every caller comes to the same places.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.calls import Link, Names, Read, Steps
from megaflow_hpc.ledger.names import FIRST_HANDED_OFF, TASKS, added_path, block_numbers, task_path
from megaflow_hpc.types import Rollout

TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
LOOKS = 10
"""At a file that is there, as a link to its name was refused, and cannot be read for a cache's sake."""


def add(blocks: Sequence[Sequence[Rollout]], token: str, private: str) -> Steps[list[int]]:
    """Adds blocks of rollouts, and returns their numbers. The same token adds the same blocks once.

    Args:
        blocks: how this caller cuts the rollouts; it counts if no other with this token was faster.
        private: names files of this call.

    Raises:
        LedgerError: the token is no name of a file, or was used for other rollouts.
    """
    if not TOKEN.match(token):
        raise LedgerError(f"token {token!r}: letters, digits and ._- alone; it names a file")
    rollouts = [rollout for block in blocks for rollout in block]
    if not rollouts:
        raise LedgerError(f"token {token}: no rollouts to add")
    about = {"rollouts": len(rollouts), "cut": [len(block) for block in blocks], "digest": digest(rollouts)}
    placed: list[int] = []
    said = yield from _agree(token, 0, about, private)
    if said["digest"] != about["digest"]:
        raise LedgerError(
            f"token {token}: {said['rollouts']} other rollouts were added with it; give each batch a token of its own"
        )
    ends = [sum(said["cut"][:n]) for n in range(len(said["cut"]) + 1)]
    for turn in count(1):
        first = int(said["first"]) - len(placed)
        for number in range(len(placed), len(ends) - 1):
            part = rollouts[ends[number] : ends[number + 1]]
            content = {"rollouts": [rollout.to_dict() for rollout in part], "added": [token, number]}
            if not (yield from _place(first + number, content, f"{private}.{number}.{turn}")):
                break
            placed.append(first + number)
        if len(placed) == len(ends) - 1:
            break
        said = yield from _agree(token, turn, {}, private)
    return placed


def digest(rollouts: Sequence[Rollout]) -> str:
    """Tells lists of rollouts apart."""
    return hashlib.sha256(json.dumps([rollout.to_dict() for rollout in rollouts]).encode()).hexdigest()[:16]


def _agree(token: str, turn: int, about: Mapping[str, Any], private: str) -> Steps[Mapping[str, Any]]:
    """Returns where the blocks that are left go, as the first who had this token said it."""
    path = added_path(token, turn)
    known = yield Read(path)
    if known is not None:
        return known
    numbers = [number for number in block_numbers((yield Names(TASKS))) if number < FIRST_HANDED_OFF]
    proposed = {**about, "first": max(numbers, default=-1) + 1}
    if (yield Link(path, proposed, f"{private}.{turn}")):
        return proposed
    return (yield from _seen(path))


def _place(number: int, content: Mapping[str, Any], private: str) -> Steps[bool]:
    """Links a block; whether it lies there, be it by another who has the token."""
    if (yield Link(task_path(number), content, private)):
        return True
    there = yield from _seen(task_path(number))
    return there.get("added") == content["added"]


def _seen(path: str) -> Steps[Mapping[str, Any]]:
    for _ in range(LOOKS):
        known = yield Read(path)
        if known is not None:
            return known
    raise LedgerError(f"{path}: is there and cannot be read; call again with the same token")
