"""One training step: yields its rollouts as minibatches, publishes the new weights and commits."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np

from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.rundir.weights import Checksum, Version, current, publish
from megaflow_hpc.training.algorithms.samples import SCORE
from megaflow_hpc.training.microbatch import Minibatch, split
from megaflow_hpc.training.plan import Columns, PlannedRollout, StepPlan, TrainingFiles
from megaflow_hpc.trajectory import TokenSequence

KEPT_CHECKPOINTS = 3
"""Number of recent checkpoints that a trainer keeps."""
KEPT_VERSIONS = 3
"""Number of recent weight versions that a trainer keeps. An engine may still serve one while it loads the next."""


class UnreadableRollout(ConfigError):
    """The record of a planned rollout is damaged. ``rollout`` is its id."""

    def __init__(self, rollout: str, cause: object) -> None:
        super().__init__(f"rollout {rollout}: {cause}")
        self.rollout = rollout


class Flow(Protocol):
    """Interface of a dataflow that its steps use."""

    run: RunDir
    config: TrainingConfig
    files: TrainingFiles
    trainer: int
    rank: int
    ranks: int

    @property
    def policy(self) -> str:
        """Name of the policy."""

    @property
    def settings(self) -> PolicyTraining:
        """Training settings of the policy."""

    @property
    def temperature(self) -> float:
        """Sampling temperature of the policy."""

    def check(self) -> None:
        """Raises LedgerError if a newer trainer was started."""

    def committed(self, commit: Commit) -> None:
        """Records in memory that a step is committed."""

    def ordinal(self, version: int) -> int:
        """Converts a campaign-wide weight version to the policy's own count."""

    def sequences(self, rollout: PlannedRollout) -> list[TokenSequence]:
        """Reads the policy's sequences of a rollout. Raises UnreadableRollout if its record is damaged."""


