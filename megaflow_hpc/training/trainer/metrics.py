"""Collects the metrics of a training step: seconds per stage, and statistics of tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found]

from megaflow_hpc.training.trainer import losses
from megaflow_hpc.training.trainer.model import ProcessGroup


class StageClock:
    """Accumulates the seconds that a step spends in each stage."""

    def __init__(self, device: Any) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class WeightedMean:
    """Accumulates statistics over micro-batches, ranks and minibatches.

    Attributes:
        rows: number of tokens that passed through the model.
    """

    def __init__(self) -> None:
        self._sums: losses.Statistics = {}
        self.rows = 0

    def add(self, rows: int, sums: losses.Statistics) -> None:
        """Adds the loss statistics of ``rows`` tokens."""
        self._sums = losses.add(self._sums, sums)
        self.rows += rows

    def join(self, other: WeightedMean) -> None:
        """Adds the statistics of another instance."""
        self.add(other.rows, other._sums)

    def of_all(self, ranks: ProcessGroup, copies: int = 1) -> WeightedMean:
        """Combines the statistics of all ranks. Every rank must call this method, and gets the same result.

        Args:
            ranks: all ranks.
            copies: number of consecutive ranks that have the same statistics.
        """
        self._sums = {name: value.cpu() for name, value in self._sums.items()}
        mean = WeightedMean()
        for part in ranks.gather(self)[::copies]:
            mean.join(part)
        return mean

    def report(self) -> dict[str, float]:
        """Returns metrics as defined by :func:`~megaflow_hpc.training.trainer.losses.report`."""
        return losses.report(self._sums)

    def sampling(self) -> dict[str, float]:
        """Returns metrics as defined by :func:`~megaflow_hpc.training.trainer.losses.sampling`."""
        return losses.sampling(self._sums)
