"""Blocks: immutable lists of rollouts, the unit that pods claim.

File-system operations grow with blocks, never with rollouts. A block is one JSON file ``RUN/tasks/<number>.json``;
blocks are only ever added (``resume --failed`` appends some, and who trains on the campaign's rollouts).
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.ledger.adding import add
from megaflow_hpc.ledger.calls import Link
from megaflow_hpc.ledger.files import Files, passing
from megaflow_hpc.ledger.names import ADDED, FIRST_HANDED_OFF, task_path
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout

MAX_BLOCK = 256
"""Rollouts per block at most: a lost pod costs one block's unfinished work, a claim costs five metadata operations."""

SHARE = 3
"""A block is about one SHARE-th of the work that an even split of the rest would give each pod. So blocks become small
towards the end, and no pod sits on a queue while others have nothing left (guided self-scheduling, Polychronopoulos
and Kuck 1987)."""

_NAME = re.compile(r"(\d{6,})\.json\Z")


@dataclass(frozen=True)
class Block:
    """Rollouts that are claimed together."""

    number: int
    rollouts: tuple[Rollout, ...]


def deal(work: Sequence[float], pods: int, longest_first: bool = False) -> list[list[int]]:
    """Returns which items go into each block, in the order in which blocks will be claimed.

    In waves, each of about a SHARE-th of the work that is left. In a wave of the longest the blocks get every n-th
    item: cut in order, the first pods would hold more long ones than they have slots.

    Args:
        work: what each item is expected to cost; all 1 if unknown.
    """
    order = sorted(range(len(work)), key=lambda n: -work[n]) if longest_first else list(range(len(work)))
    blocks: list[list[int]] = []
    left, first = sum(work), 0
    while first < len(order):
        wave, cost, end = left / SHARE, 0.0, first
        while end < len(order) and (end == first or cost + work[order[end]] <= wave or end - first < pods):
            cost += work[order[end]]
            end += 1
        count = min(end - first, max(1, pods) * math.ceil((end - first) / max(1, pods) / MAX_BLOCK))
        if longest_first:
            blocks += [order[first + n : end : count] for n in range(count)]
        else:
            cuts = [first + (end - first) * n // count for n in range(count + 1)]
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
    """Cuts rollouts into blocks for so many pods, or of about ``size``; the samples of one group stay together.

    Args:
        expected_s: orders the groups by their longest sample, the longest first.
        whole: whether they stay together even where there are fewer groups than pods.
    """
    groups = [list(samples) for _, samples in groupby(rollouts, key=lambda r: r.group_id)]
    if not whole and 0 < len(groups) < pods:
        parts = math.ceil(pods * SHARE / len(groups))
        groups = [group[n::parts] for group in groups for n in range(min(parts, len(group)))]
    if size:
        per_block = max(1, size // max((len(group) for group in groups), default=1))
        dealt = [list(range(n, min(n + per_block, len(groups)))) for n in range(0, len(groups), per_block)]
    elif expected_s is None:
        dealt = deal([len(group) for group in groups], pods)
    else:
        dealt = deal([sum(map(expected_s, group)) for group in groups], pods, longest_first=True)
    return [tuple(rollout for number in block for rollout in groups[number]) for block in dealt]


def numbers(run: RunDir) -> list[int]:
    """Returns the numbers of the blocks that exist, by one listing."""
    return sorted(int(match[1]) for name in _listdir(run) if (match := _NAME.match(name)))


def _listdir(run: RunDir) -> list[str]:
    return [entry.name for entry in run.tasks.iterdir()] if run.tasks.is_dir() else []


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
            number += 1  # somebody else is adding blocks as well
        written.append(number)
        number += 1
    return written


def add_blocks(
    run: RunDir, rollouts: Sequence[Rollout], token: str, pods: int = 1, size: int | None = None
) -> list[int]:
    """Adds blocks to a campaign that may run, cut as :func:`split` does, and returns their numbers.

    A repeated call with the same token adds nothing and returns the same, whoever called before and was killed
    wherever. Pods take what was added where there are any; an open lease keeps them, ``resume`` brings them back.

    Args:
        token: names this batch, unique in the run.

    Raises:
        LedgerError: the token is no name of a file, or was used for other rollouts.
        OSError: the run directory is full, or away; the call may be repeated.
    """
    make_directory(run.path / ADDED)
    return Files(run).carry_out(add(split(rollouts, pods, size), token, f"add.{secrets.token_hex(8)}"))


def read_block(run: RunDir, number: int) -> Block:
    """Reads one block.

    Raises:
        LedgerError: there is no such block, or it is none.
        OSError: the run directory is away.
    """
    try:
        content = json.loads(read_regular(run.block(number)))
        return Block(number, tuple(Rollout(**rollout) for rollout in content["rollouts"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, OSError) and passing(error):
            raise
        raise LedgerError(
            f"{run.block(number)}: cannot be read as a block: {error!r}; make the run again with plan"
        ) from error


def read_blocks(run: RunDir, which: Iterable[int] | None = None) -> list[Block]:
    """Reads these blocks, by default all that exist. Raises as :func:`read_block` does."""
    return [read_block(run, number) for number in (numbers(run) if which is None else which)]
