"""Rank 0's part of the dataflow: it requests rollouts, follows them, and plans steps of complete groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.algorithms import Prompts, advantages, choose
from megaflow_hpc.training.algorithms.advantage import Values
from megaflow_hpc.training.algorithms.choice import REPLAYED_STEPS, Choice
from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup
from megaflow_hpc.training.buffer import Arrived, Buffer, Sequences
from megaflow_hpc.training.microbatch import Ordinal
from megaflow_hpc.training.plan import PlannedRollout, Settled, StepPlan, TrainingFiles
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.training.staleness import FIRST_REFILL_ROUND, StalenessControl


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
        self._config, self._policy, self.buffer = config, policy, buffer
        self._prompts = Prompts(config.prompts, policy.pass_threshold)
        self.learned = learned
        self.lacks = 0
        """Number of groups missing when the last plan could not be made."""
        replays = any(step.replay for step in config.data)
        self._replayable = REPLAYED_STEPS * config.batch if replays else 0
        self._used: deque[tuple[SampleGroup, dict[str, Arrived]]] = deque(maxlen=self._replayable)
        """Groups that may be replayed, newest last."""
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
        """Returns the plan of a step. If groups are missing, sets :attr:`lacks` to their number and returns ``None``.

        Args:
            version: ordinal of the newest weights.
            want: number of groups that the step waits for and settles, whether it trains on them or drops them.
            least: minimum number of groups to settle, oldest first, if more than ``want`` are complete.
            last: no more rollouts will arrive, so fewer groups are enough.
            replace: do not count dropped groups towards ``want``.
            short: accept fewer groups to train on if ``want`` groups are complete.
        """
        complete = self.buffer.complete()
        self.lacks = want - len(complete)
        if not complete or not want or (self.lacks > 0 and not last):
            return None
        settles = max(want, least)
        choice = self._choose(step, version, complete, settles)
        if replace:
            while len(choice.taken) < want and settles < len(complete):
                settles += want - len(choice.taken)
                choice = self._choose(step, version, complete, settles)
            if len(choice.taken) < want and not (last or short):
                self.lacks = want - len(choice.taken)
                return None
        arrived = dict(self.buffer.arrived)
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
        self.buffer.settle(group.id for group in settled)
        return StepPlan(
            step=step,
            version=version,
            seed=self._seed(step),
            rollouts=rollouts,
            drops=choice.drops,
            settled=self.buffer.settled,
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


def _planned(sample: Sample, arrived: Arrived, valued: tuple[Values, float], replayed: bool) -> PlannedRollout:
    value, weight = valued
    advantages: list[float] = [] if isinstance(value, float) else value.tolist()
    by_turn = bool(advantages) and len(advantages) == len(sample.turns)
    spans = [turn.end - turn.start for turn in sample.turns] if by_turn else arrived.sampled
    advantage = value if isinstance(value, float) else float(np.average(value, weights=np.maximum(spans, 1)))
    return PlannedRollout(
        id=sample.id,
        task=sample.task,
        group=sample.group,
        place=arrived.place,
        reward=None if sample.reward != sample.reward else sample.reward,
        advantage=advantage,
        advantages=advantages,
        turns=[(turn.sequence, turn.start, turn.end) for turn in sample.turns] if by_turn else [],
        weight=weight,
        oldest=sample.oldest,
        replayed=replayed,
        lengths=list(arrived.lengths),
        sampled=list(arrived.sampled),
    )


class Planning:
    """Requests and plans for one policy.

    Args:
        run: the run directory.
        files: where plans and requests are recorded.
        policy: the policy that is trained.
        config: the section ``training``.
        requests: whether to request rollouts. Otherwise, those that the campaign planned are used as they arrive.
        sequences: reads token sequences.
        ordinal: converts a campaign-wide weight version to the policy's own count.
    """

    def __init__(
        self,
        run: RunDir,
        files: TrainingFiles,
        policy: TrainedPolicy,
        config: TrainingConfig,
        requests: bool,
        sequences: Sequences,
        ordinal: Ordinal,
    ) -> None:
        self._run, self._files, self._policy, self._config = run, files, policy, config
        self._requests, self._sequences, self._ordinal = requests, sequences, ordinal
        self._flags = Marks(run)
        self._planner: Planner | None = None
        """Rollouts not settled by any plan. Rebuilt from the last plan when needed."""
        self.control = StalenessControl(files, policy, config)
        self.exhausted = False
        """True if no task is left to replace dropped groups."""

    def request(self, committed: int, say: Callable[[str], None]) -> None:
        """Requests the batches that are due.

        Args:
            committed: number of the last step that is committed.
            say: called with a line if requests are waiting for engines.

        Raises:
            OSError: the run directory does not answer; the next call continues.
        """
        if self._requests:
            self.control.keep(committed, self._learned_prompts(), say)

    def wanted(self, step: int) -> int:
        """Returns the number of groups that a step waits for."""
        return self.control.want(step) if self._requests else self._config.batch

    @property
    def complete_groups(self) -> int:
        """Number of complete groups that are not in a plan."""
        return len(self._planner.buffer.complete()) if self._planner else 0

    @property
    def open_groups(self) -> int:
        """Number of groups that are not in a plan, complete or not."""
        return self._planner.buffer.open_groups if self._planner else 0

    @property
    def journals(self) -> int:
        """Number of journals that each poll has to stat."""
        return self._planner.buffer.journals if self._planner else 0

    def plan(self, step: int, trainer: int) -> StepPlan | None:
        """Returns the plan of a step, or ``None`` while its rollouts are missing.

        If another trainer has claimed the step in the meantime, that trainer's plan is returned.

        Args:
            step: number of the step, from 1.
            trainer: number of this trainer's start.

        Raises:
            OSError: the run directory does not answer; the next call continues.
        """
        if self._planner is None:
            self._planner = self._new_planner(step)
        planner = self._planner
        over = self._flags.over  # read before polling, so that the poll covers every rollout stored until then
        planner.buffer.poll()
        version = self._ordinal(current(self._run, self._policy.name).version)
        if self._requests and not over and self.control.is_due(planner.buffer.rounds_under_way(), version):
            return None
        plan = self._planned(planner, step, version, trainer, over)
        if plan is None:
            return None
        claimed = self._files.claim(step, plan)
        if claimed is not plan:
            self._planner = None  # the other plan decides which groups are settled
        return claimed

    def _learned_prompts(self) -> dict[str, object]:
        learned: dict[str, object] = self._planner.learned.get("prompts", {}) if self._planner else {}
        return learned

    def _new_planner(self, step: int) -> Planner:
        """Returns a planner that holds the rollouts left unsettled before ``step``."""
        before = self._files.read(StepPlan, step - 1)
        settled, learned = (before.settled, before.state) if before else (Settled(), {})
        policy = self._policy
        buffer = Buffer(self._run, self._sequences, policy.owners, self._ordinal, settled, policy.held_out)
        plans = (self._files.read(StepPlan, number) for number in range(step - 1, 0, -1))
        earlier = (plan for plan in plans if plan is not None)
        return Planner(self._config, policy, buffer, learned, earlier)

    def _planned(self, planner: Planner, step: int, version: int, trainer: int, over: bool) -> StepPlan | None:
        """Plans the step if enough groups are complete, and requests replacements for dropped groups."""
        buffer, control = planner.buffer, self.control
        max_refills = self._config.refill if self._requests else 0
        want, complete = self.wanted(step), buffer.complete()
        under_way = buffer.open_groups - len(complete) if max_refills else 0  # this polls for new blocks
        refills_used_up = bool(max_refills) and control.refills(step) >= max_refills
        newest_round = max(buffer.rounds_under_way(), default=0)
        refill_under_way = refills_used_up and newest_round >= FIRST_REFILL_ROUND
        least = 0
        if self._requests and len(complete) > want:
            least = control.settles(step, complete, buffer.open_groups, version)

        def plan(last: bool, short: bool = False) -> StepPlan | None:
            replace = bool(max_refills)
            return planner.plan(step, version, want, trainer, least, last=last, replace=replace, short=short)

        made = plan(last=over, short=refills_used_up and not refill_under_way)
        is_requested = control.batch(step - 1) is not None
        if made is not None or over or not max_refills or not is_requested:
            return made
        lacks = planner.lacks - under_way
        if lacks <= 0 or refill_under_way:
            return None
        if control.refill(step, lacks, self._learned_prompts()) or under_way:
            return None
        self.exhausted = not complete
        return plan(last=True)