class Step:
    """One training step. Its rollouts are the same after every restart and for any number of ranks.

    Attributes:
        plan: the stored plan, without the rollouts that amendments leave out.
        amendments: number of amendments that are known to the step.
        columns: further values of each token, set by a trainer before it takes minibatches.
        wait_s: seconds spent waiting for its rollouts.
        plan_s: seconds spent reading and planning.
    """

    def __init__(
        self, flow: Flow, plan: StepPlan, wait_s: float = 0.0, plan_s: float = 0.0, amendments: int = 0
    ) -> None:
        self._flow, self.plan, self.wait_s, self.plan_s = flow, plan, wait_s, plan_s
        self.amendments = amendments
        self.columns: Columns = {}

    @property
    def number(self) -> int:
        """Step number, from 1."""
        return self.plan.step

    @cached_property
    def groups(self) -> list[int]:
        """Index of each rollout's group in the step."""
        seen: dict[str, int] = {}
        return [seen.setdefault(rollout.group, len(seen)) for rollout in self.plan.rollouts]

    @cached_property
    def _digest(self) -> str:
        return self._flow.files.digest(self.number)

    @property
    def temperature(self) -> float:
        """Sampling temperature of the step's tokens. A trainer divides logits by it."""
        return self._flow.temperature

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(sum(rollout.sampled) for rollout in self.plan.rollouts)

    def minibatches(self) -> Iterator[Minibatch]:
        """Yields the minibatches of all ``loss.epochs``, split by ``loss.minibatch`` and reshuffled in each epoch."""
        loss = self._flow.settings.loss
        for epoch in range(loss.epochs):
            if loss.minibatch is None:
                yield self.minibatch()
                continue
            random = np.random.default_rng([*self.plan.seed, epoch])
            for rollouts in split(self.groups, loss.minibatch, random):
                yield self.minibatch(rollouts)

    def minibatch(self, rollouts: list[int] | None = None) -> Minibatch:
        """Returns a minibatch of the given rollouts; by default, the whole step."""
        chosen = list(range(len(self.plan.rollouts))) if rollouts is None else rollouts
        flow, copies = self._flow, self._flow.settings.parallel.copies  # successive ranks have the same micro-batches
        share = flow.rank // copies, max(flow.ranks // copies, 1)
        planned = self.plan.rollouts
        return Minibatch(planned, chosen, self.groups, self.sequences, flow.ordinal, *share, self.columns)

    def sequences(self, rollout: int) -> list[TokenSequence]:
        """Reads the policy's sequences of a rollout, by its index in the plan.

        Raises:
            UnreadableRollout: its record is damaged.
            ConfigError: the file system cannot read it.
        """
        return self._flow.sequences(self.plan.rollouts[rollout])

    def statistics(self) -> dict[str, float]:
        """Returns statistics of the step's rollouts: rewards, tokens, staleness and drops."""
        plan = self.plan
        rewards = plan.rewards
        stale = plan.staleness
        causes = Counter(plan.drops.values())
        scores = [
            rollout.scores[SCORE] for rollout in plan.rollouts if SCORE in rollout.scores and not rollout.replayed
        ]
        return {
            "reward": math.fsum(rewards) / len(rewards) if rewards else math.nan,
            **({"score": math.fsum(scores) / len(scores)} if scores else {}),
            "rollouts": len(plan.rollouts),
            "groups": len(set(self.groups)),
            "tokens": self.tokens,
            "staleness": sum(stale) / len(stale) if stale else 0.0,
            "staleness_max": max(stale, default=0),
            **{f"dropped/{cause}": count for cause, count in sorted(causes.items())},
        }

    def publish(
        self,
        folder: str | os.PathLike[str],
        *,
        move: bool = False,
        keep: int | None = None,
        checksums: Mapping[str, Checksum] | None = None,
    ) -> Version:
        """Publishes a model directory as the weights after this step. Repeating the call publishes nothing new.

        If the campaign sets ``publish_delta`` and the change from the last full version is small, only a delta is
        published.

        Args:
            folder: weights in the engine's format.
            move: move the directory instead of copying it. It must be on the run directory's file system.
            keep: number of the policy's newest versions to keep; older ones are removed.
            checksums: checksums of files in ``folder`` that are known, so that they are not read again.

        Raises:
            ConfigError: ``folder`` is not a model directory with weights.
            LedgerError: a later trainer has taken over.
        """
        flow = self._flow
        if flow.rank:
            return current(flow.run, flow.policy)
        flow.check()
        # The version is identified by the plan, because a repeated step may produce different bits on a GPU.
        made = publish(
            flow.run,
            folder,
            flow.policy,
            move=move,
            keep=keep,
            token=f"step-{self.number:06d}",
            digest=self._digest,
            delta=flow.config.publish_delta,
            checksums=checksums,
        )
        if move:  # ``folder`` still exists if a delta was written or the step was already published
            remove_tree(folder, ignore_errors=True)
        return made

    def commit(
        self, checkpoint: str | os.PathLike[str] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Records that the step is done, and requests the rollouts that are due next.

        Args:
            checkpoint: durable directory with the trainer's state after this step. A later start continues from it.
            metrics: finite numbers by name, stored with the commit and in ``metrics.jsonl``.

        Raises:
            ConfigError: the checkpoint directory is missing.
            LedgerError: a later trainer has taken over; this one must end.
        """
        flow = self._flow
        if flow.rank:
            return
        where = None if checkpoint is None else flow.files.checkpoint_name(checkpoint)
        all_metrics = {**self.statistics(), **(metrics or {})}
        commit = Commit(
            step=self.number,
            plan=self._digest,
            columns=flow.files.columns_digest(self.number) if self.columns else "",
            checkpoint=where,
            weights=current(flow.run, flow.policy).version,
            trainer=flow.trainer,
            amendments=self.amendments,
            metrics={name: float(value) for name, value in all_metrics.items() if math.isfinite(value)},
            at=time.time(),
        )
        flow.files.commit(commit)
        with open(flow.files.metrics, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": self.number, "at": round(commit.at, 3), **commit.metrics}) + "\n")
        flow.committed(commit)
