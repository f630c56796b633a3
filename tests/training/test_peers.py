"""Two to four trainers of one campaign, simulated: the real planning and requests over files in memory.

Trainers, engines and pods take turns drawn by lot, at speeds drawn by lot, and trainers are killed between any two
writes. In every such campaign each training completes, every group is used exactly once, and the bound holds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup
from megaflow_hpc.training.buffer import Arrived, Buffer, Sequences
from megaflow_hpc.training.plan import RecordPlace, Settled, StepPlan, TaskBatch, TrainingFiles
from megaflow_hpc.training.planning import Planner, Planning
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.training.readiness import Peer, Readiness, ServedWeights
from megaflow_hpc.training.staleness import StalenessControl
from megaflow_hpc.types import Rollout
from tests.support.groups import sample

SEEDS = 200
STEPS = 4
MAX_TURNS = 20_000
"""A campaign of this size takes some hundred turns, and some thousand if one trainer is very slow."""


class Killed(Exception):
    """The trainer got SIGKILL."""


@dataclass
class World:
    """What trainers, engines and pods of one campaign share."""

    draw: random.Random
    kills: int
    files: dict[tuple[str, type, int], Any] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    begun: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rollout → policy → version that samples its tokens."""
    ended: dict[str, int] = field(default_factory=dict)
    """Rollout → number of rollouts that ended before it."""
    newest: dict[str, int] = field(default_factory=dict)
    served: dict[str, list[int]] = field(default_factory=dict)
    """Policy → the version of each of its engines."""
    closed: set[str] = field(default_factory=set)
    changes: int = 0
    """Number of changes so far. A trainer that has to wait looks again after the next one."""

    def write(self) -> None:
        """Before or after each write, the writer may die."""
        self.changes += 1
        if self.kills and self.draw.random() < 0.02:
            self.kills -= 1
            raise Killed


class MemoryFiles(TrainingFiles):
    """A policy's training files in memory."""

    def __init__(self, world: World, policy: str) -> None:
        self.world, self.policy = world, policy

    def numbers(self, kind: type[msgspec.Struct]) -> list[int]:
        return sorted(n for policy, other, n in self.world.files if policy == self.policy and other is kind)

    def read(self, kind: Any, number: int) -> Any:
        return self.world.files.get((self.policy, kind, number))

    def claim(self, number: int, record: Any) -> Any:
        self.world.write()
        stored = self.world.files.setdefault((self.policy, type(record), number), record)
        self.world.write()
        return stored


class MemoryPeer(Peer):
    def __init__(self, world: World, policy: str) -> None:
        self.policy, self._world, self._files = policy, world, MemoryFiles(world, policy)

    @property
    def ended(self) -> bool:
        return self.policy in self._world.closed

    def waited_for(self, act: str) -> str:
        return f"{self.policy} to {act}"


class MemoryReadiness(Readiness):
    def __init__(self, world: World) -> None:
        self._world = world

    def ordinal(self, policy: str) -> int:
        return self._world.newest[policy]

    def engines(self, policy: str) -> ServedWeights:
        lag = [version for version in self._world.served[policy] if version < self._world.newest[policy]]
        return ServedWeights("engines" if lag else "", len(lag) < len(self._world.served[policy]))


class MemoryControl(StalenessControl):
    def _add_blocks(self, batch: TaskBatch, token: str) -> None:
        world = cast(MemoryFiles, self._files).world
        world.write()
        for task, round in batch.tasks:
            for number in range(batch.samples):
                rollout = Rollout(task, self._policy.runs, number, "nop", round)
                world.rollouts.setdefault(rollout.id, rollout)
        world.write()


