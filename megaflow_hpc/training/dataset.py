"""Reads a campaign's trajectories as PyTorch datasets, in one process or many.

    from torch.utils.data import DataLoader
    from megaflow_hpc.training.dataset import PackedTrajectories

    data = PackedTrajectories("RUN/trajectories.h5", 32768, where="status == 'completed'", advantage="grpo", seed=0)
    for epoch in range(3):
        data.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=None, num_workers=4):
            batch["tokens"], batch["loss_mask"], batch["logprobs"], batch["advantage"], batch["offsets"]

Each process opens the file on its first read, so no HDF5 state crosses a fork. Starting a process by spawn pickles only
a path and a few numbers. All workers of all ranks compute the same plan from the same seed, and each takes its share.
So each trajectory is read once per epoch, regardless of the number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from torch.utils.data import Dataset, IterableDataset, get_worker_info  # type: ignore[import-not-found]

from megaflow_hpc.trajectories.reading.advantages import Kind
from megaflow_hpc.trajectories.reading.batch import Oversize, make_batch, plan_batches
from megaflow_hpc.trajectories.reading.store import TrajectoryStore, open_trajectories

Batch = dict[str, Any]
"""Tensors by column, as in :meth:`~megaflow_hpc.trajectories.reading.store.TrajectoryStore.batch`. Text columns are
lists."""


class _Opened:
    """A trajectory store that each process opens on its first read."""

    def __init__(self, path: str | os.PathLike[str], where: str | None, advantage: Kind | None) -> None:
        self.path = os.fspath(path)
        self.where = where
        self.advantage = advantage
        self._mine: tuple[int, TrajectoryStore, np.ndarray[Any, Any], np.ndarray[Any, Any] | None] | None = None
        self.open()  # fail here rather than in a worker

    def open(self) -> tuple[TrajectoryStore, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Returns the store, the selected row numbers, and the advantage of every row. The advantages are ``None``
        unless requested."""
        if self._mine is None or self._mine[0] != os.getpid():
            store = open_trajectories(self.path)
            rows = np.arange(len(store)) if self.where is None else store.select(self.where)
            advantages = None if self.advantage is None else store.advantages(self.advantage)
            self._mine = os.getpid(), store, rows, advantages
        return self._mine[1:]

    def batch(self, rows: np.ndarray[Any, Any], pad: int | None) -> Batch:
        """Returns a batch of the given rows."""
        store, _, advantages = self.open()
        batch = make_batch(store.source, rows, pad)
        if advantages is not None:
            batch["advantage"] = advantages[batch["trajectory"]]
        return {
            name: values.tolist() if values.dtype.kind == "U" else torch.from_numpy(values)
            for name, values in batch.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mine": None}


class Trajectories(Dataset[Batch]):
    """A map-style dataset with one trajectory per item. The items of a batch are read together.

    With ``DataLoader(data, batch_size=64, collate_fn=Trajectories.collate)`` each batch is one dictionary of flat or
    padded columns.

    Args:
        path: a run directory or a ``trajectories.h5``.
        where: an expression that selects rows (see :mod:`megaflow_hpc.trajectories.reading.selection`).
        pad: as in :meth:`~megaflow_hpc.trajectories.reading.store.TrajectoryStore.batch`.
        advantage: kind of advantage to add as the column ``advantage`` (S), computed over all rows of the file.

    Raises:
        ConfigError: ``path`` cannot be read, or ``where`` is not a selection.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        where: str | None = None,
        *,
        pad: int | None = None,
        advantage: Kind | None = None,
    ) -> None:
        self._opened = _Opened(path, where, advantage)
        self._pad = pad

    def __len__(self) -> int:
        return len(self._opened.open()[1])

    def __getitem__(self, index: int) -> Batch:
        rows = self._opened.open()[1]
        return self._opened.batch(rows[[range(len(rows))[index]]], self._pad)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Returns the items as one batch. PyTorch's data loader calls this instead of ``__getitem__``."""
        rows = self._opened.open()[1]
        return [self._opened.batch(rows[np.asarray(indices, np.int64)], self._pad)]

    @staticmethod
    def collate(items: list[Batch]) -> Batch:
        """Returns the batch from :meth:`__getitems__` unchanged. Pass this method to the data loader as
        ``collate_fn``."""
        (batch,) = items
        return batch


class PackedTrajectories(IterableDataset[Batch]):
    """An iterable dataset of batches packed up to a token budget.

    Pass it to ``DataLoader(data, batch_size=None, num_workers=…)``.

    Args:
        path: a run directory or a ``trajectories.h5``.
        token_budget: maximum number of entries in each token column of a batch, including padding.
        where: an expression that selects rows.
        pad: value with which token columns are padded to (S, longest). ``None`` keeps them flat (T), with ``offsets``.
        seed: seed for shuffling, which differs in every epoch. If ``None``, rows are not shuffled, but packing may
            reorder them.
        advantage: kind of advantage to add as the column ``advantage`` (S).
        rank, ranks: rank of this process and number of ranks. Default: taken from ``torch.distributed``, or else from
            the environment variables RANK and WORLD_SIZE.
        even: drop up to ``ranks - 1`` batches, so that every rank gets the same number.
        oversize: handling of trajectories that exceed the budget, ``error`` or ``skip``.

    Raises:
        ConfigError: ``path`` cannot be read, or ``where`` is not a selection.
        ValueError: ``rank`` is not below ``ranks``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        token_budget: int,
        where: str | None = None,
        *,
        pad: int | None = None,
        seed: int | None = None,
        advantage: Kind | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        even: bool = False,
        oversize: Oversize = "error",
    ) -> None:
        self._opened = _Opened(path, where, advantage)
        self._budget = token_budget
        self._pad = pad
        self._seed = seed
        self._even = even
        self._oversize: Oversize = oversize
        here = _distributed()
        self._rank = here[0] if rank is None else rank
        self._ranks = here[1] if ranks is None else ranks
        if not 0 <= self._rank < self._ranks:
            raise ValueError(f"rank {self._rank} of {self._ranks}: expected 0 to {self._ranks - 1}")
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # shared with persistent workers

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the shuffle. All ranks must use the same epoch."""
        self._epoch[0] = epoch

    def plan(self) -> list[np.ndarray[Any, Any]]:
        """Returns this rank's batches in the epoch, as arrays of row numbers.

        Raises:
            ConfigError: a trajectory exceeds the budget and ``oversize`` is ``error``.
        """
        store, rows, _ = self._opened.open()
        seed = None if self._seed is None else self._seed * 1_000_003 + int(self._epoch[0])
        batches = plan_batches(store.source, rows, self._budget, self._pad is not None, seed, self._oversize)
        if self._even:
            batches = batches[: len(batches) - len(batches) % self._ranks]
        return batches[self._rank :: self._ranks]

    def __len__(self) -> int:
        """Returns the number of this rank's batches in the epoch."""
        return len(self.plan())

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for rows in self.plan()[number::workers]:
            yield self._opened.batch(rows, self._pad)


def _distributed() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
