"""Gathers the journals of a run into one self-contained ``RUN/trajectories.h5``.

A gather first reads the headings of all records and decides which ones win. It then writes the winners in commit order,
holding one batch of records in memory at a time.

The file is published by rename, so readers see either the old or the new file. A gather that is asked to stop keeps the
rows written so far. The next gather continues from there, unless the journals have changed. After a gather is killed,
the next one starts from the beginning. A running campaign can be gathered too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.columns import offset_faults
from megaflow_hpc.trajectories.hdf5.file import (
    SOFTWARE,
    attribute,
    attribute_text,
    campaign_name,
    open_file,
    recorded_sources,
    root_attributes,
)
from megaflow_hpc.trajectories.hdf5.publishing import Unfinished, published, unfinished
from megaflow_hpc.trajectories.hdf5.schema import escape
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.winners import Index, Seals, fingerprint, index, seals_of

logger = logging.getLogger(__name__)

_ID_BATCH = 1 << 16
"""Number of ids to compare at a time, to bound memory."""


def gather(
    run: RunDir | str | os.PathLike[str],
    seals: Seals | None = None,
    *,
    rebuild: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Writes ``RUN/trajectories.h5`` unless it is up to date with the journals.

    Args:
        run: The run directory.
        seals: Maps (block, epoch) to (``<pod>.<start>``, valid bytes). Default: the ledger's seals.
        rebuild: Write the file even if it is up to date.
        stop: Called after each row. Returns whether to stop and keep the rows written so far.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A journal is foreign or has a newer version, or a journal from which the existing file was gathered
            is missing.
        Unfinished: ``stop`` returned true. The next call continues.
        OSError: There is no space left, or the directory is read-only. The existing file is unchanged.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    seals = seals_of(run) if seals is None else seals
    now = fingerprint(run, seals)  # taken first, so that records appended in the meantime make the file stale
    before = recorded_sources(run.trajectories)
    if before is not None and _is_up_to_date(run, before, now, rebuild):
        if unfinished(run.trajectories).exists():  # skip this on a file system that is mounted read-only
            unfinished(run.trajectories).unlink(missing_ok=True)
        return run.trajectories
    winners = index(run, seals)
    total = len(winners.winners)
    with published(run.trajectories) as temporary:
        done = _resume(unfinished(run.trajectories), temporary, now, winners)
        with TrajectoryWriter(temporary, campaign_name(run), now, root_attributes(run), append=done > 0) as writer:
            for trajectory in winners.trajectories(done):
                writer.append(trajectory)
                if stop():
                    break
        if len(writer) < total:
            raise Unfinished(
                f"{run}: stopped after {len(writer)} of {total} rollouts; continue with: megaflow-hpc gather {run}"
            )
    return run.trajectories


def _resume(kept: Path, temporary: Path, now: dict[str, Any], winners: Index) -> int:
    """Renames the unfinished file of a stopped gather to ``temporary``, and returns its number of rows.

    Removes the file and returns 0 if it does not match the journals.
    """
    try:
        os.rename(kept, temporary)  # before it is checked, so that no other gather replaces it meanwhile
    except FileNotFoundError:
        if not temporary.exists():  # otherwise a network file system has repeated the request
            return 0
    rows = _rows_that_fit(temporary, now, winners)
    if not rows:
        temporary.unlink()
    return rows


def _rows_that_fit(kept: Path, now: dict[str, Any], winners: Index) -> int:
    """Returns the number of rows in an unfinished file. Returns 0 if the file is damaged or does not match the journals
    and this version."""
    try:
        with open_file(kept) as file:
            if attribute(file, "sources") != now or attribute_text(file, "software") != SOFTWARE:
                return 0
            ids = file["trajectories/id"]
            for first in range(0, len(ids), _ID_BATCH):
                expected = [escape(entry.id).encode() for entry in winners.winners[first : first + _ID_BATCH]]
                if ids[first : first + _ID_BATCH].tolist() != expected[: len(ids) - first]:
                    return 0
            return 0 if any(offset_faults(file)) else len(ids)
    except (ConfigError, OSError, LookupError, ValueError) as error:
        logger.warning("%s: %s; gathering begins again", kept, error)
        return 0


def gathered(path: str | os.PathLike[str]) -> Path:
    """Returns the campaign file for a path: the path itself, or the ``trajectories.h5`` of a run directory.

    Warns if the run's journals contain records that are missing from the file.

    Raises:
        ConfigError: The directory is not a run directory, or was not gathered.
    """
    if not Path(path).is_dir():
        return Path(path)
    run = RunDir(path)
    remedy = f"megaflow-hpc gather {run}"
    if not run.trajectories.exists():
        read_run(run)
        raise ConfigError(f"{run}: was not gathered yet; write its trajectories.h5 with: {remedy}")
    before = recorded_sources(run.trajectories)
    now = fingerprint(run, seals_of(run))
    if before is not None and now["journals"].items() - before["journals"].items():
        logger.warning("%s: the run has stored more since; bring it up to date with: %s", run.trajectories, remedy)
    return run.trajectories


def _is_up_to_date(run: RunDir, before: dict[str, Any], now: dict[str, Any], rebuild: bool) -> bool:
    """Returns whether the existing file is up to date, given the fingerprints of the file and of the journals.

    Raises:
        ConfigError: The file is stale, but a journal from which it was gathered is missing.
    """
    gone = sorted(before["journals"].keys() - now["journals"].keys())
    if not gone:
        return before == now and not rebuild
    left = {name: size for name, size in before["journals"].items() if name not in gone}
    if rebuild or left != now["journals"]:
        raise ConfigError(
            f"{run.trajectories}: was made from journals that no longer exist ({', '.join(gone)}), so rebuilding it "
            f"would lose their rollouts; restore them to {run.journal}, or move the file away to gather the rest"
        )
    return True
