"""A campaign without pods: rollouts as an engine would have sampled them, stored in a run directory block by block."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.config import parse
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles, RefusedWeights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, write_run
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectory import TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Rollout, Task
from tests.support.ledgers import prepared

VOCABULARY = 259
DAMAGES = ("marker", "payload", "zeros", "status", "odd bytes")
"""Damages of a record: of its frame, a block of the disk that was not written, a heading that cannot be read, and a
column with another number of bytes than its dtype allows."""


def training_run(
    path: Path,
    training: dict[str, Any] | None,
    tasks: int = 4,
    samples: int = 4,
    model: str = "",
    held_out: int = 0,
    sampling: dict[str, float] | None = None,
    policies: Mapping[str, int] | None = None,
    args: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunDir:
    """Make the run directory of a campaign that trains the policy ``default`` and has requested nothing yet.

    Args:
        policies: policy → samples of several policies, in the place of ``default`` and ``samples``.
        held_out: number of tasks, the last ones, that are only for evaluation.
        sampling: sampling settings of the policy.
        args: options of its engine.
        more: further sections of the campaign file.
    """
    run = prepared(path)
    fields: dict[str, Any] = {
        "name": "sample",
        "tasks": "tasks",
        "agent": "nop",
        "samples": samples,
        **more,
    }
    served = {"engine": "vllm", "path": model or "model", "sampling": sampling or {}, "args": dict(args or {})}
    if policies is None:
        fields["model"] = served
    else:
        fields["models"] = {
            name: served if "team" in more else {**served, "samples": count} for name, count in policies.items()
        }
    if training is not None:
        fields["training"] = {"policies": {name: {} for name in policies or {"default": 0}}, **training}
    campaign = parse(fields)
    names = [f"task-{number}" for number in range(tasks)]
    write_run(
        run,
        RunRecord(
            campaign=campaign.model_dump(mode="json"),
            policies={
                name: PolicyRecord(
                    agents=[agent.model_dump(mode="json") for agent in policy.agents],
                    model=policy.model.model_dump(mode="json") if policy.model else {},
                    samples=policy.samples if policies is None or "team" in more else policies[name],
                )
                for name, policy in campaign.policies().items()
            },
            held_out=names[len(names) - held_out :],
            packed=write_tasks(run, [PlannedTask(Task(name, "", "", "").to_dict(), {}) for name in names]),
        ),
    )
    return run


def sampled(
    rollout: Rollout, reward: float | None, version: int = 0, seed: int = 0, status: str = "completed", turns: int = 2
) -> Trajectory:
    """Return the trajectory of a rollout with a random conversation, drawn from a seed."""
    draw = np.random.default_rng([seed, *rollout.id.encode()])
    one = TokenSequence(rollout.policy)
    verified = status in ("completed", "truncated")
    reward = reward if verified else None
    for _ in range(turns if verified else 0):
        prompt, answer = int(draw.integers(2, 12)), int(draw.integers(1, 9))
        one.tokens.extend(draw.integers(0, VOCABULARY, prompt + answer).tolist())
        one.logprobs.extend([math.nan] * prompt + (-3 * draw.random(answer)).tolist())
        one.loss_mask.extend([0] * prompt + [1] * answer)
        one.weight_versions.extend([-1] * prompt + [version] * answer)
    return Trajectory.begin(
        rollout, 0, status, reward=reward, rewards={} if reward is None else {"reward": reward}, sequences=[one]
    )


class Engines:
    """Stands for the engine servers of a campaign: publishes their endpoints. Without any, the newest weights sample.

    Args:
        servers: names of the servers, such as ``default.0``.
    """

    def __init__(self, run: RunDir, servers: Sequence[str] = ()) -> None:
        self._run, self._files = run, EndpointFiles(run)
        self.endpoints = {
            name: Endpoint(server=name, policy=name.partition(".")[0], url="http://127.0.0.1:1/v1", start="first")
            for name in servers
        }
        self.dead: set[str] = set()
        """Servers whose file stays as it is."""
        self.lagging: set[str] = set()
        """Servers that do not load new weights."""
        self.refusing: set[str] = set()
        """Servers that refuse every version."""
        self._turn = 0

    def beat(self) -> None:
        """Load new weights and renew every heartbeat."""
        for name, endpoint in self.endpoints.items():
            newest = current(self._run, endpoint.policy).version
            if name in self.dead and endpoint.heartbeat:
                continue
            if name in self.refusing:
                endpoint.refused = RefusedWeights(newest, "CUDA out of memory") if newest else None
            elif name not in self.lagging:
                endpoint.weight_version, endpoint.refused = newest, None
            endpoint.heartbeat += 1
            self._files.publish(endpoint)

    def restart(self, name: str) -> None:
        """Replace a server by a new start, which loads the newest weights."""
        for servers in (self.dead, self.lagging, self.refusing):
            servers.discard(name)
        endpoint = self.endpoints[name]
        self.endpoints[name] = msgspec.structs.replace(endpoint, start=f"{endpoint.start}+", heartbeat=0, refused=None)

    def version(self, policy: str) -> int:
        """Return the version that samples the next rollout of a policy. Servers that are alive take turns."""
        alive = [e for e in self.endpoints.values() if e.policy == policy and e.server not in self.dead]
        self._turn += 1
        return alive[self._turn % len(alive)].weight_version if alive else current(self._run, policy).version


def by_index(rollout: Rollout) -> float:
    """Return a reward that differs within every group."""
    return float(rollout.sample_index % 2)


class Pods:
    """Stands for all pods of a campaign: samples the rollouts in the ledger's blocks.

    Args:
        reward: rollout → its reward.
        version: returns the number of the weight version that samples; called for each rollout. By default, the newest.
        engines: the engines that sample, in the place of ``version``.
        helpers: policies that the agents of all rollouts call too.
        roles: (role, policy) of each model call of a rollout of a team, in the place of its two calls.
        named: rollout → further rewards by name.
    """

    def __init__(
        self,
        run: RunDir,
        reward: Callable[[Rollout], float | None] = by_index,
        version: Callable[[], int] | None = None,
        pod: str = "pod",
        engines: Engines | None = None,
        helpers: Sequence[str] = (),
        roles: Sequence[tuple[str, str]] = (),
        named: Callable[[Rollout], dict[str, float]] = lambda rollout: {},
    ) -> None:
        self._run, self._reward, self._helpers = run, reward, helpers
        self._roles, self._named = roles, named
        self._version = version
        self._engines = engines or Engines(run)
        self._done: set[str] = set()
        self._journal = JournalWriter(run.journal_file(pod, "0"))

    def skip(self, rollouts: Iterable[str]) -> None:
        """Leave out rollouts that an earlier pod has stored."""
        self._done |= set(rollouts)

    def work(
        self,
        most: int | None = None,
        status: Callable[[Rollout], str] = lambda rollout: "completed",
        only: Callable[[Rollout], bool] = lambda rollout: True,
    ) -> int:
        """Sample the requested rollouts that are missing; return their number."""
        todo = [(block.number, r) for block in read_blocks(self._run) for r in block.rollouts if r.id not in self._done]
        todo = [(block, rollout) for block, rollout in todo if only(rollout)]
        for block, rollout in todo[:most]:
            version = self._version() if self._version else self._engines.version(rollout.policy)
            trajectory = sampled(rollout, self._reward(rollout), version, status=status(rollout))
            trajectory.rewards |= self._named(rollout) if trajectory.rewards else {}
            if self._roles and trajectory.reward is not None:
                self._play(trajectory, rollout)
            for helper in self._helpers:
                (asked,) = sampled(replace(rollout, policy=helper), 0.0, self._engines.version(helper)).sequences
                trajectory.sequences.append(asked)
            self.store(block, trajectory)
        self._journal.commit()
        return len(todo[:most])

    def _play(self, trajectory: Trajectory, rollout: Rollout) -> None:
        """Replace a rollout's sequence by one for each call of a role."""
        trajectory.sequences = []
        for call, (role, policy) in enumerate(self._roles):
            version = self._engines.version(policy)
            player = replace(rollout, policy=policy)
            (own,) = sampled(player, 0.0, version, seed=call, turns=1).sequences
            end = len(own.tokens)
            turn = Turn(call, end - sum(own.loss_mask), end, policy=policy, role=role)
            trajectory.sequences.append(own)
            trajectory.turns.append(turn)

    def store(self, block: int, trajectory: Trajectory, epoch: int = 0, damage: str = "") -> None:
        """Append one trajectory, perhaps with one of :data:`DAMAGES`."""
        self._done.add(trajectory.id)
        data = trajectory.to_record()
        if damage == "status":
            data["status"] = 7
        if damage == "odd bytes":
            data["sequences"][0]["tokens"] = b"abc"
        start = self._journal.length
        self._journal.append({"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": data})
        begun = start - self._journal._written
        frame = memoryview(self._journal._buffer)[begun:]
        if damage == "zeros":
            frame[:] = bytes(len(frame))
        if damage in ("marker", "payload"):
            frame[{"marker": 1, "payload": len(frame) // 2}[damage]] ^= 0xFF
        frame.release()

    def finish_blocks(self) -> None:
        """Mark the blocks as done whose rollouts are all stored."""
        for block in read_blocks(self._run):
            if {rollout.id for rollout in block.rollouts} <= self._done:
                (self._run.ledger / "done" / f"{block.number:06d}.0").touch()

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class Uniform(Pods):
    """Samples uniformly, which is close to the distribution of the tiny models.

    Args:
        spoil: called with each trajectory before it is stored. It may change it, or return one of :data:`DAMAGES`.
    """

    def __init__(self, *given: Any, spoil: Callable[[Trajectory], str | None] = lambda _: None, **more: Any) -> None:
        super().__init__(*given, **more)
        self._spoil = spoil

    def store(self, block: int, trajectory: Trajectory, epoch: int = 0, damage: str = "") -> None:
        for one in trajectory.sequences:
            for t, sampled in enumerate(one.loss_mask):
                if sampled:
                    one.logprobs[t] = -math.log(VOCABULARY)
        super().store(block, trajectory, epoch, self._spoil(trajectory) or damage)


@contextmanager
def meanwhile(*work: Callable[[], object]) -> Iterator[None]:
    """Call each of ``work`` repeatedly in a thread."""
    ended = threading.Event()

    def again() -> None:
        while not ended.wait(0.01):
            for one in work:
                one()

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def trained_on(files: TrainingFiles) -> list[str]:
    """Return the ids of the rollouts in a training's plans, in the order of steps. A rollout used twice appears
    twice."""
    plans = [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]
    return [rollout.id for plan in plans for rollout in plan.rollouts]


def rollouts(tasks: Sequence[str], samples: int, round: int = 0) -> list[Rollout]:
    """Return every sample of these tasks."""
    return [Rollout(task, "default", sample, "nop", round) for task in tasks for sample in range(samples)]