class MemoryBuffer:
    """The unsettled groups of one policy, read from the world."""

    def __init__(self, world: World, policy: str, owners: frozenset[str], settled: Settled) -> None:
        self._world, self._policy, self._owners = world, policy, owners
        self._settled, self._read = set(settled.groups), 0
        self.poll()

    def poll(self) -> None:
        self._read = len(self._world.ended)

    def _groups(self) -> dict[str, list[Rollout]]:
        groups = defaultdict(list)
        for rollout in self._world.rollouts.values():
            if rollout.policy in self._owners and rollout.group_id not in self._settled:
                groups[rollout.group_id].append(rollout)
        return groups

    def _split(self) -> tuple[list[SampleGroup], list[list[Rollout]]]:
        ended, complete, others = self._world.ended, [], []
        for name, own in self._groups().items():
            if all(ended.get(rollout.id, self._read) < self._read for rollout in own):
                samples = tuple(self._sample(rollout) for rollout in own)
                complete.append(SampleGroup(name, own[0].task_id, samples))
            else:
                others.append(own)
        return complete, others

    def complete(self) -> list[SampleGroup]:
        return self._split()[0]

    def rounds_under_way(self) -> set[int]:
        return {own[0].round for own in self._split()[1]}

    @property
    def open_groups(self) -> int:
        return len(self._groups())

    @property
    def arrived(self) -> dict[str, Arrived]:
        return dict.fromkeys(self._world.rollouts, Arrived(RecordPlace("", 0), (2,), (1,)))

    def settle(self, groups: Iterable[str]) -> None:
        self._settled |= {*groups}

    @property
    def settled(self) -> Settled:
        return Settled(groups=sorted(self._settled))

    def _sample(self, rollout: Rollout) -> Sample:
        version = self._world.begun[rollout.id][self._policy]
        number = hash_of(rollout.group_id)
        reward, right = float(number % 3 != 0 and rollout.sample_index), float(number % 2 and not rollout.sample_index)
        when = {"oldest": version, "newest": version, "time_ns": self._world.ended[rollout.id]}
        given = {"id": rollout.id, "rewards": {"reward": reward, "right": right}, "roles": (self._policy,), **when}
        return sample(rollout.group_id, rollout.sample_index, reward, task=rollout.task_id, **given)


def hash_of(text: str) -> int:
    """Return a number that is the same in every process."""
    return sum(text.encode())


class MemoryPlanning(Planning):
    """The planning of one start of a trainer."""

    def __init__(self, world: World, policy: TrainedPolicy, config: TrainingConfig) -> None:
        files = MemoryFiles(world, policy.name)
        nowhere = RunDir(Path("/nonexistent"))
        super().__init__(nowhere, files, policy, config, True, cast(Sequences, None), lambda version: version)
        self._world, self._memory, self._readiness = world, files, MemoryReadiness(world)
        self._owners = [MemoryPeer(world, owner) for owner in policy.followed]
        helpers = [MemoryPeer(world, helper) for helper in policy.helpers]
        self.control = MemoryControl(files, policy, config, self._readiness, helpers)
        self._flags = cast(Any, SimpleNamespace(over=False))

    def _new_planner(self, step: int) -> Planner:
        before = self._memory.read(StepPlan, step - 1)
        settled, learned = (before.settled, before.state) if before else (Settled(), {})
        own = self._policy.owners if self._policy.roles else frozenset(self._policy.followed)
        owners = own or frozenset({self._policy.name})
        buffer = cast(Buffer, MemoryBuffer(self._world, self._policy.name, owners, settled))
        return Planner(self._config, self._policy, buffer, learned, (), self._bound)


class Trainer:
    """One trainer and all its starts."""

    def __init__(self, world: World, policy: TrainedPolicy, config: TrainingConfig) -> None:
        self.world, self.policy, self.config = world, policy, config
        self.checkpoint = 0
        self.looked = -1
        self._start()

    def _start(self) -> None:
        self.planning = MemoryPlanning(self.world, self.policy, self.config)
        self.committed, self.plan = self.checkpoint, cast("StepPlan | None", None)
        self.world.changes += 1

    def turn(self) -> None:
        """Do one thing. A kill starts the trainer again from its last checkpoint."""
        if self.looked == self.world.changes or self.policy.name in self.world.closed:
            return
        self.looked = self.world.changes
        try:
            self._turn()
        except Killed:
            self._start()

    def _turn(self) -> None:
        name, step = self.policy.name, self.committed + 1
        files = MemoryFiles(self.world, name)
        if self.committed == self.config.steps:
            self.world.closed.add(name)
            self.world.changes += 1
        elif self.plan is None:
            self.plan = files.read(StepPlan, step)
            self.world.changes += self.plan is not None
            if self.plan is None:
                self.planning.request(self.committed)
                self.plan = self.planning.plan(step, 1)
                if self.plan is None and (self.planning.ends or not self.planning.wanted(step)):
                    self.world.closed.add(name)
                    self.world.changes += 1
        else:
            self.world.newest[name] = max(self.world.newest[name], step)  # publishing is idempotent
            self.world.write()
            self.world.files[name, Commit, step] = Commit(step=step)
            if step % 2 == 0:
                self.checkpoint = step
            self.world.write()
            self.committed, self.plan = step, None
            self.planning.request(step)


