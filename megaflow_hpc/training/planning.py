"""Requests rollouts, follows their arrival, and plans steps from complete groups. Runs on rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.training.algorithms import Prompts, advantages, choose
from megaflow_hpc.training.algorithms.choice import REPLAYED_STEPS, Choice
from megaflow_hpc.training.algorithms.rewards import Values, role_rewards
from megaflow_hpc.training.algorithms.samples import RoleRewards, Sample, SampleGroup
from megaflow_hpc.training.buffer import Arrived, Buffer, Sequences
from megaflow_hpc.training.methods import identity, takes
from megaflow_hpc.training.microbatch import Ordinal
from megaflow_hpc.training.plan import PlannedRollout, RecordPlace, Settled, StepPlan, TrainingFiles
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.training.readiness import Peer, Readiness
from megaflow_hpc.training.staleness import FIRST_REFILL_ROUND, StalenessControl

KEPT_SUCCESSES = 2
"""Number of passed rollouts to keep per task and agent from earlier steps, if a ``data`` function uses them."""
NO_TASK_LEFT = "no task is left to request (training.prompts)"


class Planner:
    """Plans one policy's steps by applying data algorithms to the groups in the policy's buffer.

    Args:
        learned: state of the algorithms after the last plan.
        earlier: earlier plans, newest first. Iterated only as far as needed for replay.
        bound: maximum staleness of rollouts in versions. Older rollouts are dropped. ``None`` means no maximum.
    """

    def __init__(
        self,
        config: TrainingConfig,
        policy: TrainedPolicy,
        buffer: Buffer,
        learned: dict[str, Any],
        earlier: Iterable[StepPlan],
        bound: int | None,
    ) -> None:
        self._bound = bound
        self._config, self._policy, self.buffer = config, policy, buffer
        self._prompts = Prompts(config.prompts, policy.pass_threshold, policy.roles)
        self.learned = learned
        self.lacks = 0
        """Number of missing groups at the latest call of :meth:`plan` that returned ``None``."""
        replays = any(step.replay for step in config.data)
        self._replayable = REPLAYED_STEPS * config.batch if replays else 0
        score = policy.settings.score
        self._scorer = identity(score) if score else ""
        self._keeps_successes = any(step.method and takes(step.method, "earlier") for step in config.data)
        self._read: dict[RecordPlace, tuple[Sample, Arrived] | None] = {}
        """Caches passed rollouts of earlier steps, by location of the record. ``None`` if the record is damaged."""
        self._used: deque[tuple[SampleGroup, dict[str, Arrived]]] = deque(maxlen=self._replayable)
        """Groups that may be replayed, newest last. Stored as they were before their step's ``data`` operations."""
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
        only: Collection[str] | None = None,
        due: Collection[str] = (),
    ) -> StepPlan | None:
        """Returns the plan of a step. Returns ``None`` if groups are missing, and sets :attr:`lacks` to their number.

        Args:
            version: index of the policy's newest weights.
            want: number of groups that the step waits for and settles. It trains on them or drops them.
            least: minimum number of groups to settle, oldest first, if more than ``want`` are complete.
            last: true if no more rollouts will arrive. Fewer groups then suffice.
            replace: do not count dropped groups towards ``want``.
            short: accept fewer groups to train on, provided that ``want`` groups are complete.
            only: ids of the groups that the step may settle. Default: all groups.
            due: ids of the groups to settle first.
        """
        complete = [group for group in self.buffer.complete() if only is None or group.id in only]
        self.lacks = want - len(complete)
        if not complete or not want or (self.lacks > 0 and not last):
            return None
        earlier = self._earlier(complete)

        def choose_among(settles: int) -> Choice:
            return choose(
                self._config,
                complete,
                version=version,
                want=settles,
                replayed=[group for group, _ in self._used],
                state=self.learned.get("data", {}),
                random=np.random.default_rng(seed),
                advantage=self._policy.settings.advantage,
                pass_threshold=self._policy.pass_threshold,
                bound=self._bound,
                due=due,
                earlier=earlier,
                roles=self._policy.roles,
            )

        seed, settles = [self._policy.seed, 2, step], max(want, least)
        choice = choose_among(settles)
        if replace:
            while len(choice.taken) < want and settles < len(complete):
                settles += want - len(choice.taken)
                choice = choose_among(settles)
            if len(choice.taken) < want and not (last or short):
                self.lacks = want - len(choice.taken)
                return None
        arrived = dict(self.buffer.arrived)
        stored = {sample.id: sample for group in complete for sample in group.samples}
        for group, used in self._used:
            arrived |= used
            stored |= {sample.id: sample for sample in group.samples}
        kept = {sample.id: (sample, place) for sample, place in filter(None, self._read.values())}
        arrived |= {id: place for id, (_, place) in kept.items()}
        stored |= {id: sample for id, (sample, _) in kept.items()}
        again = {sample.id for group in choice.replayed for sample in group.samples} | kept.keys()
        groups, roles = [*choice.taken, *choice.replayed], self._policy.roles
        valued = advantages(self._policy.settings, groups, roles)
        rollouts = [
            _planned(sample, stored[sample.id], arrived[sample.id], valued[sample.id], sample.id in again, roles)
            for group in groups
            for sample in group.samples
            if sample.id in valued and sample.tokens
        ]
        left = {group.id for group in choice.left}
        settled = [group for group in complete if group.id not in left]
        successes = self.learned.get("successes", {})
        self.learned = {
            "data": choice.state,
            "prompts": self._prompts.learn(self.learned.get("prompts", {}), settled),
        }
        if self._keeps_successes:
            self.learned["successes"] = self._with_successes(successes, settled, choice.drops)
        if self._replayable:
            for group in choice.taken:
                own = group.only(tuple(stored[sample.id] for sample in group.samples if sample.id not in kept))
                self._used.append((own, {sample.id: arrived[sample.id] for sample in own.samples}))
        self.buffer.settle(group.id for group in settled)
        return StepPlan(
            step=step,
            version=version,
            seed=seed,
            rollouts=rollouts,
            drops=choice.drops,
            settled=self.buffer.settled,
            state=self.learned,
            trainer=trainer,
            scorer=self._scorer,
        )

    def _earlier(self, groups: Iterable[SampleGroup]) -> dict[str, list[Sample]]:
        """Reads passed rollouts of earlier steps for the groups' tasks. Returns them by task, and omits damaged
        records."""
        before, self._read = self._read, {}
        tasks = {group.task for group in groups}
        earlier: dict[str, list[Sample]] = {}
        for task, successes in self.learned.get("successes", {}).items():
            for fields, scores, _ in successes if task in tasks else ():
                place = RecordPlace(*fields)
                read = self._read[place] = before[place] if place in before else self.buffer.read(place, scores)
                if read:
                    earlier.setdefault(task, []).append(read[0])
        return earlier

    def _with_successes(
        self, kept: Mapping[str, list[Any]], settled: Iterable[SampleGroup], drops: Collection[str]
    ) -> dict[str, list[Any]]:
        """Updates the record of passed rollouts after a step settled the groups. For each task, it contains (location,
        scores, agent) of each agent's newest passed rollouts."""
        successes = dict(kept)
        passed = [
            sample
            for group in settled
            for sample in group.samples
            if sample.tokens and sample.id not in drops and sample.reward >= self._policy.pass_threshold
        ]
        for sample in sorted(passed, key=lambda sample: (sample.time_ns, sample.id)):
            place = list(msgspec.structs.astuple(self.buffer.arrived[sample.id].place))
            before = successes.get(sample.task, [])
            own = [success for success in before if success[2] == sample.agent]
            others = [success for success in before if success[2] != sample.agent]
            own.append([place, dict(sample.scores), sample.agent])
            successes[sample.task] = [*others, *own[-KEPT_SUCCESSES:]]
        return successes

    def has_stale(self, version: int) -> bool:
        """Returns whether a complete group has tokens that exceed the maximum staleness."""
        oldest = min((group.oldest for group in self.buffer.complete() if group.oldest >= 0), default=version)
        return self._bound is not None and version - oldest > self._bound


