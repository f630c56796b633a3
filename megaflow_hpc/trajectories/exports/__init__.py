"""Exports trajectories to other programs' formats, one module per format, and imports JSON Lines files.

Each format module provides ``HELP`` (one line) and ``write(job) -> list[Path]``. ``write`` reads rows from
``job.rows()`` in order, holds a bounded number in memory, and publishes its files atomically by rename. The ``export``
and ``import`` commands use this package. It is also a public Python API.
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
from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore

FORMATS = ("jsonl", "parquet", "verl", "areal", "atif", "preds", "harbor", "inspect", "traces")

GROUP_TOKENS = 1 << 20
"""Maximum number of tokens to hold in memory together. They take tens of MB."""
TOKEN_BYTES = 16
"""Number of bytes of an image that count as one token."""
GROUP_ROWS = 1024

COMPRESSIONS = ("none", "gz", "zst")


@dataclass
class ExportJob:
    """An export of selected rows of a store to a directory."""

    store: TrajectoryStore
    numbers: Integers
    directory: Path
    compress: str
    """Compression of JSON Lines files, one of :data:`COMPRESSIONS`. Parquet files are always compressed."""
    progress: Callable[[int, int], None]
    """Called with (finished rows, total rows)."""
    warn: Callable[[str], None]
    """Called with a message if a trajectory cannot be exported completely. One message may cover many trajectories."""

    def rows(self) -> Iterator[Row]:
        """Yields the selected rows in order."""
        for done, row in enumerate(self.store.rows(self.numbers)):
            yield row
            self.progress(done + 1, len(self.numbers))

    def groups(self) -> Iterator[Integers]:
        """Yields batches of row numbers, each small enough to load into memory."""
        lengths = (self.store.lengths() + self.store.source.image_bytes() // TOKEN_BYTES)[self.numbers]
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
    """Exports trajectories to one or more formats.

    Args:
        store: An open store.
        formats: Format names, from :data:`FORMATS`.
        directory: Output directory, created if missing. Existing files of the same name are replaced.
        where: Selection expression; see :mod:`~megaflow_hpc.trajectories.reading.selection`.
        compress: Compression of JSON Lines files: ``none``, ``gz`` or ``zst``.
        progress: Called with (format, finished rows, total rows).
        warn: Called with a message if a trajectory cannot be exported completely. One message may cover many
            trajectories.

    Returns:
        The paths written, by format.

    Raises:
        ConfigError: A format is unknown, a required package is missing, or no row matches.
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
    """Imports and returns a format's module.

    Raises:
        ConfigError: The format is unknown.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r}: there are {', '.join(FORMATS)}")
    return import_module(f"{__name__}.{name}")
