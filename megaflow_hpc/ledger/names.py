"""File names of the ledger, and the facts encoded in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

CLAIMS, RELEASED, DONE, LEASES = "ledger/claims", "ledger/released", "ledger/done", "ledger/leases"
GONE, REQUESTS, TASKS, ADDED = "ledger/gone", "ledger/hungry", "tasks", "ledger/added"

FIRST_HANDED_OFF = 1_000_000
"""Number of the first handed-off block. Planned blocks have smaller numbers."""


def claim_path(block: int, epoch: int) -> str:
    """Returns the path of a claim, relative to the run directory."""
    return f"{CLAIMS}/{block:06d}.{epoch}"


def task_path(block: int) -> str:
    """Returns the path of a block, relative to the run directory."""
    return f"{TASKS}/{block:06d}.json"


def earlier(start: str, than: str) -> bool:
    """Returns whether one start of an array element came before another. Slurm numbers the starts."""
    return start != than and (not (start.isdigit() and than.isdigit()) or int(start) < int(than))


def pairs(names: Iterable[str]) -> set[tuple[int, int]]:
    """Parses names like ``000012.3`` into (block, epoch)."""
    parts = (name.split(".") for name in names)
    return {(int(block), int(epoch)) for block, epoch in parts}


def latest(names: Iterable[str]) -> dict[int, int]:
    """Returns the highest epoch of each block."""
    epochs: dict[int, int] = {}
    for block, epoch in pairs(names):
        epochs[block] = max(epoch, epochs.get(block, -1))
    return epochs


def done_path(block: int, epoch: int, given: int) -> str:
    """Returns the path of a done mark, relative to the run directory. ``epoch`` is that of the claim that ended the
    block."""
    return f"{DONE}/{block:06d}.{epoch}.{given}"


def done_blocks(names: Iterable[str]) -> dict[int, int]:
    """Returns done block → number of blocks handed off from it."""
    marks = (name.split(".") for name in names)
    return {int(block): int(given) for block, _, given in marks}


def ends(names: Iterable[str]) -> set[tuple[int, int]]:
    """Returns the (block, epoch) of each claim that ended a block, from the names of the done marks."""
    marks = (name.split(".") for name in names)
    return {(int(block), int(epoch)) for block, epoch, _ in marks}


def block_numbers(names: Iterable[str]) -> list[int]:
    """Returns the sorted block numbers among the names in ``tasks/``."""
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def all_done(done: Mapping[int, int], blocks: Collection[int]) -> bool:
    """Returns whether the campaign is finished. ``blocks`` must have been listed after ``done``."""
    given = sum(block >= FIRST_HANDED_OFF for block in blocks)
    return bool(blocks) and done.keys() >= set(blocks) and given >= sum(done.values())


def added_path(token: str, turn: int) -> str:
    """Returns the path of a record of added blocks, which numbers the blocks that could not be placed before."""
    return f"{ADDED}/{token}.{turn}"


def seals(claims: Iterable[tuple[int, int, Mapping[str, Any]]]) -> dict[tuple[int, int], tuple[str, int]]:
    """Returns (block, epoch) → (``<pod>.<start>`` of that epoch, valid bytes of its journal), for superseded epochs.

    Args:
        claims: Block, epoch and content of each claim. A claim that ended its block seals nothing.
    """
    return {
        (block, epoch - 1): (str(content["predecessor"]), int(content["sealed"]))
        for block, epoch, content in claims
        if epoch and "done" not in content
    }
