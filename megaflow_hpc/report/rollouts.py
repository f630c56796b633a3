"""Reads the columns of a campaign from which figures are computed: numbers, and labels as integer codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.report.series import Floats, Integers, Mask, Span
from megaflow_hpc.trajectories.hdf5.columns import text
from megaflow_hpc.trajectories.reading.conversations import tokens_of_calls
from megaflow_hpc.trajectories.reading.store import TrajectoryStore
from megaflow_hpc.types import VERIFIED

PHASES = ("environment", "model", "agent", "evaluation")
"""Phases of a rollout.

``environment`` prepares the sandbox and files. ``model`` is model calls, including waits for an engine. ``agent`` is
the agent and its commands. ``evaluation`` is the verifier. The remaining time is overhead between phases.
"""
ERROR_CHARS = 300


class Labels(NamedTuple):
    """A categorical text column, stored as integer codes."""

    names: list[str]
    """Sorted distinct values."""
    codes: Integers
    """Index into :attr:`names` for each row. Shape (n)."""

    def of(self, row: int) -> str:
        """Returns the value of a row, given its index."""
        return self.names[self.codes[row]]

    def where(self, *names: str) -> Mask:
        """Returns a mask of the rows whose value is in ``names``. Shape (n)."""
        return np.isin(self.codes, [code for code, name in enumerate(self.names) if name in names])


@dataclass(frozen=True)
class RolloutColumns:
    """Columns of all rollouts of a campaign. Every array has shape (n)."""

    ids: NDArray[Any]
    """Ids of the rollouts as an object array of ``str``."""
    task: Labels
    policy: Labels
    """Policy of each rollout. If several agents ran rollouts of the policy, ``+`` and the agent's name follow."""
    plain_policy: Labels
    agent: Labels
    status: Labels
    error_kind: Labels
    error: NDArray[Any]
    """Error messages as an object array of ``str``, truncated to :data:`ERROR_CHARS`. Empty for rollouts without an
    error."""
    node: Labels
    job: Labels
    reward: Floats
    """Reward of each rollout. NaN if the rollout was not verified or its reward is not finite."""
    roles: dict[str, Floats]
    """Reward of each rollout's team roles, by role. NaN if the role has no reward."""
    started_at: Floats
    finished_at: Floats
    phases: dict[str, Floats]
    """Seconds that each rollout spent in each phase of :data:`PHASES`, by phase. NaN if not recorded."""
    cpu_s: Floats
    """CPU seconds of each rollout's sandboxes. Unknown values are NaN, here and in the next two columns."""
    memory_peak_mb: Floats
    disk_peak_mb: Floats
    turns: Integers
    tokens: Integers
    """Number of tokens in each rollout's sequences, plus the tokens of calls to endpoints that return no token ids."""
    sequences: Integers
    """Number of token sequences of each rollout. An agent that drops old screenshots begins a new one at each call."""
    sampled: Integers
    attempts: Integers
    inexact: Integers

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def seconds(self) -> Floats:
        """Duration of each rollout's final attempt in seconds."""
        return np.maximum(0.0, self.finished_at - self.started_at)

    @property
    def carried_out(self) -> Mask:
        """True for each completed or truncated rollout."""
        return self.status.where(*VERIFIED)


def read_rollouts(store: TrajectoryStore) -> RolloutColumns:
    """Reads the columns of a store.

    Raises:
        ConfigError: A column is damaged.
    """
    column = store.source.column
    turns = column("trajectories/turn_offset")

    def by_rollout(name: str) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(_finite(column(f"turns/{name}")))])
        return np.diff(sums[turns])

    def number(name: str) -> Floats:
        values: Floats = column(f"trajectories/{name}").astype(np.float64)
        return values

    model = by_rollout("model_s") + by_rollout("wait_s")
    agent = number("agent_s")
    phases = {
        "environment": number("setup_s"),
        "model": np.where(np.isnan(agent), np.nan, np.minimum(model, agent)),
        "agent": np.maximum(0.0, agent - model),
        "evaluation": _finite(number("verify_s")),
    }
    reward = number("reward")
    tokens, sampled = (store.column(name).astype(np.int64) for name in ("tokens", "sampled_tokens"))
    for row in np.unique(np.searchsorted(turns, np.flatnonzero(column("turns/sequence") < 0), "right") - 1).tolist():
        stored = store[row]
        for turn, count in zip(stored.turns, tokens_of_calls(stored), strict=True):
            if turn.sequence < 0:
                tokens[row] += sum(count)
                sampled[row] += count[1]
    return RolloutColumns(
        ids=store.column("id"),
        task=_labels(store, "task_id"),
        policy=_arms(store),
        plain_policy=_labels(store, "policy"),
        agent=_labels(store, "agent"),
        status=_labels(store, "status"),
        error_kind=_labels(store, "error_kind"),
        error=np.array([error[:ERROR_CHARS] for error in store.column("error")], object),
        node=_labels(store, "node"),
        job=_labels(store, "job_id"),
        reward=np.where(np.isfinite(reward), reward, np.nan),
        roles=_roles(store),
        started_at=_finite(number("started_at")),
        finished_at=_finite(number("finished_at")),
        phases=phases,
        cpu_s=number("cpu_s"),
        memory_peak_mb=number("memory_peak_mb"),
        disk_peak_mb=number("disk_peak_mb"),
        turns=np.diff(turns),
        tokens=tokens,
        sequences=store.column("sequences").astype(np.int64),
        sampled=sampled,
        attempts=column("trajectories/attempt").astype(np.int64) + 1,
        inexact=column("trajectories/inexact").astype(np.int64),
    )


def attempt_spans(store: TrajectoryStore, rows: RolloutColumns) -> Iterator[tuple[str, Span]]:
    """Yields (pod's job id, time span) of each attempt at a rollout. Yields each final attempt twice."""
    for row in range(len(rows)):
        yield rows.job.of(row), (float(rows.started_at[row]), float(rows.finished_at[row]))
    column = store.source.column
    jobs = text(column("attempts/job_id")).tolist()
    starts = _finite(column("attempts/started_at")).tolist()
    ends = _finite(column("attempts/finished_at")).tolist()
    yield from zip(jobs, zip(starts, ends, strict=True), strict=True)


def _finite(values: NDArray[Any]) -> Floats:
    """Converts to float64 and replaces NaN and infinity with 0."""
    return np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)


def _roles(store: TrajectoryStore) -> dict[str, Floats]:
    called = set(text(np.unique(store.source.column("turns/role"))).tolist())
    names = [name for name in store.reward_names if name in called]
    return {name: store.column(f"rewards/{name}").astype(np.float64) for name in names}


def _arms(store: TrajectoryStore) -> Labels:
    policies, agents = _labels(store, "policy"), _labels(store, "agent")
    pairs, codes = np.unique(np.stack([policies.codes, agents.codes], axis=1), axis=0, return_inverse=True)
    several = np.bincount(pairs[:, 0], minlength=1) > 1
    names = []
    for policy, agent in pairs.tolist():
        suffix = f"+{agents.names[agent].rpartition(':')[2]}" if several[policy] else ""
        names.append(f"{policies.names[policy]}{suffix}")
    order = sorted(range(len(names)), key=names.__getitem__)
    return Labels([names[n] for n in order], np.argsort(order)[codes.reshape(-1)])


def _labels(store: TrajectoryStore, name: str) -> Labels:
    names, codes = np.unique(store.column(name).astype(object), return_inverse=True)
    return Labels([str(text) for text in names], codes.astype(np.int64).reshape(-1))
