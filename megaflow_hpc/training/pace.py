"""How fast rollouts are asked for: by adding blocks, never by throwing away what was sampled.

Each batch of tasks is one step's worth. Under a staleness bound k, the batch of step s is asked for when step s - 1 - k
is committed. A step takes the groups that are complete first; where one that is not would be older than k in the step
after, the step waits for it. k = 0 is synchronous training, and there a batch also waits until every engine has loaded
the version. Where groups that were dropped are replaced (``batch.refill``), a step asks for further tasks itself. What
a trainer asks for by itself (:meth:`Pace.add`) makes a step larger where others would be too old in the step after.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.ledger.blocks import add_blocks
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.algorithms import Prompts
from megaflow_hpc.training.algorithms.samples import Group
from megaflow_hpc.training.plan import Added, Batch, Refill, TrainingFiles
from megaflow_hpc.types import Rollout

AHEAD = 4
"""Batches that are under way in asynchronous training, which has no bound: enough that pods never wait, and few enough
that what they sample is still of use."""
ADDED = 10**9
"""Round from which on tasks are numbered that a trainer asks for by itself."""
REFILLED = 10**10
"""Round from which on tasks are numbered that a step asks for in the place of others."""
REFILLS = 1000
"""Numbers of refills that a step has; more than it ever asks for."""


class Pace:
    """Asks for one policy's batches.

    Args:
        files: where batches are written down.
        policy, agent: whose rollouts they are.
        tasks: ids to choose from.
        samples: rollouts of each group.
        pods: for how many the blocks are cut.
    """

    def __init__(
        self,
        files: TrainingFiles,
        policy: str,
        agent: str,
        tasks: Sequence[str],
        samples: int,
        config: TrainingConfig,
        pods: int,
    ) -> None:
        self._files, self._policy, self._agent, self._tasks = files, policy, agent, list(tasks)
        self._samples, self._config, self._pods = samples, config, pods
        self._prompts = Prompts(config.prompts)
        self._versions: dict[tuple[type[Batch], int], int] = {}
        """What was asked for, by its kind and number → ordinal of the newest weights then."""
        self._added = max(0, *files.numbers(Batch), 0)
        """Batches whose blocks are known to be there; of the last one that is written down they may not be."""
        self._refilled = False
        """Whether the blocks of every refill are known to be there; of the last one they may not be."""

    @property
    def ahead(self) -> int:
        """Batches under way beside the one that the next step is for."""
        bound = self._config.mode.bound
        return AHEAD if bound is None else bound * self._config.publish.every

    def is_due(self, rounds: Collection[int], version: int) -> bool:
        """Whether one of these rounds must be in the next step, lest it is too old in the one after.

        Args:
            version: ordinal of the newest weights.
        """
        bound = self._config.mode.bound
        asked = {self._record_of(round) for round in rounds}
        return bound is not None and any(version - self._version_of(*one) >= bound for one in asked)

    def settles(self, step: int, complete: Sequence[Group], open_groups: int, version: int) -> int:
        """Returns how many groups a step settles at least, lest some are too old in the one after.

        Args:
            complete: all that are.
            open_groups: how many are not settled, complete or not.
            version: ordinal of the newest weights.
        """
        bound = self._config.mode.bound
        if bound is None:
            return 0
        later = [number for number in self._files.numbers(Batch) if number >= step]
        counted_on = sum(len(batch.tasks) for number in later if (batch := self.batch(number)))
        late = sum(version - group.oldest >= bound for group in complete)
        return min(late, open_groups - counted_on)  # none that a later step waits for

    def want(self, step: int) -> int:
        """Returns for how many groups a step waits: a batch's, fewer where fewer tasks were left to ask for."""
        batch = self.batch(step - 1)
        return len(batch.tasks) if batch else self._config.batch.tasks

    def _record_of(self, round: int) -> tuple[type[Batch], int]:
        """Kind and number of what asked for a round."""
        if round < ADDED:
            return Batch, round // self._config.batch.tasks
        if round < REFILLED:
            return Added, round - ADDED
        return Refill, (round - REFILLED) // self._config.batch.tasks

    def _version_of(self, kind: type[Batch], number: int) -> int:
        if (kind, number) not in self._versions:
            found = self._files.read(kind, number)
            self._versions[kind, number] = found.version if found else 0
        return self._versions[kind, number]

    def keep(self, committed: int, learned: dict[str, object], say: Callable[[str], None]) -> None:
        """Asks for what is due now that so many steps are committed, and finishes a refill that was cut off.

        Args:
            learned: what the choice of tasks has learned from the steps planned so far.
            say: gets a line when it has to wait for engines.

        Raises:
            OSError: the run directory does not answer; the next call goes on.
        """
        if not self._refilled:
            last = next(reversed(self._files.numbers(Refill)), None)
            if last is not None and (refill := self._files.read(Refill, last)):
                self._add_blocks(refill, f"refill.{last:06d}")  # adds nothing where they are there
            self._refilled = True
        while self._added < min(committed + 1 + self.ahead, self._config.steps):
            if self._config.mode.bound == 0 and (late := self._late()):
                say(late)
                return
            self._add(self._added, learned)
            self._added += 1

    def add(self, tasks: Sequence[str], token: str, samples: int | None = None) -> None:
        """Asks for tasks beside what is due; the same token asks once.

        Raises:
            LedgerError: the token is no name of a file, or was used for other tasks.
            OSError: the run directory does not answer; the call may be repeated.
        """
        number = zlib.crc32(token.encode())
        version = current(self._files.run, self._policy).ordinal
        chosen, samples = [(task, ADDED + number) for task in tasks], samples or self._samples
        added = Added(batch=self._added, tasks=chosen, samples=samples, version=version)
        self._files.claim(number, added)  # before its blocks: once they are there, somebody knows how old they are
        self._add_blocks(added, f"added.{token}")

    def refills(self, step: int) -> int:
        """Returns how often a step has asked for further tasks."""
        return sum(number // REFILLS == step for number in self._files.numbers(Refill))

    def refill(self, step: int, count: int, learned: dict[str, object]) -> bool:
        """Asks for ``count`` further tasks of a step, no more than a batch has; tells whether any is left to ask for.

        Raises:
            OSError: the run directory does not answer; the next :meth:`keep` goes on.
        """
        number = step * REFILLS + self.refills(step)
        tasks, version, state = self._choose(
            self._added, count, REFILLED + number * self._config.batch.tasks, learned, [3, number]
        )
        if not tasks:
            return False
        refill = Refill(batch=self._added, tasks=tasks, samples=self._samples, version=version, state=state)
        self._refilled = False
        self._add_blocks(self._files.claim(number, refill), f"refill.{number:06d}")
        self._refilled = True
        return True

    def batch(self, number: int) -> Batch | None:
        """Returns what was asked for as one batch, from 0; ``None`` if it was not yet."""
        return self._files.read(Batch, number)

    def _late(self) -> str:
        """What synchronous training waits for; empty if for nothing."""
        run, policy = self._files.run, self._policy
        wanted = current(run, policy).version
        serving = EndpointFiles(run).serving(policy)
        behind = [server.server for server in serving if server.weight_version != wanted]
        return f"waits for {', '.join(behind)} to load weights {wanted}" if behind else ""

    def _add(self, number: int, learned: dict[str, object]) -> None:
        batch = self.batch(number)
        if batch is None:
            first, count = number * self._config.batch.tasks, self._config.batch.tasks
            tasks, version, state = self._choose(number, count, first, learned, [1, number])
            batch = Batch(batch=number, tasks=tasks, samples=self._samples, version=version, state=state)
            batch = self._files.claim(number, batch)
        self._add_blocks(batch, f"{number:06d}")

    def _add_blocks(self, batch: Batch, token: str) -> None:
        rollouts = [
            Rollout(task, self._policy, sample, self._agent, round)
            for task, round in batch.tasks
            for sample in range(batch.samples)
        ]
        if rollouts:  # else no task is left that may be asked for
            add_blocks(self._files.run, rollouts, token=f"{self._policy}.{token}", pods=self._pods)

    def _choose(
        self, batches: int, count: int, first: int, learned: dict[str, object], seed: list[int]
    ) -> tuple[list[tuple[str, int]], int, dict[str, Any]]:
        """Chooses tasks, with rounds from ``first`` on; also returns the newest version's ordinal, and the state after.

        Args:
            batches: those that were asked for before.
        """
        last = next(reversed(self._files.numbers(Refill)), None)
        refill = None if last is None else self._files.read(Refill, last)
        earlier = refill if refill and refill.batch == batches else self.batch(batches - 1) if batches else None
        random = np.random.default_rng([self._config.seed, *seed])
        chosen, state = self._prompts.choose(
            self._tasks, count, {**(earlier.state if earlier else {}), **learned}, random
        )
        times: dict[str, int] = {}
        tasks = []
        for task in chosen:
            times[task] = times.get(task, -1) + 1
            tasks.append((task, first + times[task]))  # none is asked for as often as there are rounds
        return tasks, current(self._files.run, self._policy).ordinal, state
