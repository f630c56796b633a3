"""Writes trajectories in other programs' formats, one module per format, and imports JSON lines.

Every format's module offers ``HELP`` (one line) and ``write(job) -> list[Path]``. It takes rows from ``job.rows()`` in
order, holds a bounded number of them in memory, and publishes its files by rename. The verbs ``export`` and ``import``
call this room, and users may.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import without_links
from megaflow_hpc.trajectories.hdf5.columns import Integers
from megaflow_hpc.trajectories.reading.row import Row
from megaflow_hpc.trajectories.reading.store import TrajectoryStore

FORMATS = ("jsonl", "parquet", "verl", "areal", "atif", "preds")

GROUP_TOKENS = 1 << 20
"""Maximum number of tokens held in memory at once, some tens of MB."""
GROUP_ROWS = 1024

COMPRESSIONS = ("none", "gz", "zst")


@dataclass
class ExportJob:
    """One export: the chosen rows of a store, and the target directory."""

    store: TrajectoryStore
    numbers: Integers
    directory: Path
    compress: str
    """Compression of JSON lines, one of :data:`COMPRESSIONS`. Parquet is always compressed."""
    progress: Callable[[int, int], None]
    """Called with the number of finished rows and of all rows."""
    warn: Callable[[str], None]
    """Called with the id of each trajectory that the format cannot store completely, and the reason."""

    def rows(self) -> Iterator[Row]:
        """Yields the chosen rows in order."""
        for done, row in enumerate(self.store.rows(self.numbers)):
            yield row
            self.progress(done + 1, len(self.numbers))

    def groups(self) -> Iterator[Integers]:
        """Yields groups of row numbers that fit in memory together."""
        lengths = self.store.lengths()[self.numbers]
        start = tokens = 0
        for end, length in enumerate(lengths.tolist()):
            if end > start and (tokens + length > GROUP_TOKENS or end - start >= GROUP_ROWS):
                yield self.numbers[start:end]
                self.progress(end, len(self.numbers))
                start, tokens = end, 0
            tokens += length
        if start < len(self.numbers):
            yield self.numbers[start:]
        self.progress(len(self.numbers), len(self.numbers))


def export(
    store: TrajectoryStore,
    formats: Sequence[str],
    directory: Path,
    where: str | None = None,
    compress: str = "none",
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Path]]:
    """Writes trajectories in other formats.

    Args:
        store: An open store.
        formats: Names among :data:`FORMATS`.
        directory: Directory to write to, created if missing. Files of the same name are replaced.
        where: An expression that selects rows; see :mod:`~megaflow_hpc.trajectories.reading.selection`.
        compress: Compression of JSON lines: ``none``, ``gz`` or ``zst``.
        progress: Called with the format, the number of finished rows and of all rows.
        warn: Called with the id of each trajectory that a format cannot store completely, and the reason.

    Returns:
        The written paths, by format.

    Raises:
        ConfigError: A format is unknown, a package that it needs is missing, or no row was chosen.
    """
    modules = {name: module_of(name) for name in formats}
    if compress not in COMPRESSIONS:
        raise ConfigError(f"compression {compress!r}: there are {', '.join(COMPRESSIONS)}")
    numbers = np.arange(len(store)) if where is None else store.select(where)
    if not len(numbers):
        chosen = f" for which {where!r} holds" if where else ""
        raise ConfigError(f"{store.path}: no trajectory{chosen} among {len(store)}; nothing was written")
    directory.parent.mkdir(parents=True, exist_ok=True)
    written = {}
    try:
        with without_links(directory) as opened:
            for name, module in modules.items():
                job = ExportJob(store, numbers, opened, compress, partial(progress, name), warn)
                written[name] = [directory / path.relative_to(opened) for path in module.write(job)]
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{directory}: {error.strerror}; name another directory with -o") from None
    return written


def module_of(name: str) -> Any:
    """Imports and returns the module of a format.

    Raises:
        ConfigError: There is no such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r}: there are {', '.join(FORMATS)}")
    return import_module(f"{__name__}.{name}")
