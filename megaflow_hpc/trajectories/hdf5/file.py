"""Opens campaign files, and refuses those that are foreign, incomplete or of a newer version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, FORMAT, FORMAT_VERSION, OPTIONAL


def open_file(path: str | os.PathLike[str], *, complete: bool = True) -> h5py.File:
    """Opens a campaign file for reading, without file locks: published files never change, and locks are often missing.

    Args:
        path: the file.
        complete: whether to refuse a file that lacks a column.

    Raises:
        ConfigError: the file is missing, unreadable, truncated, not HDF5, of another format or of a newer version.
    """
    path = Path(path)
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a trajectories.h5") from error
    if not h5py.is_hdf5(path):
        raise ConfigError(f"{path}: not an HDF5 file; expected a trajectories.h5 (see: megaflow-hpc gather RUN)")
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        if "lock file" in str(error):  # the environment overrules what we ask for
            setting = os.environ.get("HDF5_USE_FILE_LOCKING")
            raise ConfigError(
                f"{path}: cannot be locked, and HDF5_USE_FILE_LOCKING={setting} demands it; published files never "
                "change and need no locks: unset the variable, or set it to FALSE"
            ) from error
        raise ConfigError(
            f"{path}: truncated or damaged ({error}); make it anew with: megaflow-hpc gather RUN --rebuild"
        ) from error
    try:
        _check(path, file, complete)
    except BaseException:
        file.close()
        raise
    return file


def _check(path: Path, file: h5py.File, complete: bool) -> None:
    found = file.attrs.get("format")
    found = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    if found != FORMAT:
        raise ConfigError(f"{path}: format {found!r}, expected {FORMAT!r}; this HDF5 file is not ours")
    version = file.attrs.get("format_version")
    try:
        readable = 1 <= int(version) <= FORMAT_VERSION
    except (TypeError, ValueError):
        readable = False
    if not readable:
        raise ConfigError(
            f"{path}: format_version {version!r}, expected 1 to {FORMAT_VERSION}; use a newer megaflow-hpc"
        )
    missing = [name for name in COLUMNS if name not in file and name not in OPTIONAL]
    if missing and complete:
        raise ConfigError(f"{path}: lacks the dataset /{missing[0]}; run: megaflow-hpc validate {path}")


def recorded_sources(path: Path) -> dict[str, Any] | None:
    """Returns the journals and seals a campaign file was gathered from; ``None`` without a readable file."""
    if not path.exists():
        return None
    try:
        with open_file(path) as file:
            sources = json.loads(file.attrs.get("sources", "{}"))
    except (ConfigError, OSError, ValueError):
        return None
    return sources if isinstance(sources, dict) else None
