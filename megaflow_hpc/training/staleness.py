"""Bounds the staleness of rollouts by choosing when to request them.

A batch is the tasks of one step. With a staleness bound k, the batch of step s is requested once two conditions hold.
The policy and all its helper policies have committed step s - 1 - k, and every engine has loaded the newest weights
(:mod:`~megaflow_hpc.training.readiness`). A step takes complete groups first, but waits for an incomplete group if that
group would be older than k in the next step. With k = 0, training is synchronous.

If dropped groups are replaced (``refill``), the step itself requests further tasks. If a trainer adds tasks
(:meth:`StalenessControl.add`), a step becomes larger if groups would otherwise be too old for the next step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.ledger.blocks import add_blocks
from megaflow_hpc.training.algorithms import Prompts
from megaflow_hpc.training.algorithms.samples import SampleGroup
from megaflow_hpc.training.plan import Added, Refill, TaskBatch, TrainingFiles
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.training.readiness import Peer, Readiness
from megaflow_hpc.types import round_of

ASYNCHRONOUS_BATCHES = 4
"""Number of batches in flight in asynchronous training, in which staleness is unbounded. Large enough to keep pods
busy, and small enough to keep samples reasonably fresh."""
FIRST_ADDED_ROUND = 10**9
"""Lowest round number for tasks that a trainer adds."""
FIRST_REFILL_ROUND = 10**10
"""Lowest round number for tasks that a step requests to replace dropped groups."""
MAX_REFILLS = 1000
"""Maximum number of refills per step. Each refill has its own round number, and this many are reserved."""


class StalenessControl:
    """Requests one policy's batches of tasks as early as its staleness bound allows.

    Args:
        files: records of the batches.
        policy: the policy to train.
        config: the section ``training``.
        readiness: the engines of the run.
        helpers: the policies that learn from this policy's groups.
    """

    def __init__(
        self,
        files: TrainingFiles,
        policy: TrainedPolicy,
        config: TrainingConfig,
        readiness: Readiness,
        helpers: Sequence[Peer] = (),
    ) -> None:
        self._files, self._policy, self._config = files, policy, config
        self.steps = config.steps
        """Number of training steps. An amendment may change it."""
        self._readiness, self._helpers = readiness, helpers
        self.waits_for = ""
        """Describes what the next request is waiting for. Empty if no request is due."""
        self._prompts = Prompts(config.prompts, policy.pass_threshold)
        self._versions: dict[tuple[type[TaskBatch], int], int] = {}
        """Maps the kind and number of a request to the index of the newest weights at the time of the request."""
        self._added = max(0, *files.numbers(TaskBatch), 0)
        """Number of batches whose blocks exist in the ledger. A crash may have prevented those of the last recorded
        batch."""
        self._refills_are_complete = False
        """True once the ledger has the blocks of all refills. A crash may have prevented those of the last recorded
        refill."""

    @property
    def ahead(self) -> int:
        """Number of batches in flight, without the batch of the next step."""
        bound = self._config.staleness
        return ASYNCHRONOUS_BATCHES if bound is None else bound

    def is_due(self, rounds: Collection[int], version: int) -> bool:
        """Returns whether groups from these rounds must be used in the next step, because they would be too old
        afterwards.

        Args:
            version: index of the newest weights.
        """
        bound = self._config.staleness
        records = {self._record_of(round) for round in rounds}
        return bound is not None and any(version - self._version_of(*record) >= bound for record in records)

    def due(self, complete: Sequence[SampleGroup], version: int) -> set[str]:
        """Returns the ids of complete groups that the next step must use because of helpers' tokens in them.

        A helper's tokens may be older than this policy's tokens, but not older than the request.
        """
        groups = complete if self._helpers else ()
        return {group.id for group in groups if self.is_due({round_of(group.task, group.id)}, version)}

    def settles(self, step: int, complete: Sequence[SampleGroup], open_groups: int, version: int) -> int:
        """Returns how many groups a step must settle so that no group becomes too old for the next step.

        Args:
            complete: the complete groups.
            open_groups: number of unsettled groups, complete or not.
            version: index of the newest weights.
        """
        bound = self._config.staleness
        if bound is None:
            return 0
        due = self.due(complete, version)
        later_batches = [number for number in self._files.numbers(TaskBatch) if number >= step]
        batches = [self.batch(number) for number in later_batches]
        counted_on = sum(len(batch.tasks) for batch in batches if batch)
        late = sum(version - group.oldest >= bound or group.id in due for group in complete)
        return min(late, open_groups - counted_on)  # the remaining groups are needed by later steps

    def want(self, step: int) -> int:
        """Returns the size of the step's batch, which is the number of groups that the step waits for."""
        batch = self.batch(step - 1)
        return len(batch.tasks) if batch else self._config.batch

    def _record_of(self, round: int) -> tuple[type[TaskBatch], int]:
        """Returns the kind and number of the request to which a round belongs."""
        if round < FIRST_ADDED_ROUND:
            return TaskBatch, round // self._config.batch
        if round < FIRST_REFILL_ROUND:
            return Added, round - FIRST_ADDED_ROUND
        return Refill, (round - FIRST_REFILL_ROUND) // self._config.batch

    def _version_of(self, kind: type[TaskBatch], number: int) -> int:
        if (kind, number) not in self._versions:
            record = self._files.read(kind, number)
            self._versions[kind, number] = record.version if record else 0
        return self._versions[kind, number]

    def keep(self, committed: int, learned: dict[str, object]) -> None:
        """Requests the batches that are due, and completes a refill that a crash interrupted.

        Args:
            committed: number of committed steps.
            learned: state of task selection after the steps planned so far.

        Raises:
            OSError: the run directory is unavailable. The next call continues.
        """
        if not self._refills_are_complete:
            number, refill = self._last_refill()
            if refill:
                self._add_blocks(refill, f"refill.{number:06d}")  # does nothing for existing blocks
            self._refills_are_complete = True
        self.waits_for = ""
        while self._added < min(committed + 1 + self.ahead, self.steps):
            if not self.may_request(self._added - self.ahead):
                return
            self._add(self._added, learned)
            self._added += 1

    def may_request(self, commits: int) -> bool:
        """Returns whether rollouts requested now would satisfy the staleness bound. If not, sets :attr:`waits_for` to
        the reason.

        Args:
            commits: number of steps that helpers must have committed.
        """
        self.waits_for = ""
        sampling = [self._policy.name]
        for helper in self._helpers:
            if helper.ended:
                continue
            if helper.committed < commits:
                self.waits_for = helper.waited_for(f"commit step {commits}")
                return False
            sampling.append(helper.policy)
        if self._config.staleness is not None:
            missing = (self._readiness.engines(policy).missing for policy in sampling)
            self.waits_for = next(filter(None, missing), "")
        return not self.waits_for

    def add(self, tasks: Sequence[str], token: str, samples: int | None = None) -> None:
        """Requests tasks in addition to the batches that are due. A repeated call with the same token has no effect.

        Raises:
            LedgerError: the token is not a valid file name, or was used for other tasks.
            OSError: the run directory is unavailable. The call may be repeated.
        """
        number = zlib.crc32(token.encode())
        version = self._version()
        chosen = [(task, FIRST_ADDED_ROUND + number) for task in tasks]
        added = Added(batch=self._added, tasks=chosen, samples=samples or self._policy.samples, version=version)
        self._files.claim(number, added)  # before its blocks, so that their age is known once they exist
        self._add_blocks(added, f"added.{token}")

    def refills(self, step: int) -> int:
        """Returns the number of refills that a step has requested so far."""
        return sum(number // MAX_REFILLS == step for number in self._files.numbers(Refill))

    def refill(self, step: int, count: int, learned: dict[str, object]) -> bool:
        """Requests up to ``count`` further tasks for a step. Returns false if no task was left to request.

        Args:
            count: at most the size of a batch.

        Raises:
            OSError: the run directory is unavailable. The next :meth:`keep` completes the request.
        """
        number = step * MAX_REFILLS + self.refills(step)
        first_round = FIRST_REFILL_ROUND + number * self._config.batch
        tasks, version, state = self._choose(self._added, count, first_round, learned, [3, number])
        if not tasks:
            return False
        refill = Refill(batch=self._added, tasks=tasks, samples=self._policy.samples, version=version, state=state)
        self._refills_are_complete = False
        self._add_blocks(self._files.claim(number, refill), f"refill.{number:06d}")
        self._refills_are_complete = True
        return True

    def batch(self, number: int) -> TaskBatch | None:
        """Returns a batch by its number, counted from 0, or ``None`` if it has not been requested yet."""
        return self._files.read(TaskBatch, number)

    def _last_refill(self) -> tuple[int, Refill | None]:
        """Returns the number and the record of the last refill, or ``(0, None)`` before the first refill."""
        number = max(self._files.numbers(Refill), default=0)
        return number, self._files.read(Refill, number)

    def _add(self, number: int, learned: dict[str, object]) -> None:
        batch = self.batch(number)
        if batch is None:
            first, count = number * self._config.batch, self._config.batch
            tasks, version, state = self._choose(number, count, first, learned, [1, number])
            batch = TaskBatch(batch=number, tasks=tasks, samples=self._policy.samples, version=version, state=state)
            batch = self._files.claim(number, batch)
        self._add_blocks(batch, f"{number:06d}")

    def _add_blocks(self, batch: TaskBatch, token: str) -> None:
        random = np.random.default_rng([self._policy.seed, 4, zlib.crc32(token.encode())])
        rollouts = self._policy.rollouts(batch.tasks, batch.samples, random)
        if rollouts:  # empty if no task is left to request
            token = f"{self._policy.name}.{token}"
            add_blocks(self._files.run, rollouts, token=token, pods=self._policy.pods)

    def _choose(
        self, batches: int, count: int, first: int, learned: dict[str, object], seed: list[int]
    ) -> tuple[list[tuple[str, int]], int, dict[str, Any]]:
        """Chooses tasks. Returns (task, round) pairs, the result of :meth:`_version`, and the new state of task
        selection.

        Args:
            batches: number of batches requested earlier.
            first: the first round number.
        """
        earlier: TaskBatch | None = self._last_refill()[1]
        if earlier is None or earlier.batch != batches:
            earlier = self.batch(batches - 1)
        before = {**(earlier.state if earlier else {}), **learned}
        random = np.random.default_rng([self._policy.seed, *seed])
        chosen, state = self._prompts.choose(self._policy.tasks, count, before, random)
        times: Counter[str] = Counter()
        tasks = []
        for task in chosen:
            tasks.append((task, first + times[task]))  # enough rounds are reserved for repeated tasks
            times[task] += 1
        return tasks, self._version(), state

    def _version(self) -> int:
        """Returns the index of the oldest weights that may sample tokens from now on.

        A helper's steps count as versions, because a helper publishes at most one version per step.
        """
        helpers = [helper.committed for helper in self._helpers if not helper.ended]
        return min([self._readiness.ordinal(self._policy.name), *helpers])
