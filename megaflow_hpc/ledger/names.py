"""File names of the ledger, and the facts that they encode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

CLAIMS, RELEASED, DONE, LEASES = "ledger/claims", "ledger/released", "ledger/done", "ledger/leases"
GONE, REQUESTS, TASKS, ADDED = "ledger/gone", "ledger/hungry", "tasks", "ledger/added"
ENDED, UNSTARTED, PARTIAL = "ledger/ended", "ledger/unstarted", "partial"

FIRST_HANDED_OFF = 1_000_000
"""Number of the first handed-off block. Planned blocks have smaller numbers."""


def claim_path(block: int, epoch: int) -> str:
    """Returns the path of a claim, relative to the run directory."""
    return f"{CLAIMS}/{block:06d}.{epoch}"


def task_path(block: int) -> str:
    """Returns the path of a block, relative to the run directory."""
    return f"{TASKS}/{block:06d}.json"


def earlier(start: str, than: str) -> bool:
    """Returns whether a start of an array element came before another start. Slurm numbers the starts."""
    return start != than and (not (start.isdigit() and than.isdigit()) or int(start) < int(than))


def precedes(name: str, than: str) -> bool:
    """Returns whether ``<pod>.<start>`` ``name`` is an earlier start of the same array element as ``than``.

    The earlier start is over, even if its node has not noticed yet.
    """
    (pod, _, start), (other, _, later) = name.rpartition("."), than.rpartition(".")
    return pod == other and start.isdigit() and later.isdigit() and int(start) < int(later)


def newest_starts(names: Iterable[str]) -> set[str]:
    """Returns the names ``<pod>.<start>`` that have no later start (:func:`precedes`)."""
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
    """Returns the path of a done mark, relative to the run directory. The claim with this ``epoch`` ended the block."""
    return f"{DONE}/{block:06d}.{epoch}.{given}"


def done_blocks(names: Iterable[str]) -> dict[int, int]:
    """Returns done block → number of blocks handed off from it. If a block has several marks, the highest epoch
    counts."""
    marks = sorted(tuple(map(int, name.split("."))) for name in names)
    return {block: given for block, _, given in marks}


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
    """Returns the path of a record of added blocks. Each turn numbers the blocks that are not placed yet."""
    return f"{ADDED}/{token}.{turn}"


class Seal(NamedTuple):
    """The valid part of a superseded epoch of a block."""

    owner: str
    """``<pod>.<start>`` of that epoch."""
    sealed: int
    """Length of the valid part of its journal, in bytes."""
    given: int | Sequence[int]
    """Numbers of the handed-off blocks, or just their count if the owner released the block."""


def seals_in(content: Mapping[str, Any]) -> list[Seal]:
    """Returns the seals of all epochs before a claim, oldest first, from the content of the claim.

    A claim repeats the seals of the claim before it, so the latest claim of a block contains all of them.
    """
    seals = [Seal(str(owner), int(sealed), given) for owner, sealed, given in content.get("seals", ())]
    if "predecessor" in content:  # missing in a claim that ended its block
        seals.append(Seal(str(content["predecessor"]), int(content["sealed"]), content["given"]))
    return seals
