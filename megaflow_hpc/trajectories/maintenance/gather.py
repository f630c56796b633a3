"""Gathers the journals of a run into one self-contained ``RUN/trajectories.h5``.

A gather first reads the headings of all records and decides which ones win. It then appends the winners in commit
order, with one batch of records in memory at a time.

The file is published by rename, so readers see either the old or the new file. If a gather is killed, run it again. It
may run while the campaign is running.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.attributes import campaign_name, root_attributes
from megaflow_hpc.trajectories.hdf5.file import recorded_sources
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.winners import Seals, fingerprint, index, seals_of

logger = logging.getLogger(__name__)


def gather(run: RunDir | str | os.PathLike[str], seals: Seals | None = None, *, rebuild: bool = False) -> Path:
    """Writes ``RUN/trajectories.h5`` unless it is up to date with the journals.

    Args:
        run: The run directory.
        seals: (block, epoch) → (``<pod>.<start>``, valid bytes). Default: the ledger's seals.
        rebuild: Write the file even if it is up to date.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A journal is foreign or has a newer version, or journals that the existing file was gathered from
            are missing.
        OSError: There is no space left, or the directory is read-only. The existing file is unchanged.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    seals = seals_of(run) if seals is None else seals
    now = fingerprint(run, seals)  # taken first, so records appended in the meantime make the file stale
    before = recorded_sources(run.trajectories)
    if before is not None and _is_up_to_date(run, before, now, rebuild):
        return run.trajectories
    winners = index(run, seals)
    with published(run.trajectories) as temporary:
        with TrajectoryWriter(temporary, campaign_name(run), now, root_attributes(run)) as writer:
            for trajectory in winners.trajectories():
                writer.append(trajectory)
    return run.trajectories


def gathered(path: str | os.PathLike[str]) -> Path:
    """Returns the campaign file for ``path``: ``path`` itself, or the ``trajectories.h5`` of a run directory.

    Warns if the journals of the run contain records that the file lacks.

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
    """Returns whether the existing file is up to date, given its fingerprint and that of the journals.

    Raises:
        ConfigError: The file is stale, but journals that it was gathered from are missing.
    """
    gone = sorted(before["journals"].keys() - now["journals"].keys())
    if not gone:
        return before == now and not rebuild
    left = {name: size for name, size in before["journals"].items() if name not in gone}
    if rebuild or left != now["journals"]:
        raise ConfigError(
            f"{run.trajectories}: was made from journals that are gone ({', '.join(gone)}) and cannot be made anew "
            f"without loss; restore them to {run.journal}, or move the file away to gather what is left"
        )
    return True
