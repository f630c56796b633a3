"""Blocks: immutable lists of rollouts, the unit that pods claim.

File-system operations grow with blocks, never with rollouts. A block is one JSON file ``RUN/tasks/<number>.json``;
blocks are only ever added (``resume --failed`` and trainers append new ones).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.rundir import RunDir, write_json
from megaflow_hpc.types import Rollout

MAX_BLOCK = 256
"""Rollouts per block at most: a lost pod costs one block's unfinished work, a claim costs five metadata operations."""

CLAIMS_PER_POD = 4
"""Blocks a pod should be able to claim in turn, so that late pods still find work."""

_NAME = re.compile(r"(\d{6,})\.json\Z")


@dataclass(frozen=True)
class Block:
    number: int
    rollouts: tuple[Rollout, ...]


def block_size(rollouts: int, pods: int) -> int:
    """Rollouts per block for a campaign of this size."""
    return min(MAX_BLOCK, max(1, math.ceil(rollouts / (CLAIMS_PER_POD * max(1, pods)))))


def split(rollouts: Sequence[Rollout], size: int) -> list[tuple[Rollout, ...]]:
    """Cuts in order into blocks of about ``size``; the samples of one group stay together."""
    blocks: list[tuple[Rollout, ...]] = []
    current: list[Rollout] = []
    for _, samples in groupby(rollouts, key=lambda r: r.group_id):
        group = list(samples)
        if current and len(current) + len(group) > size:
            blocks.append(tuple(current))
            current = []
        current += group
    if current:
        blocks.append(tuple(current))
    return blocks


def numbers(run: RunDir) -> list[int]:
    """The blocks that exist, by one listing."""
    return sorted(int(match[1]) for name in _listdir(run) if (match := _NAME.match(name)))


def _listdir(run: RunDir) -> list[str]:
    return [entry.name for entry in run.tasks.iterdir()] if run.tasks.is_dir() else []


def write_blocks(run: RunDir, rollouts: Sequence[Rollout], size: int) -> list[int]:
    """Appends blocks and returns their numbers."""
    first = max(numbers(run), default=-1) + 1
    written = []
    for offset, block in enumerate(split(rollouts, size)):
        write_json(run.block(first + offset), {"rollouts": [asdict(rollout) for rollout in block]})
        written.append(first + offset)
    return written


def read_block(run: RunDir, number: int) -> Block:
    try:
        content = json.loads(run.block(number).read_text())
        return Block(number, tuple(Rollout(**rollout) for rollout in content["rollouts"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LedgerError(
            f"{run.block(number)}: cannot be read as a block: {error!r}; make the run again with plan"
        ) from error


def read_blocks(run: RunDir, which: Iterable[int] | None = None) -> list[Block]:
    return [read_block(run, number) for number in (numbers(run) if which is None else which)]
