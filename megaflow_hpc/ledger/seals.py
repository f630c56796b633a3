"""Determines from the claims which part of each journal counts. Pure: performs no I/O itself.

The latest claim of a block contains the seals of all its earlier epochs, because earlier claims may be removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.calls import Names, Read, Steps
from megaflow_hpc.ledger.names import CLAIMS, DONE, claim_path, ends, latest, seals, seals_in

Seals = dict[tuple[int, int], tuple[str, int]]
"""(block, epoch) → (``<pod>.<start>`` of that epoch, valid bytes of its journal), for superseded epochs."""
MAX_LOOKS = 5
"""Maximum number of attempts to read a listed claim. An attempt fails only if a later claim has just replaced it."""


def all_seals() -> Steps[Seals]:
    """Returns the seals of all blocks. Raises LedgerError if a claim is listed but cannot be read."""
    claims = latest((yield Names(CLAIMS)))
    ended = ends((yield Names(DONE)))
    # A claim that ended its block in epoch 1 seals nothing.
    return (yield from seals_before({block: epoch for block, epoch in claims.items() if epoch > ((block, 1) in ended)}))


def seals_before(claims: Mapping[int, int]) -> Steps[Seals]:
    """Returns the seals of all epochs before the given claims (block → epoch). Raises like :func:`all_seals`."""
    found: Seals = {}
    pending = dict(claims)
    for _ in range(MAX_LOOKS):
        missing = set()
        for block, epoch in sorted(pending.items()):
            while epoch > 0:
                content = yield Read(claim_path(block, epoch))
                if content is None:
                    missing.add(block)
                    break
                found.update(seals([(block, epoch, content)]))
                # Claims written by an earlier version contain only the seal of the epoch before.
                epoch -= len(seals_in(content)) + ("done" in content)
        if not missing:
            return found
        listed = latest((yield Names(CLAIMS)))
        pending = {block: max(listed.get(block, 0), claims[block]) for block in missing}
    block, epoch = next(iter(pending.items()))
    raise LedgerError(f"{claim_path(block, epoch)}: missing; was it removed?")
