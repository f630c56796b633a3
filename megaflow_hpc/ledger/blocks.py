"""Blocks: immutable lists of rollouts, the unit that pods claim.

File-system operations grow with blocks, never with rollouts. A block is one JSON file ``RUN/tasks/<number>.json``.
Blocks are only ever added: by the plan, by ``resume --failed``, by pods that hand off, and by consumers of the rollouts
while the campaign runs.

*Adding once.* A block's number is a name that one process gets by a hard link. A repeated call, or a second process
with the same token, must find what the first one added. So a record ``ledger/added/<token>.0`` comes first, which one
process links: how the rollouts are cut, and the number of the first block. Every process that has the token then links
the same blocks at the same numbers. If a number is taken by other rollouts, the remaining blocks go to the number that
the next record ``<token>.1`` names, and so on. Records never change, so every process places the blocks alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Any

import msgspec

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.ledger.calls import Link, Names, Read, Steps
from megaflow_hpc.ledger.files import Files, passing
from megaflow_hpc.ledger.names import ADDED, FIRST_HANDED_OFF, TASKS, added_path, block_numbers, task_path
from megaflow_hpc.rundir.json_files import read_json
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout

MAX_BLOCK = 256
"""Most rollouts of a block. A lost pod costs the unfinished work of its block, a claim five metadata operations."""
WAVE_SHARE = 3
"""A block holds about 1/WAVE_SHARE of the work that an even split of the rest would give each pod. So blocks become
small towards the end, and no pod sits on a queue while other pods have nothing left (guided self-scheduling,
Polychronopoulos and Kuck 1987)."""
TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
MAX_LOOKS = 10
"""Readings of a file that exists, because a link to its name was refused, but that a cache does not show yet."""


@dataclass(frozen=True)
class Block:
    """Rollouts that are claimed together."""

    number: int
    rollouts: tuple[Rollout, ...]


class _BlockFile(msgspec.Struct):
    rollouts: tuple[Rollout, ...]


# --- cutting ---


def deal(work: Sequence[float], pods: int, longest_first: bool = False) -> list[list[int]]:
    """Returns which items go into each block, in the order in which blocks will be claimed.

    Blocks come in waves. A wave holds about 1/:data:`WAVE_SHARE` of the work that is left. If the longest items come
    first, each block of a wave gets every n-th item: otherwise the first pods would hold more long items than slots.

    Args:
        work: expected cost of each item; all 1 if unknown.
    """
    order = sorted(range(len(work)), key=lambda n: -work[n]) if longest_first else list(range(len(work)))
    blocks: list[list[int]] = []
    left, first = sum(work), 0
    while first < len(order):
        wave, cost, end = left / WAVE_SHARE, 0.0, first
        while end < len(order) and (end == first or cost + work[order[end]] <= wave or end - first < pods):
            cost += work[order[end]]
            end += 1
        size = end - first
        blocks_in_wave = max(1, pods) * math.ceil(size / max(1, pods) / MAX_BLOCK)
        blocks_in_wave = min(size, blocks_in_wave)
        if longest_first:
            blocks += [order[first + n : end : blocks_in_wave] for n in range(blocks_in_wave)]
        else:
            cuts = [first + size * n // blocks_in_wave for n in range(blocks_in_wave + 1)]
            blocks += [order[a:b] for a, b in pairwise(cuts)]
        left, first = left - cost, end
    return blocks


def split(
    rollouts: Sequence[Rollout],
    pods: int,
    size: int | None = None,
    expected_s: Callable[[Rollout], float] | None = None,
    whole: bool = True,
) -> list[tuple[Rollout, ...]]:
    """Cuts rollouts into blocks for ``pods`` pods, or of about ``size`` rollouts. The samples of a group stay together.

    Args:
        expected_s: orders the groups by their longest sample, the longest first.
        whole: whether groups stay whole even if there are fewer groups than pods.
    """
    groups = [list(samples) for _, samples in groupby(rollouts, key=lambda r: r.group_id)]
    if not whole and 0 < len(groups) < pods:
        parts = math.ceil(pods * WAVE_SHARE / len(groups))
        groups = [group[n::parts] for group in groups for n in range(min(parts, len(group)))]
    if size:
        largest_group = max((len(group) for group in groups), default=1)
        groups_in_block = max(1, size // largest_group)
        dealt = [list(range(n, min(n + groups_in_block, len(groups)))) for n in range(0, len(groups), groups_in_block)]
    elif expected_s is None:
        dealt = deal([len(group) for group in groups], pods)
    else:
        dealt = deal([sum(map(expected_s, group)) for group in groups], pods, longest_first=True)
    return [tuple(rollout for number in block for rollout in groups[number]) for block in dealt]


# --- writing ---


def write_blocks(
    run: RunDir,
    rollouts: Sequence[Rollout],
    pods: int = 1,
    size: int | None = None,
    expected_s: Callable[[Rollout], float] | None = None,
    whole: bool = True,
) -> list[int]:
    """Appends blocks, cut as :func:`split` does, and returns their numbers."""
    files = Files(run)
    number = max((number for number in numbers(run) if number < FIRST_HANDED_OFF), default=-1) + 1
    written = []
    for block in split(rollouts, pods, size, expected_s, whole):
        content = {"rollouts": [rollout.to_dict() for rollout in block]}
        while not files.answer(Link(task_path(number), content, f"new.{secrets.token_hex(8)}")):
            number += 1  # another process is adding blocks as well
        written.append(number)
        number += 1
    return written


def add_blocks(
    run: RunDir, rollouts: Sequence[Rollout], token: str, pods: int = 1, size: int | None = None
) -> list[int]:
    """Adds blocks to a campaign that may run, cut as :func:`split` does, and returns their numbers.

    A repeated call with the same token adds nothing and returns the same numbers, even if an earlier caller was killed
    at any point. Running pods claim the new blocks. An open lease keeps pods waiting for them; ``resume`` starts new
    pods.

    Args:
        token: names this batch, unique in the run.

    Raises:
        LedgerError: the token cannot name a file, or was used for other rollouts.
        OSError: the run directory is full or away. The call may be repeated.
    """
    make_directory(run.path / ADDED)
    return Files(run).carry_out(add(split(rollouts, pods, size), token, f"add.{secrets.token_hex(8)}"))


def add(blocks: Sequence[Sequence[Rollout]], token: str, private: str) -> Steps[list[int]]:
    """Adds blocks of rollouts once for each token, as steps, and returns their numbers.

    Args:
        blocks: the caller's cut of the rollouts. It counts if no other process with this token was faster.
        private: names files of this call.

    Raises:
        LedgerError: the token cannot name a file, or was used for other rollouts.
    """
    if not TOKEN.match(token):
        raise LedgerError(f"token {token!r}: letters, digits and ._- alone; it names a file")
    rollouts = [rollout for block in blocks for rollout in block]
    if not rollouts:
        raise LedgerError(f"token {token}: no rollouts to add")
    proposed = {"rollouts": len(rollouts), "cut": [len(block) for block in blocks], "digest": digest(rollouts)}
    record = yield from _agree(token, 0, proposed, private)
    if record["digest"] != proposed["digest"]:
        raise LedgerError(
            f"token {token}: {record['rollouts']} other rollouts were added with it; give each batch a token of its own"
        )
    remaining = iter(rollouts)
    parts = [list(islice(remaining, size)) for size in record["cut"]]
    placed: list[int] = []
    turn = 0
    while True:
        turn += 1
        offset = int(record["first"]) - len(placed)
        for n in range(len(placed), len(parts)):
            content = {"rollouts": [rollout.to_dict() for rollout in parts[n]], "added": [token, n]}
            if not (yield from _place(offset + n, content, f"{private}.{n}.{turn}")):
                break
            placed.append(offset + n)
        else:
            return placed
        record = yield from _agree(token, turn, {}, private)


def digest(rollouts: Sequence[Rollout]) -> str:
    """Returns a digest that differs between lists of rollouts."""
    return hashlib.sha256(json.dumps([rollout.to_dict() for rollout in rollouts]).encode()).hexdigest()[:16]


def _agree(token: str, turn: int, about: Mapping[str, Any], private: str) -> Steps[Mapping[str, Any]]:
    """Returns the record of a turn: the first process with this token decides where the remaining blocks go."""
    path = added_path(token, turn)
    record = yield Read(path)
    if record is not None:
        return record
    planned = [number for number in block_numbers((yield Names(TASKS))) if number < FIRST_HANDED_OFF]
    proposed = {**about, "first": max(planned, default=-1) + 1}
    if (yield Link(path, proposed, f"{private}.{turn}")):
        return proposed
    return (yield from _read_existing(path))


def _place(number: int, content: Mapping[str, Any], private: str) -> Steps[bool]:
    """Links a block. Returns whether it is there, even if another process with the same token linked it."""
    if (yield Link(task_path(number), content, private)):
        return True
    existing = yield from _read_existing(task_path(number))
    return existing.get("added") == content["added"]


def _read_existing(path: str) -> Steps[Mapping[str, Any]]:
    for _ in range(MAX_LOOKS):
        content = yield Read(path)
        if content is not None:
            return content
    raise LedgerError(f"{path}: is there and cannot be read; call again with the same token")


# --- reading ---


def numbers(run: RunDir) -> list[int]:
    """Returns the numbers of the blocks that exist, by one listing."""
    return block_numbers(os.listdir(run.tasks)) if run.tasks.is_dir() else []


def read_block(run: RunDir, number: int) -> Block:
    """Reads one block.

    Raises:
        LedgerError: the block is missing or damaged.
        OSError: the run directory is away.
    """
    try:
        return Block(number, read_json(run.block(number), _BlockFile).rollouts)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and passing(error):
            raise
        raise LedgerError(
            f"{run.block(number)}: cannot be read as a block: {error!r}; make the run again with plan"
        ) from error


def read_blocks(run: RunDir, which: Iterable[int] | None = None) -> list[Block]:
    """Reads these blocks, by default all that exist. Raises as :func:`read_block` does."""
    return [read_block(run, number) for number in (numbers(run) if which is None else which)]
