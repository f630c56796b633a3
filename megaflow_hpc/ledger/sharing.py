"""How pods share what one of them has claimed: who requests work, and the blocks that are handed off. Pure.

A pod hands rollouts that it has not started to others by a new block, numbered from ``FIRST_HANDED_OFF`` on, that names
the block and epoch they come from. Its own claim counts how many it has handed off, and so does the claim of whoever
takes that block over. A request is an empty file whose name says all: ``<pod>.<start>.<n>.<slots>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megaflow_hpc.ledger.calls import Link, Names, Read, Remove, Steps, Touch
from megaflow_hpc.ledger.names import FIRST_HANDED_OFF, REQUESTS, TASKS, block_numbers, task_path
from megaflow_hpc.types import Rollout


class NotYet(Exception):
    """A file is listed and cannot be opened: a cache will let it through at a later look."""


class Sharing:
    """What one start of a pod knows of blocks handed off and of requests; operations are steps.

    Args:
        name: ``<pod>.<start>``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: dict[int, int] = {}
        """Block → number of blocks that it handed off, as far as its holder must know."""
        self._parents: dict[int, tuple[int, int, frozenset[str]]] = {}
        """Block handed off → block and epoch that it comes from, ids of its rollouts."""
        self._request = ""
        """Path of the request that stands."""
        self._requests = 0

    # --- blocks handed off ---

    def hand_off(self, block: int, epoch: int, rollouts: Sequence[Rollout], token: str) -> Steps[None]:
        """Makes a block of rollouts of a held one; a repeated call with the same token is the same hand-off."""
        number = max([FIRST_HANDED_OFF - 1, *block_numbers((yield Names(TASKS)))]) + 1
        content = {"from": [block, epoch], "rollouts": [rollout.to_dict() for rollout in rollouts]}
        while not (yield Link(task_path(number), content, f"{self._name}.{token}")):
            number += 1
        self._given[block] = self.given(block) + 1

    def given(self, block: int) -> int:
        """Returns how many blocks a held one has handed off, by whomever."""
        return self._given.get(block, 0)

    def handed_off_by(self, block: int, blocks: Iterable[int]) -> Steps[list[int]]:
        """Returns those of ``blocks`` that come from a block."""
        found = []
        for number in blocks:
            if number >= FIRST_HANDED_OFF and (yield from self.parent(number))[0] == block:
                found.append(number)
        return found

    def take_over(self, block: int, given: int | Sequence[int]) -> Steps[frozenset[str]]:
        """Notes what a claim says that its block handed off; returns the ids that lie elsewhere, as far as it names
        the blocks.

        Raises:
            NotYet: one of these cannot be read yet.
        """
        without: set[str] = set()
        for number in () if isinstance(given, int) else given:
            without |= (yield from self.parent(number))[2]
        self._given[block] = given if isinstance(given, int) else len(given)
        return frozenset(without)

    def parent(self, number: int) -> Steps[tuple[int, int, frozenset[str]]]:
        """Returns block and epoch that a block handed off comes from, and the ids of its rollouts."""
        if number not in self._parents:
            content = yield Read(task_path(number))
            if content is None:
                raise NotYet
            ids = frozenset(Rollout(**rollout).id for rollout in content["rollouts"])
            self._parents[number] = int(content["from"][0]), int(content["from"][1]), ids
        return self._parents[number]

    # --- requests for work ---

    def request_work(self, slots: int) -> Steps[None]:
        """Tells others that this pod has so many free slots and found nothing to claim; 0 withdraws that."""
        before, self._request = self._request, ""
        if slots:
            self._requests += 1
            self._request = f"{REQUESTS}/{self._name}.{self._requests}.{slots}"
            yield Touch(self._request)
        if before:
            yield Remove(before)

    def work_requests(self, known: Mapping[str, int] | None) -> Steps[dict[str, int]]:
        """Returns the slots that other pods ask to be filled, by request.

        Args:
            known: the requests of all pods; ``None``: they are looked for.
        """
        found = (yield from requests_of_all()) if known is None else known
        return {name: slots for name, slots in found.items() if name.rpartition(".")[0] != self._name}


def requests_of_all() -> Steps[dict[str, int]]:
    """Returns the slots that pods ask to be filled, by request."""
    found: dict[str, Any] = {}
    for name in (yield Names(REQUESTS)):
        request, _, slots = name.rpartition(".")
        found[request] = int(slots)
    return found
