"""Names of the ledger's files, and the facts that they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

CLAIMS, RELEASED, DONE, LEASES = "ledger/claims", "ledger/released", "ledger/done", "ledger/leases"
GONE, REQUESTS, TASKS, ADDED = "ledger/gone", "ledger/hungry", "tasks", "ledger/added"

FIRST_HANDED_OFF = 1_000_000
"""Number of the first block that a pod hands off. Planned blocks have smaller numbers."""


def claim_path(block: int, epoch: int) -> str:
    """Path of a claim, below the run directory."""
    return f"{CLAIMS}/{block:06d}.{epoch}"


def task_path(block: int) -> str:
    """Path of a block, below the run directory."""
    return f"{TASKS}/{block:06d}.json"


def earlier(start: str, than: str) -> bool:
    """Tells whether one start of an element came before another. Slurm numbers the starts."""
    return start != than and (not (start.isdigit() and than.isdigit()) or int(start) < int(than))


def pairs(names: Iterable[str]) -> set[tuple[int, int]]:
    """Returns (block, epoch) of names like ``000012.3``."""
    parts = (name.split(".") for name in names)
    return {(int(block), int(epoch)) for block, epoch in parts}


def latest(names: Iterable[str]) -> dict[int, int]:
    """Returns the highest epoch of each block."""
    epochs: dict[int, int] = {}
    for block, epoch in pairs(names):
        epochs[block] = max(epoch, epochs.get(block, -1))
    return epochs


def done_path(block: int, epoch: int, given: int) -> str:
    """Path of a done mark, below the run directory. ``epoch`` is the epoch of the claim that ended the block."""
    return f"{DONE}/{block:06d}.{epoch}.{given}"


def done_blocks(names: Iterable[str]) -> dict[int, int]:
    """Returns the done blocks, each with the number of blocks handed off from it."""
    marks = (name.split(".") for name in names)
    return {int(block): int(given) for block, _, given in marks}


def ends(names: Iterable[str]) -> set[tuple[int, int]]:
    """Returns (block, epoch) of the claims that ended a block, by the done marks."""
    marks = (name.split(".") for name in names)
    return {(int(block), int(epoch)) for block, epoch, _ in marks}


def block_numbers(names: Iterable[str]) -> list[int]:
    """Returns the blocks among names of ``tasks/``, sorted."""
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def all_done(done: Mapping[int, int], blocks: Collection[int]) -> bool:
    """Tells whether the campaign is finished. ``blocks`` must have been listed after ``done``."""
    given = sum(block >= FIRST_HANDED_OFF for block in blocks)
    return bool(blocks) and done.keys() >= set(blocks) and given >= sum(done.values())


def added_path(token: str, turn: int) -> str:
    """Path of a record of added blocks, which names the numbers of those that have no place yet."""
    return f"{ADDED}/{token}.{turn}"


def seals(claims: Iterable[tuple[int, int, Mapping[str, Any]]]) -> dict[tuple[int, int], tuple[str, int]]:
    """Returns (block, epoch) → (``<pod>.<start>`` of that epoch, valid bytes of its journal), for superseded epochs.

    Args:
        claims: block, epoch and content. A claim that ended its block seals nothing.
    """
    return {
        (block, epoch - 1): (str(content["predecessor"]), int(content["sealed"]))
        for block, epoch, content in claims
        if epoch and "done" not in content
    }
