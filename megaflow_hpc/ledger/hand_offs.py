"""Hand-offs between pods: requests for work, and the blocks that other pods may claim in answer. Pure.

A pod hands off rollouts that it has not started. They become a new block, numbered from ``FIRST_HANDED_OFF`` on, which
names the block and epoch that they come from. The claim of the origin counts the blocks that were handed off, and so
does the claim of the pod that takes the origin over. A request is an empty file whose name holds everything:
``<pod>.<start>.<n>.<slots>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.ledger.calls import Link, Names, Read, Remove, Steps, Touch
from megaflow_hpc.ledger.names import FIRST_HANDED_OFF, REQUESTS, TASKS, block_numbers, task_path
from megaflow_hpc.types import Rollout


class NotYet(Exception):
    """A file is listed but cannot be opened: a later look will find it past the cache."""


class Origin(NamedTuple):
    """Origin of a block that was handed off."""

    block: int
    epoch: int
    rollouts: frozenset[str]
    """Ids of the rollouts that were handed off."""


@dataclass
class HandOffs:
    """Hand-offs and requests, as one start of a pod knows them. Operations are steps.

    Args:
        name: ``<pod>.<start>``.
    """

    name: str
    _counts: dict[int, int] = field(default_factory=dict)
    """Held block → number of blocks that were handed off from it."""
    _origins: dict[int, Origin] = field(default_factory=dict)
    _requests: list[str] = field(default_factory=list)
    """Paths of this pod's requests in the ledger. There is more than one only after an error."""
    _requests_made: int = 0

    # --- blocks ---

    def make(self, block: int, epoch: int, rollouts: Sequence[Rollout], token: str) -> Steps[None]:
        """Makes a block of some rollouts of a held block. A repeated call with the same token is the same hand-off."""
        number = max([FIRST_HANDED_OFF - 1, *block_numbers((yield Names(TASKS)))]) + 1
        content = {"from": [block, epoch], "rollouts": [rollout.to_dict() for rollout in rollouts]}
        while not (yield Link(task_path(number), content, f"{self.name}.{token}")):
            number += 1
        self._counts[block] = self.count(block) + 1

    def count(self, block: int) -> int:
        """Returns how many blocks were handed off from a held block, by this pod or earlier holders."""
        return self._counts.get(block, 0)

    def made_of(self, block: int, blocks: Iterable[int]) -> Steps[list[int]]:
        """Returns those of ``blocks`` that were handed off from a block."""
        found = []
        for number in blocks:
            if number < FIRST_HANDED_OFF:
                continue
            origin = yield from self.origin(number)
            if origin.block == block:
                found.append(number)
        return found

    def take_over(self, block: int, given: int | Sequence[int]) -> Steps[frozenset[str]]:
        """Records what a claim says was handed off from its block. Returns the ids of the rollouts that are elsewhere.

        Args:
            given: the blocks, or their number if the predecessor left out their rollouts itself.

        Raises:
            NotYet: one of these blocks cannot be read yet.
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
        """Returns the origin of a block that was handed off. Raises NotYet."""
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
        """Asks other pods to fill ``slots`` free slots, for which nothing could be claimed. 0 withdraws the request."""
        if slots:
            self._requests_made += 1
            self._requests.append(f"{REQUESTS}/{self.name}.{self._requests_made}.{slots}")
            yield Touch(self._requests[-1])
        while len(self._requests) > (1 if slots else 0):
            yield Remove(self._requests[0])
            del self._requests[0]

    def work_requests(self, known: Mapping[str, int] | None) -> Steps[dict[str, int]]:
        """Returns the slots that other pods ask to be filled, by request.

        Args:
            known: the requests of all pods. ``None``: they are listed.
        """
        requests = (yield from all_work_requests()) if known is None else known
        return {name: slots for name, slots in requests.items() if name.rpartition(".")[0] != self.name}


def all_work_requests() -> Steps[dict[str, int]]:
    """Returns the slots that pods ask to be filled, by request."""
    requests: dict[str, int] = {}
    for name in (yield Names(REQUESTS)):
        request, _, slots = name.rpartition(".")
        requests[request] = int(slots)
    return requests
