"""Makes campaigns smaller: drops superseded attempts, artifacts and, in the end, the journals of a finished run.

A file is rewritten under a temporary name and replaced by rename; the chunks of token and message columns are copied
as they are. Journals are removed only if the campaign is finished, the file contains all of their trajectories, and
every column of the file agrees with its checksum.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.columns import offset_faults, read, texts
from megaflow_hpc.trajectories.hdf5.file import attribute, open_file, recorded_sources
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.winners import fingerprint, journals, seals_of
from megaflow_hpc.trajectories.maintenance.checksums import verify

_ROWS = 65536
"""Rows copied at a time, which bounds memory."""


def compact(
    path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, drop: Sequence[str] = ()
) -> dict[str, int]:
    """Writes a campaign file without its superseded attempts.

    Args:
        path: the file.
        output: the file to write; by default ``path`` is replaced.
        drop: shell patterns of the names of artifacts to leave out.

    Returns:
        Counts: ``bytes_before``, ``bytes_after``, ``attempts_dropped`` and ``artifacts_dropped``.

    Raises:
        ConfigError: ``path`` is not a campaign file.
        OSError: no space left, or a read-only directory; the file stays as it was.
    """
    path = Path(path)
    target = Path(output) if output else path
    before = path.stat().st_size if path.exists() else 0
    with open_file(path) as source:
        for fault in offset_faults(source):
            raise ConfigError(f"{path}: {fault}; run: megaflow-hpc validate {path}")
        keep = {"a": _counting_attempts(source), "f": _kept_artifacts(source, drop)}
        rows = len(source["trajectories/id"])
        with published(target) as temporary, writer_like(source, temporary) as writer:
            for start in range(0, rows, _ROWS):
                writer.extend(source, start, min(start + _ROWS, rows), keep)
    return {
        "bytes_before": before,
        "bytes_after": target.stat().st_size,
        "attempts_dropped": int((~keep["a"]).sum()),
        "artifacts_dropped": int((~keep["f"]).sum()),
    }


def writer_like(source: h5py.File, path: Path) -> TrajectoryWriter:
    """Returns the writer of a new file at ``path`` with the root attributes of ``source``."""
    others = {name: str(source.attrs[name]) for name in ("config", "versions") if name in source.attrs}
    return TrajectoryWriter(path, str(source.attrs.get("campaign", "")), attribute(source, "sources"), others)


def _counting_attempts(source: h5py.File) -> NDArray[Any]:
    """Returns a mask over the attempts: each trajectory's last attempt with the trajectory's own number and status."""
    offsets = read(source["trajectories/attempt_offset"])
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    keep = np.zeros(len(owner), bool)
    if not len(owner):
        return keep
    same = read(source["attempts/attempt"]) == read(source["trajectories/attempt"])[owner]
    same &= texts(source["attempts/status"]) == texts(source["trajectories/status"])[owner]
    last: dict[int, int] = {}
    for number in np.flatnonzero(same).tolist():
        last[int(owner[number])] = number
    keep[list(last.values())] = True
    return keep


def _kept_artifacts(source: h5py.File, drop: Sequence[str]) -> NDArray[Any]:
    names = texts(source["artifacts/name"])
    return np.array([not any(fnmatch.fnmatch(name, pattern) for pattern in drop) for name in names], bool)


def drop_journals(run: RunDir, dry_run: bool = False) -> dict[str, int]:
    """Removes the journals of a finished run for good, if its file contains all of their trajectories.

    Args:
        dry_run: check everything and remove nothing.

    Returns:
        Counts: ``journals``, files, and ``journal_bytes``.

    Raises:
        ConfigError: the campaign is not finished, the file does not hold everything, or it is damaged.
    """
    if not Ledger(run).finished:
        raise ConfigError(f"{run}: the campaign is not finished; its journals are still needed")
    if recorded_sources(run.trajectories) != fingerprint(run, seals_of(run)):
        raise ConfigError(f"{run.trajectories}: does not hold all that the journals do; run: megaflow-hpc gather {run}")
    bad = [check for check in verify(run.trajectories) if check.state != "ok"]
    if bad:
        raise ConfigError(
            f"{run.trajectories}: /{bad[0].path} {bad[0].state}; "
            f"the journals stay, make the file anew with: megaflow-hpc gather {run} --rebuild"
        )
    files = journals(run)
    size = sum(path.stat().st_size for path in files)
    if not dry_run:
        for path in files:
            path.unlink()
    return {"journals": len(files), "journal_bytes": size}