def pods_turn(world: World, policies: list[str]) -> None:
    """Start or end one rollout."""
    if len(world.ended) == len(world.rollouts):
        return
    rollout = world.draw.choice([rollout for rollout in world.rollouts.values() if rollout.id not in world.ended])
    if rollout.id in world.begun:
        world.ended[rollout.id] = len(world.ended)
        world.changes += 1
    else:
        world.begun[rollout.id] = {policy: world.draw.choice(world.served[policy]) for policy in policies}


def engines_turn(world: World) -> None:
    """Let one engine load the newest weights."""
    policy = world.draw.choice(sorted(world.served))
    engines = world.served[policy]
    number = world.draw.randrange(len(engines))
    world.changes += engines[number] != world.newest[policy]
    engines[number] = world.newest[policy]


def trained(name: str, owners: list[str], helpers: list[str], team: str) -> TrainedPolicy:
    """Return a policy of the campaign, or of its team, whose rollouts the policy ``team`` owns."""
    owns = name in owners
    return TrainedPolicy(
        name=name,
        settings=CONFIGS[0].policies["any"],
        agents=(AgentConfig(name="nop"),),
        tasks=tuple(f"task-{number}" for number in range(5)),
        held_out=frozenset(),
        runs=team or name,
        owners=frozenset({team or name}) if owns or team else None,
        roles={name: None if owns else "right"} if team else {},
        followed=() if owns else tuple(owners),
        helpers=tuple(helpers) if owns else (),
        samples=2 if owns else 0,
        pods=1,
        pass_threshold=1.0,
        seed=0,
        model={},
    )


CONFIGS = [
    TrainingConfig.model_validate(
        {"policies": {"any": {}}, "batch": 2, "steps": STEPS, "staleness": bound, "refill": refill, "data": data}
    )
    for bound in (0, 1, 2, None)
    for refill, data in ((0, []), (2, ["zero_variance"]))
]


def simulate(seed: int) -> None:
    """Run one campaign and check it."""
    draw = random.Random(seed)
    config = draw.choice(CONFIGS)
    owners = [f"owner-{number}" for number in range(draw.randint(1, 2))]
    helpers = [f"helper-{number}" for number in range(draw.randint(1, 3))]
    # The owner of a team may be frozen; then its first trained policy requests the rollouts.
    team = draw.choice(["", owners[0], "frozen"]) if len(owners) == 1 else ""
    policies = owners + helpers
    world = World(draw, kills=draw.choice([0, 3, 10]))
    world.newest = dict.fromkeys(policies, 0)
    world.served = {policy: [0] * draw.randint(1, 2) for policy in policies}
    trainers = [Trainer(world, trained(name, owners, helpers, team), config) for name in policies]
    speeds = [draw.choice([0.05, 0.3, 1.0, 3.0]) for _ in trainers]
    turns: list[Any] = [trainer.turn for trainer in trainers]
    turns += [lambda: engines_turn(world), lambda: pods_turn(world, policies)]
    speeds += [draw.choice([0.3, 2.0]), draw.choice([3.0, 10.0])]
    for _ in range(MAX_TURNS // 100):
        for turn in draw.choices(turns, speeds, k=100):
            turn()
        if world.closed == {*policies}:
            break
    steps = {p: [world.files.get((p, StepPlan, n + 1)) for n in range(STEPS)] for p in policies}
    assert world.closed == {*policies}, {p: sum(map(bool, own)) for p, own in steps.items()}
    groups = {policy: [plan.groups for plan in own] for policy, own in steps.items()}
    for policy, own in groups.items():
        assert sum(map(len, own)) == len(set().union(*own)), f"{policy} uses a group twice"
        assert (
            own == [set().union(*step) for step in zip(*(groups[o] for o in owners), strict=True)] or policy in owners
        )
        assert {cause for plan in steps[policy] for cause in plan.drops.values()} <= {"zero variance"}
        if config.staleness is not None:
            assert max(max(plan.staleness, default=0) for plan in steps[policy]) <= config.staleness
    for helper in helpers:
        assert set().union(*groups[helper]) == set().union(*(g for o in owners for g in groups[o]))
    if not config.refill:
        assert set().union(*groups[helpers[0]]) == {rollout.group_id for rollout in world.rollouts.values()}


@pytest.mark.parametrize("part", range(10))
def test_trainers_that_need_one_another_never_get_stuck_and_lose_nothing(part: int) -> None:
    for seed in range(part, SEEDS, 10):
        try:
            simulate(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
