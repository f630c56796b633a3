"""Adds the rewards in ``RUN/rewards`` to the rows of a run. They are named ``NAME`` and ``NAME.PART``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.rewards import given_rewards
from megaflow_hpc.trajectories.hdf5.columns import Array
from megaflow_hpc.trajectories.hdf5.schema import reward_name
from megaflow_hpc.trajectories.reading.sources import Source


class WithGiven:
    """A source whose rows also have later rewards. They are read on first use of any reward.

    Args:
        source: Rows of the run.
    """

    def __init__(self, source: Source, run: RunDir) -> None:
        self._source, self._run = source, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def rewards(self, row: int) -> dict[str, float]:
        """See :meth:`Source.rewards`."""
        given = self._given.get(str(self._source.scalar("id", row)), {})
        return {**given, **self._source.rewards(row)}

    def reward_names(self) -> list[str]:
        """See :meth:`Source.reward_names`."""
        return sorted({*self._source.reward_names(), *(name for own in self._given.values() for name in own)})

    def column(self, path: str) -> Array:
        """See :meth:`Source.column`."""
        name = path.removeprefix("rewards/")
        if name == path or name in self._source.reward_names():
            return self._source.column(path)
        ids = self._source.ids()
        return np.array([self._given.get(one, {}).get(name, np.nan) for one in ids], np.float32)

    @cached_property
    def _given(self) -> dict[str, dict[str, float]]:
        """Rollout id → reward name → value."""
        rewards: dict[str, dict[str, float]] = {}
        for name, lines in given_rewards(self._run).items():
            for rollout, given in lines.items():
                named = {reward_name(one): float(np.float32(value)) for one, value in given.named(name).items()}
                rewards.setdefault(rollout, {}).update(named)
        return rewards