def _planned(
    sample: Sample, stored: Sample, arrived: Arrived, valued: tuple[Values, float], replayed: bool, roles: RoleRewards
) -> PlannedRollout:
    """Returns a sample's entry in the plan.

    Args:
        stored: the sample before the ``data`` operations, which may have changed its rewards.
    """
    value, weight = valued
    verified = stored.verdict if stored.scores else stored.reward
    advantages: list[float] = [] if isinstance(value, float) else value.tolist()
    by_turn = bool(advantages) and len(advantages) == len(sample.turns)
    spans = [turn.end - turn.start for turn in sample.turns] if by_turn else arrived.sampled
    advantage = value if isinstance(value, float) else float(np.average(value, weights=np.maximum(spans, 1)))
    return PlannedRollout(
        id=sample.id,
        task=sample.task,
        group=sample.group,
        agent=sample.agent,
        place=arrived.place,
        reward=None if verified != verified else verified,
        scores=dict(sample.scores),
        advantage=advantage,
        advantages=advantages,
        turns=[(turn.sequence, turn.start, turn.end) for turn in sample.turns] if by_turn else [],
        roles=role_rewards(stored, roles),
        weight=weight,
        oldest=sample.oldest,
        replayed=replayed,
        lengths=list(arrived.lengths),
        sampled=list(arrived.sampled),
    )


