"""What a trainer drinks from: steps made of whole groups of a campaign's rollouts, each exactly once.

    from megaflow_hpc.training.dataflow import Dataflow

    flow = Dataflow("runs/fix-bugs", policy="default", consumer="mine")
    state = flow.restore()                       # the last commit that has a checkpoint, or None
    for step in flow.steps():                    # plans of an earlier start first, unchanged
        for minibatch in step.minibatches():
            for batch in minibatch.microbatches(tokens=32768):
                loss(model, batch, minibatch).backward()
            optimizer.step()
        version = step.publish(folder)
        step.commit(checkpoint, metrics={"entropy": 0.4})

Nothing runs between trainer and campaign but the run directory: rollouts are read from the journals, tasks are asked
for by adding blocks, weights are published by a rename. So a trainer, pods and engines can each die and come back
alone. A step's plan is written down before it is used (:mod:`~megaflow_hpc.training.plan`): after a crash the same
steps are made of the same rollouts again, from the last checkpoint on.

In a distributed trainer every rank has a ``Dataflow`` of its own, with its ``rank``: the first one plans, asks,
publishes and commits; the others follow its plans.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import OpenLease
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.training import Commit, Trainer
from megaflow_hpc.rundir.weights import current, ordinals
from megaflow_hpc.training.buffer import Buffer, Sequences
from megaflow_hpc.training.evaluation import ask
from megaflow_hpc.training.pace import REFILLED, Pace
from megaflow_hpc.training.plan import Place, Plan, Settled, TrainingFiles
from megaflow_hpc.training.planner import Planner
from megaflow_hpc.training.pod_watch import PodWatch
from megaflow_hpc.training.step import Step
from megaflow_hpc.trajectory import TokenSequence

logger = logging.getLogger(__name__)

FIRST_S, POLL_S = 0.05, 0.5
"""Seconds between two looks at the journals while a step lacks rollouts: when it begins, and engines load soon what the
step before has published, and at most; each look is twice as late as the one before."""
STATS_PER_S = 200
"""Journals whose size is asked for in a second: of a campaign of many pods one looks less often."""
SAID_S = 30.0
"""Seconds between two lines about what is waited for."""


class Dataflow:
    """The steps of one policy of one run.

    Args:
        run: the run directory.
        policy: which one is trained; may be left out where the campaign trains one.
        consumer: name under which it holds the campaign open; the policy's by default.
        rank, ranks: this process of a distributed trainer, and how many there are.
        training: what the campaign file says under ``training``, for a campaign that does not: then its planned
            rollouts are trained on as they come, and none are asked for.
        say: gets a line about what is waited for, at most one in half a minute; the log by default.

    Raises:
        ConfigError: no such run or policy, the policy has no model that can be trained, or nothing says how.
    """

    def __init__(
        self,
        run: RunDir | str | os.PathLike[str],
        policy: str | None = None,
        consumer: str | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        training: TrainingConfig | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}")
        self.run = run if isinstance(run, RunDir) else RunDir(run)
        self.run.check_ours()
        self.record = read_run(self.run)
        planned = self.record.config.training if self.record.campaign else None
        self.config = training or planned or _missing(self.run)
        self.policy = _chosen(self.run, policy, self.config)
        self.settings = self.config.policies[self.policy]
        self.consumer = consumer or self.policy
        self.rank, self.ranks = rank, ranks
        self.files = TrainingFiles(self.run, self.policy)
        self.trainer = 0
        """The number of this start; 0 until something is written."""
        self._asks = planned is not None and training is None
        self.tell, self._said_at = say or logger.info, 0.0
        self._ordinals: dict[int, int] = {}
        self._sequences = Sequences(self.run, self.policy)
        self._buffer: Buffer | None = None
        self._planner: Planner | None = None
        self._committed, self._dry = 0, False
        self._watch = PodWatch(self.run)
        self._lease: OpenLease | None = None
        self._marks = Marks(self.run)
        mine = self.record.policies.get(self.policy)
        model = (mine.model if mine else None) or {}
        self.temperature = float(model.get("sampling", {}).get("temperature", 1.0))
        """Sampling temperature of the policy. A trainer divides logits by it."""
        self._owners = frozenset({self.policy}) if mine is None or mine.samples else None
        self._held_out = frozenset(self.record.held_out)
        self._agent = str(mine.agent.get("name", "")) if mine else ""
        self._pods = self.record.config.slurm.pods.total if self.record.campaign else 1
        samples = self.config.batch.samples or (mine.samples if mine else 1)
        if self.record.campaign:  # pods close the group when it has enough rewards
            samples += self.record.config.scheduling.spare
        self._pace = Pace(self.files, self.policy, self._agent, self._tasks(), samples, self.config, self._pods)

    def _tasks(self) -> list[str]:
        include = self.record.policies[self.policy].include if self.policy in self.record.policies else []
        tasks = [task for task in planned_tasks(self.run, self.record) if task not in self._held_out]
        return [task for task in tasks if not include or any(fnmatch.fnmatchcase(task, p) for p in include)]

    # --- from the beginning, or from where it was left ---

    def restore(self) -> Commit | None:
        """Returns the last commit whose checkpoint is there, from which the trainer goes on; ``None`` without one.

        Raises:
            ConfigError: the files of an earlier start are damaged.
        """
        found = self.files.committed(with_checkpoint=True)
        self._committed = found.step if found else 0
        return found

    def checkpoint(self, commit: Commit) -> Path:
        """Returns the directory of a commit's checkpoint."""
        assert commit.checkpoint is not None
        return self.run.path / commit.checkpoint

    def steps(self) -> Iterator[Step]:
        """Yields the steps that are not trained yet, from the last checkpoint on, and ends with the training.

        Raises:
            ConfigError: a reward is infinite, or the run directory is damaged.
            LedgerError: a later trainer goes on; this one must end.
            StarvedError: no pod is there and none is queued, for a quarter of an hour.
            OSError: the run directory has not answered for too long.
        """
        self.restore()
        self._enter()
        number = self._committed
        while number < self.config.steps:
            number += 1
            began = time.monotonic()
            plan = self.files.read(Plan, number)
            waited = 0.0
            if plan is None:
                plan, waited = self._planned(number)
                if plan is None:
                    break
            yield Step(self, plan, waited, max(0.0, time.monotonic() - began - waited))
        self.close()

    def add(self, tasks: Sequence[str], token: str, samples: int | None = None) -> None:
        """Asks at once for tasks beside those that the campaign file's ``prompts`` choose.

        Steps take what is complete first, and more of it than a batch has where others would be too old for the step
        after. Call it between two steps: what is asked for during one is sampled by the weights from before it.

        Args:
            tasks: ids of the campaign's tasks.
            token: names this asking; a later start that repeats it asks for nothing new.
            samples: rollouts of each group; by default as for all others.

        Raises:
            ConfigError: there is no such task, or it is held out.
            LedgerError: the token is no name of a file, or was used for other tasks.
        """
        known = self._tasks()
        if unknown := sorted({*tasks} - {*known}):
            raise ConfigError(f"{self.run}: {', '.join(unknown[:3])}: no task that policy {self.policy!r} trains on")
        if not self.rank:
            self._enter()
            self._pace.add(tasks, token, samples)

    def close(self) -> None:
        """Lets the campaign end: nothing more is asked for. A trainer that dies or is requeued leaves it open."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def leave(self) -> None:
        """Ends this process's part, and leaves the campaign open for the trainer to come back."""
        if self._lease is not None:
            self._lease.leave()
            self._lease = None

    def _enter(self) -> None:
        if self.rank or self.trainer:
            return
        self.files.create()
        self.trainer = self.files.enter(Trainer.here(self.consumer))
        if self._asks:
            self._lease = OpenLease(self.run, self.consumer)
            self._lease.keep()

    def check(self) -> None:
        """Checks that no later trainer of the policy was started.

        Raises:
            LedgerError: one was.
        """
        if self.trainer:
            self.files.check(self.trainer)

    def committed(self, commit: Commit) -> None:
        """Notes that a step is committed, and asks for what is due then."""
        self._committed = max(self._committed, commit.step)
        self._ask()
        evaluate = self.config.evaluate
        if evaluate and self._asks and commit.step % evaluate.every == 0:
            held_out = sorted(self._held_out)
            ask(self.run, self.policy, self._agent, held_out, evaluate.samples, commit.step, self._pods)

    # --- reading ---

    def ordinal(self, version: int) -> int:
        """Returns the policy's own count of a weight version's number; 0 for the campaign's own model."""
        if version not in self._ordinals:
            self._ordinals = ordinals(self.run, self.policy, self._ordinals)
        return self._ordinals.get(version, 0)

    def sequences(self, place: Place) -> list[TokenSequence]:
        """Reads the policy's sequences of a rollout."""
        return self._sequences.at(place)

    # --- planning ---

    def _planned(self, number: int) -> tuple[Plan | None, float]:
        """Returns the next plan, and the seconds in which there was nothing to do but wait."""
        waited, began, pause = 0.0, time.monotonic(), FIRST_S
        self._watch.begin()
        while True:
            plan = self._try(number) if not self.rank else self.files.read(Plan, number)
            if plan is not None:
                return plan, waited
            if why := self._over(number):
                self.tell(f"{self.run}: {why}; {number - 1} of {self.config.steps} steps are done")
                return None, waited
            self._speak(number, time.monotonic() - began)
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, max(POLL_S, self._buffer.journals / STATS_PER_S if self._buffer else 0.0))

    def _try(self, number: int) -> Plan | None:
        """Makes the plan of a step if there is enough for it; another trainer's, if that was faster."""
        self.check()
        if self._buffer is None or self._planner is None:
            before = self.files.read(Plan, number - 1)
            settled, learned = (before.settled, before.state) if before else (Settled(), {})
            self._buffer = Buffer(self.run, self._sequences, self._owners, self.ordinal, settled, self._held_out)
            earlier = (self.files.read(Plan, step) for step in range(number - 1, 0, -1))
            known = (plan for plan in earlier if plan is not None)
            self._planner = Planner(self.config, self.settings, self._buffer, learned, known)
        self._ask()
        ended = self._marks.over
        self._buffer.poll()
        version = self.ordinal(current(self.run, self.policy).version)
        if self._asks and not ended and self._pace.is_due(self._buffer.rounds_under_way(), version):
            return None
        plan = self._plan(self._planner, self._buffer, number, version, ended)
        if plan is None:
            return None
        if (found := self.files.claim(number, plan)) is not plan:
            self._buffer = self._planner = None  # what was settled is what that plan says
        return found

    def _plan(self, planner: Planner, buffer: Buffer, number: int, version: int, ended: bool) -> Plan | None:
        """Makes the plan if there is enough, and asks for groups in the place of those that were dropped."""
        most = self.config.batch.refill if self._asks else 0
        want, complete, least = self._want(number), buffer.complete(), 0
        under_way = buffer.open_groups - len(complete) if most else 0  # which looks for blocks
        spent = bool(most) and self._pace.refills(number) >= most
        awaited = spent and max(buffer.rounds_under_way(), default=0) >= REFILLED
        if self._asks and len(complete) > want:
            least = self._pace.settles(number, complete, buffer.open_groups, version)
        how = (number, version, want, self.trainer, least)
        plan = planner.plan(*how, last=ended, replace=bool(most), short=spent and not awaited)
        if plan is not None or ended or not most or self._pace.batch(number - 1) is None:
            return plan
        learned, lacks = planner.learned.get("prompts", {}), planner.lacks - under_way
        if lacks <= 0 or awaited or self._pace.refill(number, lacks, learned) or under_way:
            return None
        self._dry = not buffer.complete()
        return planner.plan(*how, last=True, replace=True)

    def _ask(self) -> None:
        if self._asks and not self.rank:
            learned = self._planner.learned.get("prompts", {}) if self._planner else {}
            self._pace.keep(self._committed, learned, self._say_seldom)

    def _want(self, step: int) -> int:
        return self._pace.want(step) if self._asks else self.config.batch.tasks

    def _over(self, step: int) -> str:
        """Why this step will not come any more; empty if it may."""
        if self._marks.cancelled:
            return "the campaign is cancelled"
        if self._marks.finished and (self.rank or not (self._buffer and self._buffer.complete())):
            return "the campaign is finished"
        return "" if self._want(step) and not self._dry else "no task is left to ask for (training.prompts)"

    def _speak(self, number: int, seconds: float) -> None:
        if self._buffer is not None and seconds > SAID_S:
            there, all_open = len(self._buffer.complete()), self._buffer.open_groups
            gone = self._watch.look()
            self._say_seldom(
                f"step {number} waits for rollouts: {there} of {self._want(number)} groups are there, "
                f"{all_open - there} are under way{gone and f'; {gone}'}"
            )

    def _say_seldom(self, text: str) -> None:
        if time.monotonic() - self._said_at > SAID_S:
            self._said_at = time.monotonic()
            self.tell(text)


def _missing(run: RunDir) -> TrainingConfig:
    raise ConfigError(
        f"{run}: its campaign file has no section training; add one before planning, or give training=TrainingConfig(…)"
    )


def _chosen(run: RunDir, policy: str | None, config: TrainingConfig) -> str:
    if policy is None and len(config.policies) == 1:
        (policy,) = config.policies
    if policy not in config.policies:
        said = f"policy {policy!r} is not trained" if policy else "several policies are trained; name one"
        raise ConfigError(f"{run}: {said}; training.policies has: {', '.join(config.policies)}")
    return policy
