"""How fast rollouts are asked for: by adding blocks, never by throwing away what was sampled.

Each batch of tasks is one step's worth. Under a staleness bound k, the batch of step s is asked for when step s - 1 - k
is committed. A step takes the groups that are complete first; where one that is not would be older than k in the step
after, the step waits for it. k = 0 is synchronous training, and there a batch also waits until every engine has loaded
the version.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.ledger.blocks import add_blocks
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.algorithms import Prompts
from megaflow_hpc.training.plan import Batch, TrainingFiles
from megaflow_hpc.types import Rollout

AHEAD = 4
"""Batches that are under way in asynchronous training, which has no bound: enough that pods never wait, and few enough
that what they sample is still of use."""
ADDED = 10**9
"""Round from which on tasks are numbered that a trainer asks for by itself."""


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
        self._versions: dict[int, int] = {}
        """Batch → ordinal of the newest weights when it was asked for."""
        self._added = max(0, *files.numbers(Batch), 0)
        """Batches whose blocks are known to be there; of the last one that is written down they may not be."""

    @property
    def ahead(self) -> int:
        """Batches under way beside the one that the next step is for."""
        bound = self._config.mode.bound
        return AHEAD if bound is None else bound * self._config.publish.every

    def is_due(self, rounds: Iterable[int], version: int) -> bool:
        """Whether one of these rounds must be in the next step, lest it is too old in the one after.

        Args:
            version: ordinal of the newest weights.
        """
        bound = self._config.mode.bound
        if bound is None:
            return False
        batches = {number // self._config.batch.tasks for number in rounds if number < ADDED}
        return any(version - self._version_of(number) >= bound for number in batches)

    def _version_of(self, number: int) -> int:
        if number not in self._versions:
            batch = self.batch(number)
            self._versions[number] = batch.version if batch else 0
        return self._versions[number]

    def keep(self, committed: int, learned: dict[str, object], say: Callable[[str], None]) -> None:
        """Asks for what is due now that so many steps are committed.

        Args:
            learned: what the choice of tasks has learned from the steps planned so far.
            say: gets a line when it has to wait for engines.

        Raises:
            OSError: the run directory does not answer; the next call goes on.
        """
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
        round = ADDED + zlib.crc32(token.encode())
        rollouts = [
            Rollout(task, self._policy, sample, self._agent, round)
            for task in tasks
            for sample in range(samples or self._samples)
        ]
        add_blocks(self._files.run, rollouts, token=f"{self._policy}.added.{token}", pods=self._pods)

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
        batch = self.batch(number) or self._files.claim(number, self._choose(number, learned))
        rollouts = [
            Rollout(task, self._policy, sample, self._agent, round)
            for task, round in batch.tasks
            for sample in range(batch.samples)
        ]
        add_blocks(self._files.run, rollouts, token=f"{self._policy}.{number:06d}", pods=self._pods)

    def _choose(self, number: int, learned: dict[str, object]) -> Batch:
        batch = self._config.batch
        earlier = self.batch(number - 1) if number else None
        random = np.random.default_rng([self._config.seed, 1, number])
        state = {**(earlier.state if earlier else {}), **learned}
        chosen, state = self._prompts.choose(self._tasks, batch.tasks, state, random)
        times: dict[str, int] = {}
        tasks = []
        for task in chosen:
            times[task] = times.get(task, -1) + 1
            tasks.append((task, number * batch.tasks + times[task]))  # no batch asks for one task more often
        version = current(self._files.run, self._policy).ordinal
        return Batch(batch=number, tasks=tasks, samples=self._samples, version=version, state=state)