class Planning:
    """Requests the rollouts of one policy and plans its steps.

    Args:
        run: the run directory.
        files: records of plans and requests.
        policy: the policy to train.
        config: the section ``training``.
        paced: true if the campaign file defines the training, so that its staleness bound applies. If false, rollouts
            are used as they arrive, regardless of age.
        sequences: reads token sequences.
        ordinal: converts a campaign-wide weight version to its index among the policy's versions.
    """

    def __init__(
        self,
        run: RunDir,
        files: TrainingFiles,
        policy: TrainedPolicy,
        config: TrainingConfig,
        paced: bool,
        sequences: Sequences,
        ordinal: Ordinal,
    ) -> None:
        self._run, self._files, self._policy, self._config = run, files, policy, config
        self._sequences, self._ordinal = sequences, ordinal
        self._requests = paced and policy.samples > 0
        self._uses_up = paced and not policy.samples
        """True if the policy requests no rollouts itself. Its training ends once all groups are used."""
        self._bound = config.staleness if paced else None
        self._owners = [Peer(run, owner) for owner in policy.followed] if paced else []
        self._readiness = Readiness(run)
        self._flags = Marks(run)
        self._planner: Planner | None = None
        """Plans steps from the unsettled rollouts. Rebuilt from the last plan when needed."""
        helpers = [Peer(run, helper) for helper in policy.helpers] if paced else []
        self.control = StalenessControl(files, policy, config, self._readiness, helpers)
        self.ends = ""
        """Reason why no further step can be planned. Empty if further steps are possible."""
        self._waits_for = ""

    def request(self, committed: int) -> None:
        """Requests the rollouts that are due.

        Args:
            committed: number of the last committed step.

        Raises:
            OSError: the run directory is unavailable. The next call continues.
        """
        if self._requests:
            self.control.keep(committed, self._learned_prompts())

    def wanted(self, step: int) -> int:
        """Returns the number of groups that a step waits for."""
        return self.control.want(step) if self._requests else self._config.batch

    def missing(self, step: int) -> str:
        """Describes what a step is waiting for, in a phrase for log lines."""
        if self._waits_for:
            return self._waits_for
        complete, wanted = self.complete_groups, self.wanted(step)
        text = f"rollouts: {complete} of {wanted} groups are complete, {self.open_groups - complete} are under way"
        return text + (f"; the next request waits for {self.control.waits_for}" if self.control.waits_for else "")

    @property
    def complete_groups(self) -> int:
        """Number of complete groups that no plan has used yet."""
        return len(self._planner.buffer.complete()) if self._planner else 0

    @property
    def open_groups(self) -> int:
        """Number of groups that no plan has used yet, complete or not."""
        return self._planner.buffer.open_groups if self._planner else 0

    @property
    def journals(self) -> int:
        """Number of journal files that each poll checks for new records."""
        return self._planner.buffer.journals if self._planner else 0

    def plan(self, step: int, trainer: int) -> StepPlan | None:
        """Returns the plan of a step, or ``None`` if rollouts are missing.

        If another start of the trainer has stored a plan for the step in the meantime, returns that plan.

        Args:
            step: number of the step, from 1.
            trainer: sequence number of this trainer start.

        Raises:
            OSError: the run directory is unavailable. The next call continues.
        """
        if self._planner is None:
            self._planner = self._new_planner(step)
        planner, self._waits_for = self._planner, ""
        over = self._flags.over  # read first, so that the poll covers every rollout stored before
        followed = self._followed(step) if self._owners else set()
        planner.buffer.poll()
        version = self._readiness.ordinal(self._policy.name)
        if followed is None or (not over and self._must_wait(planner, version)):
            return None
        plan = self._planned(planner, step, version, trainer, over, followed)
        if plan is None:
            return None
        claimed = self._files.claim(step, plan)
        if claimed is not plan:
            self._planner = None  # the other trainer's plan has settled other groups
        return claimed

    def _followed(self, step: int) -> set[str] | None:
        """For a helper policy, returns the groups that the owners use in this step. Owners are the policies that run
        tasks. Returns ``None`` if an owner has not planned the step yet, or if no group is left."""
        groups: set[str] = set()
        for owner in self._owners:
            ended = owner.ended  # read first, because an ended trainer plans no further step
            planned = owner.groups(step)
            if planned is None and not ended:
                self._waits_for = owner.waited_for(f"plan step {step}")
                return None
            groups |= planned or set()
        if not groups:
            names = ", ".join(owner.policy for owner in self._owners)
            self.ends = f"the trainers of {names} have ended, and no group of theirs is left"
        return groups or None

    def _must_wait(self, planner: Planner, version: int) -> bool:
        """Returns whether a step must wait even if enough groups are complete."""
        if self._requests and self.control.is_due(planner.buffer.rounds_under_way(), version):
            return True
        # Wait for an engine that serves the newest weights. Until then, new groups would be stale too and be dropped.
        if not planner.has_stale(version):
            return False
        engines = self._readiness.engines(self._policy.name)
        if not engines.serve_newest:
            newest = engines.missing or f"an engine of policy {self._policy.name!r} to serve its newest weights"
            self._waits_for = f"{newest}; some rollouts are older than staleness: {self._bound} allows"
            return True
        return False

    def _learned_prompts(self) -> dict[str, Any]:
        return dict(self._planner.learned.get("prompts", {})) if self._planner else {}

    def _new_planner(self, step: int) -> Planner:
        """Returns a planner that has the rollouts not settled by the steps before ``step``."""
        before = self._files.read(StepPlan, step - 1)
        settled, learned = (before.settled, before.state) if before else (Settled(), {})
        policy = self._policy
        owners = policy.owners if policy.roles else frozenset(owner.policy for owner in self._owners) or policy.owners
        score = policy.settings.score
        buffer = Buffer(self._run, self._sequences, owners, self._ordinal, settled, policy.held_out, score)
        plans = (self._files.read(StepPlan, number) for number in range(step - 1, 0, -1))
        earlier = (plan for plan in plans if plan is not None)
        return Planner(self._config, policy, buffer, learned, earlier, self._bound)

    def _planned(
        self, planner: Planner, step: int, version: int, trainer: int, over: bool, followed: set[str]
    ) -> StepPlan | None:
        """Plans the step if enough groups are complete, and requests replacements for dropped groups."""
        if followed:
            return planner.plan(step, version, len(followed), trainer, only=followed)
        buffer, control = planner.buffer, self.control
        max_refills = self._config.refill if self._requests else 0
        want, complete = self.wanted(step), buffer.complete()
        under_way = buffer.open_groups - len(complete) if max_refills else 0  # this polls for new blocks
        refills_used_up = bool(max_refills) and control.refills(step) >= max_refills
        newest_round = max(buffer.rounds_under_way(), default=0)
        refill_under_way = refills_used_up and newest_round >= FIRST_REFILL_ROUND
        least, due = 0, control.due(complete, version)
        if self._bound is not None and len(complete) > want:
            least = control.settles(step, complete, buffer.open_groups, version)
        if self._uses_up and buffer.open_groups == len(complete):
            over, self.ends = True, "" if complete else "no group is left"

        def plan(last: bool, short: bool = False) -> StepPlan | None:
            return planner.plan(step, version, want, trainer, least, last, bool(max_refills), short, due=due)

        made = plan(last=over, short=refills_used_up and not refill_under_way)
        if made or over or not max_refills or not control.batch(step - 1):
            return made
        lacks = planner.lacks - under_way
        if lacks <= 0 or refill_under_way or not control.may_request(step - 1):
            return None
        if control.refill(step, lacks, self._learned_prompts()) or under_way:
            return None
        self.ends = "" if complete else NO_TASK_LEFT
        return plan(last=True)
