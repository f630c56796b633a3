"""Builds and parses the ledger's file names, which encode data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

CLAIMS, RELEASED, DONE, LEASES = "ledger/claims", "ledger/released", "ledger/done", "ledger/leases"
GONE, TASKS, ADDED = "ledger/gone", "tasks", "ledger/added"
ENDED, UNSTARTED, PARTIAL = "ledger/ended", "ledger/unstarted", "partial"


def claim_path(block: int, epoch: int) -> str:
    """Returns the path of a claim, relative to the run directory."""
    return f"{CLAIMS}/{block:06d}.{epoch}"


def task_path(block: int) -> str:
    """Returns the path of a block, relative to the run directory."""
    return f"{TASKS}/{block:06d}.json"


def earlier(start: str, than: str) -> bool:
    """Returns whether ``start`` is an earlier start of an array element than ``than``. Slurm numbers the starts. A
    start without a number counts as earlier than any other."""
    return start != than and (not (start.isdigit() and than.isdigit()) or int(start) < int(than))


def precedes(name: str, than: str) -> bool:
    """Returns whether ``name`` is an earlier start of the same array element as ``than``.

    Both names have the form ``<pod>.<start>``. The earlier start is superseded, even if its node has not noticed yet.
    """
    (pod, _, start), (other, _, later) = name.rpartition("."), than.rpartition(".")
    return pod == other and start.isdigit() and later.isdigit() and int(start) < int(later)


def newest_starts(names: Iterable[str]) -> set[str]:
    """Returns only the names ``<pod>.<start>`` that are not superseded by a later start of the same pod
    (:func:`precedes`)."""
    newest: dict[str, str] = {}
    unnumbered = set()
    for name in names:
        pod, _, start = name.rpartition(".")
        if not start.isdigit():
            unnumbered.add(name)
        elif pod not in newest or precedes(newest[pod], name):
            newest[pod] = name
    return unnumbered | set(newest.values())


def pairs(names: Iterable[str]) -> set[tuple[int, int]]:
    """Parses names like ``000012.3`` into (block, epoch). Ignores a third number, with which older versions marked
    blocks that pods handed to each other."""
    parts = (name.split(".") for name in names)
    return {(int(block), int(epoch)) for block, epoch, *_ in parts}


def latest(names: Iterable[str]) -> dict[int, int]:
    """Returns the highest epoch of each block."""
    epochs: dict[int, int] = {}
    for name in names:
        block, epoch = map(int, name.split("."))
        if epoch > epochs.get(block, -1):
            epochs[block] = epoch
    return epochs


def done_path(block: int, epoch: int) -> str:
    """Returns the path of a done mark relative to the run directory. ``epoch`` belongs to the claim that ended the
    block."""
    return f"{DONE}/{block:06d}.{epoch}"


def done_blocks(names: Iterable[str]) -> set[int]:
    """Parses the names of done marks. Returns the blocks that are done."""
    return {block for block, _ in pairs(names)}


def block_numbers(names: Iterable[str]) -> list[int]:
    """Parses the names in ``tasks/``. Returns the block numbers in ascending order."""
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def all_done(done: Collection[int], blocks: Collection[int]) -> bool:
    """Returns whether every block is done. Returns false if there is no block."""
    return bool(blocks) and set(done) >= set(blocks)


def added_path(token: str, turn: int) -> str:
    """Returns the path of a record of added blocks relative to the run directory.

    The record with number ``turn`` assigns numbers to the blocks that earlier records could not place.
    """
    return f"{ADDED}/{token}.{turn}"


class Seal(NamedTuple):
    """Valid part of a journal whose pod no longer holds the block."""

    owner: str
    """The pod start ``<pod>.<start>`` that held the block in that epoch."""
    sealed: int
    """Length in bytes of the valid part of the owner's journal."""


def seals_in(content: Mapping[str, Any]) -> list[Seal]:
    """Returns the seals of all epochs before a claim, oldest first, from the claim's content. Each claim repeats the
    seals of the previous claim, so the latest claim of a block contains them all."""
    seals = [Seal(str(owner), int(sealed)) for owner, sealed, *_ in content.get("seals", ())]
    if "predecessor" in content:  # missing in a claim that ended its block
        seals.append(Seal(str(content["predecessor"]), int(content["sealed"])))
    return seals
