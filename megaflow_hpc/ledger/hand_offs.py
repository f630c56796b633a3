"""Hand-offs between pods: requests for work, and the new blocks that answer them. This module does no I/O itself.

A pod may hand off rollouts that it has not started. They become a new block, which any pod may claim. The number of a
handed-off block is at least ``FIRST_HANDED_OFF``, and its file names the block and epoch of its origin. Each holder of
the origin counts the blocks that were handed off from it, including those of earlier holders. A request for work is an
empty file whose name contains all its data: ``<pod>.<start>.<n>.<slots>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.ledger.calls import Link, Names, Read, Remove, Steps, Touch
from megaflow_hpc.ledger.names import FIRST_HANDED_OFF, REQUESTS, TASKS, block_numbers, task_path
from megaflow_hpc.types import Rollout


class NotYet(Exception):
    """A listed file cannot be read yet, because a cache hides it. A later poll will succeed."""


class Origin(NamedTuple):
    """The claim from which a block was handed off."""

    block: int
    epoch: int
    rollouts: frozenset[str]
    """Ids of the rollouts that were handed off."""


@dataclass
class HandOffs:
    """The hand-offs and work requests of one pod start. Operations are steps.

    Args:
        name: ``<pod>.<start>``.
    """

    name: str
    _counts: dict[int, int] = field(default_factory=dict)
    """Held block → number of blocks handed off from it."""
    _origins: dict[int, Origin] = field(default_factory=dict)
    _requests: list[str] = field(default_factory=list)
    """Paths of this pod's pending requests. After an error there may be more than one."""
    _requests_made: int = 0

    # --- blocks ---

    def make(self, block: int, epoch: int, rollouts: Sequence[Rollout], token: str) -> Steps[None]:
        """Creates a new block from some rollouts of a held block. Idempotent for the same token."""
        number = max([FIRST_HANDED_OFF - 1, *block_numbers((yield Names(TASKS)))]) + 1
        content = {"from": [block, epoch], "rollouts": [rollout.to_dict() for rollout in rollouts]}
        while not (yield Link(task_path(number), content, f"{self.name}.{token}")):
            number += 1
        self._counts[block] = self.count(block) + 1

    def count(self, block: int) -> int:
        """Returns the number of blocks that this pod or earlier holders have handed off from a held block."""
        return self._counts.get(block, 0)

    def made_of(self, block: int, blocks: Iterable[int]) -> Steps[list[int]]:
        """Returns the numbers in ``blocks`` that were handed off from ``block``.

        Raises:
            NotYet: a hand-off record is not readable yet.
        """
        handed_off = []
        for number in blocks:
            if number >= FIRST_HANDED_OFF:
                origin = yield from self.origin(number)
                if origin.block == block:
                    handed_off.append(number)
        return handed_off

    def take_over(self, block: int, given: int | Sequence[int]) -> Steps[frozenset[str]]:
        """Records the hand-offs that a claim lists for its block. Returns the ids of the handed-off rollouts.

        Args:
            given: Numbers of the handed-off blocks. A plain count means that the predecessor already excluded their
                rollouts.

        Raises:
            NotYet: One of these blocks cannot be read yet.
        """
        if isinstance(given, int):
            self._counts[block] = given
            return frozenset()
        elsewhere: set[str] = set()
        for number in given:
            origin = yield from self.origin(number)
            elsewhere |= origin.rollouts
        self._counts[block] = len(given)
        return frozenset(elsewhere)

    def origin(self, number: int) -> Steps[Origin]:
        """Returns the origin of a handed-off block. Raises NotYet."""
        if number not in self._origins:
            content = yield Read(task_path(number))
            if content is None:
                raise NotYet
            block, epoch = content["from"]
            ids = frozenset(Rollout(**rollout).id for rollout in content["rollouts"])
            self._origins[number] = Origin(int(block), int(epoch), ids)
        return self._origins[number]

    # --- requests for work ---

    def request_work(self, slots: int) -> Steps[None]:
        """Publishes a request for work to fill ``slots`` idle slots. Pods request work when they find no block to
        claim. 0 withdraws the request."""
        if slots:
            self._requests_made += 1
            self._requests.append(f"{REQUESTS}/{self.name}.{self._requests_made}.{slots}")
            yield Touch(self._requests[-1])
        while len(self._requests) > (1 if slots else 0):
            yield Remove(self._requests[0])
            del self._requests[0]

    def work_requests(self, known: Mapping[str, int] | None) -> Steps[dict[str, int]]:
        """Returns the pending requests of other pods, as ``<pod>.<start>.<n>`` → number of slots.

        Args:
            known: The requests of all pods. If ``None``, the directory is listed.
        """
        requests = (yield from all_work_requests()) if known is None else known
        return {name: slots for name, slots in requests.items() if name.rpartition(".")[0] != self.name}


def all_work_requests() -> Steps[dict[str, int]]:
    """Returns the pending requests of all pods, as ``<pod>.<start>.<n>`` → number of slots."""
    requests: dict[str, int] = {}
    for name in (yield Names(REQUESTS)):
        request, _, slots = name.rpartition(".")
        requests[request] = int(slots)
    return requests
