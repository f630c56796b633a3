"""Makes the plan of a step from the buffer: the groups to train on, their advantages, and the drops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.training.algorithms import Prompts, advantages, choose
from megaflow_hpc.training.algorithms.choice import Choice
from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup
from megaflow_hpc.training.buffer import Arrived, Buffer
from megaflow_hpc.training.plan import PlannedRollout, StepPlan
from megaflow_hpc.training.policy import TrainedPolicy


class Planner:
    """Applies the data algorithms of one policy to its buffer.

    Args:
        learned: state of the algorithms after the last plan.
        earlier: earlier plans, the latest first; read only as far as replay needs.
    """

    def __init__(
        self,
        config: TrainingConfig,
        policy: TrainedPolicy,
        buffer: Buffer,
        learned: dict[str, Any],
        earlier: Iterable[StepPlan] = (),
    ) -> None:
        self._config, self._policy, self._buffer = config, policy, buffer
        self._prompts = Prompts(config.prompts, policy.pass_threshold)
        self.learned = learned
        self.lacks = 0
        """Number of groups that the last plan lacked, if none was made."""
        self._replayable = next((step.replay.size for step in config.data if step.replay), 0)
        self._used: deque[tuple[SampleGroup, dict[str, Arrived]]] = deque(maxlen=self._replayable)
        """Groups that may be replayed, the latest last."""
        for plan in earlier if self._replayable else ():
            for group in reversed(buffer.read_groups(plan)):
                self._used.appendleft(group)
            if len(self._used) == self._replayable:
                break

    def plan(
        self,
        step: int,
        version: int,
        want: int,
        trainer: int,
        least: int = 0,
        last: bool = False,
        replace: bool = False,
        short: bool = False,
    ) -> StepPlan | None:
        """Returns the plan of a step; ``None`` if groups are missing, whose number is then in :attr:`lacks`.

        Args:
            version: ordinal of the newest weights.
            want: number of groups that the step waits for and settles, whether it trains on them or drops them.
            least: minimum number of groups to settle, oldest first, if more than ``want`` are complete.
            last: no more rollouts will come, so fewer groups are enough.
            replace: dropped groups do not count towards ``want``.
            short: fewer undropped groups are enough if ``want`` groups are complete.
        """
        complete = self._buffer.complete()
        self.lacks = want - len(complete)
        if not complete or not want or (self.lacks > 0 and not last):
            return None
        settles = max(want, least)
        choice = self._choose(step, version, complete, settles)
        while replace and (lacks := want - len(choice.taken)) > 0 and settles < len(complete):
            settles += lacks
            choice = self._choose(step, version, complete, settles)
        if replace and (lacks := want - len(choice.taken)) > 0 and not (last or short):
            self.lacks = lacks
            return None
        arrived = dict(self._buffer.arrived)
        for _, earlier in self._used:
            arrived.update(earlier)
        again = {group.id for group in choice.replayed}
        groups = [*choice.taken, *choice.replayed]
        valued = advantages(self._policy.settings, groups)
        rollouts = [
            _planned(sample, arrived[sample.id], valued[sample.id], group.id in again)
            for group in groups
            for sample in group.samples
            if sample.id in valued and sample.tokens
        ]
        left = {group.id for group in choice.left}
        settled = [group for group in complete if group.id not in left]
        self.learned = {
            "data": choice.state,
            "prompts": self._prompts.learn(self.learned.get("prompts", {}), settled),
        }
        if self._replayable:
            for group in choice.taken:
                self._used.append((group, {sample.id: arrived[sample.id] for sample in group.samples}))
        self._buffer.settle(group.id for group in settled)
        return StepPlan(
            step=step,
            version=version,
            seed=self._seed(step),
            rollouts=rollouts,
            drops=choice.drops,
            settled=self._buffer.settled,
            state=self.learned,
            trainer=trainer,
        )

    def _seed(self, step: int) -> list[int]:
        return [self._policy.seed, 2, step]

    def _choose(self, step: int, version: int, complete: list[SampleGroup], settles: int) -> Choice:
        return choose(
            self._config,
            complete,
            version=version,
            want=settles,
            replayed=[group for group, _ in self._used],
            state=self.learned.get("data", {}),
            random=np.random.default_rng(self._seed(step)),
            advantage=self._policy.settings.advantage,
            pass_threshold=self._policy.pass_threshold,
        )


def _planned(sample: Sample, arrived: Arrived, valued: tuple[float, float], replayed: bool) -> PlannedRollout:
    advantage, weight = valued
    return PlannedRollout(
        id=sample.id,
        task=sample.task,
        group=sample.group,
        place=arrived.place,
        reward=None if sample.reward != sample.reward else sample.reward,
        advantage=advantage,
        weight=weight,
        oldest=sample.oldest,
        replayed=replayed,
        lengths=list(arrived.lengths),
        sampled=list(arrived.sampled),
    )
