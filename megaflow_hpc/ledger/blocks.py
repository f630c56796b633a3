"""Writes and reads blocks, which are immutable lists of rollouts. Pods claim work by blocks.

File-system traffic grows with the number of blocks, not with the number of rollouts. Each block is a JSON file
``RUN/tasks/<number>.json`` and is never removed. Blocks are created by planning, by ``resume --failed``, and by
consumers that add rollouts to a running campaign.

*Adding exactly once.* A process reserves a block number by hard-linking the block's file. If a call is repeated, or
another process uses the same token, it must find the blocks that the first call added. The first process therefore
first links a record ``ledger/added/<token>.0``. The record contains the split into blocks and the number of the first
block. Every process with that token then links the same blocks under the same numbers. If a number is already taken by
other rollouts, a further record ``<token>.1`` defines the number at which the remaining blocks start, and so on.
Records never change, so all processes agree on the numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, overload

import msgspec

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.ledger.calls import Link, Names, Read, Steps
from megaflow_hpc.ledger.files import Files, passing
from megaflow_hpc.ledger.names import ADDED, TASKS, added_path, block_numbers, task_path
from megaflow_hpc.rundir.layout import RunDir, read_json
from megaflow_hpc.types import Rollout

MAX_BLOCK = 64
"""Maximum number of rollouts in a block. Larger blocks make a campaign up to 12 % longer if pods are added or leave,
because a pod runs all rollouts of a block that it holds. Each claim costs five metadata operations."""
MANY_BLOCKS = 4096
"""Campaigns that would need more blocks than about this number get larger blocks, so that listings stay short."""
WAVE_SHARE = 3
"""Each wave of blocks contains 1/WAVE_SHARE of the remaining work. So blocks shrink towards the end, and no pod has a
backlog while other pods are idle (guided self-scheduling, Polychronopoulos and Kuck 1987)."""
TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
MAX_LOOKS = 10
"""Maximum number of attempts to read an existing file, because a cache may still hide it."""


class RolloutGroups(Sequence[Rollout]):
    """Sequence of a plan's rollouts. It stores only the groups, and creates each rollout on access.

    Args:
        groups: The first rollout and the sample indices of each group.
    """

    def __init__(self, groups: Iterable[tuple[Rollout, Sequence[int]]] = ()) -> None:
        self._groups = [(first, samples) for first, samples in groups if len(samples)]
        self._ends = list(accumulate(len(samples) for _, samples in self._groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...

    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        group = bisect_right(self._ends, index)
        first, samples = self._groups[group]
        return replace(first, sample_index=samples[index - self._ends[group] + len(samples)])

    def __iter__(self) -> Iterator[Rollout]:
        for first, samples in self._groups:
            for sample in samples:
                yield replace(first, sample_index=sample)

    def firsts(self) -> list[Rollout]:
        """Returns the first rollout of each group."""
        return [first for first, _ in self._groups]

    def spans(self) -> list[range]:
        """Returns the range of positions of each group in the sequence."""
        return [range(end - len(samples), end) for end, (_, samples) in zip(self._ends, self._groups, strict=True)]

    def where(self, chosen: Callable[[Rollout], bool]) -> RolloutGroups:
        """Returns the groups whose first rollout satisfies ``chosen``."""
        return RolloutGroups(group for group in self._groups if chosen(group[0]))


@dataclass(frozen=True)
class Block:
    """A numbered list of rollouts that a pod claims as a whole."""

    number: int
    rollouts: tuple[Rollout, ...]


class _BlockFile(msgspec.Struct):
    rollouts: tuple[Rollout, ...]


# --- splitting ---


def deal(work: Sequence[int], pods: int, most: int = MAX_BLOCK) -> list[range]:
    """Distributes items over blocks. Returns the item indices of each block, in claim order.

    Blocks come in waves. Each wave contains about 1/:data:`WAVE_SHARE` of the remaining work.

    Args:
        work: Cost of each item, in any unit.
        most: Maximum number of items in a block.
    """
    pods = max(1, pods)
    blocks: list[range] = []
    left, first = sum(work), 0
    while first < len(work):
        wave, cost, end = left / WAVE_SHARE, 0, first
        while end < len(work) and (end == first or cost + work[end] <= wave or end - first < pods):
            cost += work[end]
            end += 1
        size = end - first
        count = min(size, pods * math.ceil(size / pods / most))
        blocks += [range(a, b) for a, b in pairwise(first + size * n // count for n in range(count + 1))]
        left, first = left - cost, end
    return blocks


def split(
    rollouts: Sequence[Rollout],
    pods: int,
    size: int | None = None,
    whole: bool = True,
) -> Iterator[list[Rollout]]:
    """Splits rollouts into blocks. Samples of a group stay together.

    Yields one block at a time, because a plan may contain a million rollouts.

    Args:
        pods: Number of pods to split for.
        size: Approximate number of rollouts in a block. ``None`` derives it from ``pods``.
        whole: True to keep groups whole even if there are fewer groups than pods.
    """
    groups, dealt = _deal_groups(rollouts, pods, size, whole)
    for block in dealt:
        yield [rollouts[n] for number in block for n in groups[number]]


def count_blocks(rollouts: Sequence[Rollout], pods: int, whole: bool = True) -> int:
    """Returns the number of blocks that :func:`split` would yield."""
    return len(_deal_groups(rollouts, pods, None, whole)[1])


def _deal_groups(
    rollouts: Sequence[Rollout],
    pods: int,
    size: int | None,
    whole: bool,
) -> tuple[list[range], list[range]]:
    """Returns two lists: the rollout indices of each group or part of a group, and the indices of these groups in each
    block."""
    groups = _spans(rollouts)
    if not whole:
        parts: list[range] = []
        for group in groups:
            count = math.ceil(len(group) / MAX_BLOCK)
            if len(groups) < pods:
                count = max(count, math.ceil(pods * WAVE_SHARE / len(groups)))
            count = min(count, len(group))
            parts += [group[n::count] for n in range(count)]
        groups = parts
    rollouts_in_block = size or max(MAX_BLOCK, len(rollouts) // MANY_BLOCKS)
    most = max(1, rollouts_in_block * len(groups) // max(1, len(rollouts)))
    if size:
        dealt = [range(n, min(n + most, len(groups))) for n in range(0, len(groups), most)]
    else:
        dealt = deal([len(group) for group in groups], pods, most)
    return groups, dealt


def _spans(rollouts: Sequence[Rollout]) -> list[range]:
    if isinstance(rollouts, RolloutGroups):
        return rollouts.spans()
    sizes = [len([*samples]) for _, samples in groupby(rollouts, key=lambda r: r.group_id)]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


# --- writing ---


def write_blocks(
    run: RunDir,
    rollouts: Sequence[Rollout],
    pods: int = 1,
    size: int | None = None,
    whole: bool = True,
) -> list[int]:
    """Splits rollouts as :func:`split` does, writes the blocks, and returns their numbers."""
    files = Files(run)
    number = max(numbers(run), default=-1) + 1
    written = []
    for block in split(rollouts, pods, size, whole):
        content = {"rollouts": [rollout.to_dict() for rollout in block]}
        while not files.answer(Link(task_path(number), content, f"new.{secrets.token_hex(8)}")):
            number += 1  # another process is also adding blocks
        written.append(number)
        number += 1
    return written


def add_blocks(
    run: RunDir, rollouts: Sequence[Rollout], token: str, pods: int = 1, size: int | None = None
) -> list[int]:
    """Adds blocks to a campaign, which may be running, and returns their numbers.

    Splits the rollouts as :func:`split` does. The call is idempotent: repeated with the same token, it adds nothing and
    returns the same numbers. This holds even if an earlier caller was killed at any point. Running pods claim the new
    blocks. Idle pods wait for new blocks while a consumer holds an open lease. If no pods are left, ``resume`` starts
    new ones.

    Args:
        token: Idempotency token of this batch, unique in the run.

    Raises:
        LedgerError: The token is not a valid file name or was used for other rollouts, or there are no rollouts.
        OSError: The run directory is full or unavailable. The call may be repeated.
    """
    make_directory(run.path / ADDED)
    return Files(run).carry_out(add(list(split(rollouts, pods, size)), token, f"add.{secrets.token_hex(8)}"))


def add(blocks: Sequence[Sequence[Rollout]], token: str, private: str) -> Steps[list[int]]:
    """Adds blocks of rollouts once per token and returns their numbers.

    Args:
        blocks: The rollouts of each block. If another process with the same token was faster, its split is used.
        private: Prefix for the names of this call's private files.

    Raises:
        LedgerError: The token is not a valid file name or was used for other rollouts, or there are no rollouts.
    """
    if not TOKEN.match(token):
        raise LedgerError(f"token {token!r}: expected only letters, digits and ._-, because it names a file")
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
    """Returns a digest that identifies a list of rollouts."""
    return hashlib.sha256(json.dumps([rollout.to_dict() for rollout in rollouts]).encode()).hexdigest()[:16]


def _agree(token: str, turn: int, about: Mapping[str, Any], private: str) -> Steps[Mapping[str, Any]]:
    """Reads the token's record with number ``turn``, or creates it. The first writer fixes the numbers of the remaining
    blocks for all processes."""
    path = added_path(token, turn)
    record = yield Read(path)
    if record is not None:
        return record
    proposed = {**about, "first": max(block_numbers((yield Names(TASKS))), default=-1) + 1}
    if (yield Link(path, proposed, f"{private}.{turn}")):
        return proposed
    return (yield from _read_existing(path))


def _place(number: int, content: Mapping[str, Any], private: str) -> Steps[bool]:
    """Links a block under its number. Returns true if the block now exists, even if another process with the same token
    linked it."""
    if (yield Link(task_path(number), content, private)):
        return True
    existing = yield from _read_existing(task_path(number))
    return existing.get("added") == content["added"]


def _read_existing(path: str) -> Steps[Mapping[str, Any]]:
    for _ in range(MAX_LOOKS):
        content = yield Read(path)
        if content is not None:
            return content
    raise LedgerError(f"{path}: exists but cannot be read; call again with the same token")


# --- reading ---


def numbers(run: RunDir) -> list[int]:
    """Lists the numbers of all blocks."""
    return block_numbers(os.listdir(run.tasks)) if run.tasks.is_dir() else []


def read_block(run: RunDir, number: int) -> Block:
    """Reads one block.

    Raises:
        LedgerError: The block is missing or damaged.
        OSError: The run directory is unavailable.
    """
    try:
        return Block(number, read_json(run.block(number), _BlockFile).rollouts)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and passing(error):
            raise
        raise LedgerError(f"{run.block(number)}: cannot be read as a block: {error!r}; plan the run again") from error


def read_blocks(run: RunDir, which: Iterable[int] | None = None) -> list[Block]:
    """Reads the given blocks, or all blocks if ``which`` is ``None``. Raises the errors of :func:`read_block`."""
    return [read_block(run, number) for number in (numbers(run) if which is None else which)]
