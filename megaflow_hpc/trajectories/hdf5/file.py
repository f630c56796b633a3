"""Opens campaign files, and refuses those that are foreign, unsound, incomplete or of a newer version.

Every reader comes through here: what a file may be made of is asked in one place, before any of it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
from h5py import h5pl

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.texts import parse_json
from megaflow_hpc.trajectories.hdf5.heaps import Watched
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, FORMAT, FORMAT_VERSION, OPTIONAL
from megaflow_hpc.trajectories.hdf5.structure import UnsoundError, faults, lengths, sound


def open_file(path: str | os.PathLike[str], *, complete: bool = True) -> h5py.File:
    """Opens a campaign file for reading, without file locks: published files never change, and locks are often missing.

    Args:
        path: the file.
        complete: whether to refuse a file whose columns are not those of the schema, in type and length.

    Raises:
        ConfigError: the file is missing, unreadable, truncated, not HDF5, made of what no campaign file is made of, of
            another format or of a newer version.
    """
    path = Path(path)
    try:
        with open_regular(path):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a trajectories.h5") from error
    if not h5py.is_hdf5(path):
        raise ConfigError(f"{path}: not an HDF5 file; expected a trajectories.h5 (see: megaflow-hpc gather RUN)")
    with _no_plugins():
        try:
            with Watched(path) as raw, h5py.File(raw, "r") as file:
                _check(path, file, complete)
            return h5py.File(path, "r", locking=False)
        except UnsoundError as error:
            raise ConfigError(f"{path}: {error}; no campaign file is made of that, do not trust it") from error
        except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:  # h5py has one for each damage
            if "lock file" in str(error):  # the environment overrules what we ask for
                setting = os.environ.get("HDF5_USE_FILE_LOCKING")
                raise ConfigError(
                    f"{path}: cannot be locked, and HDF5_USE_FILE_LOCKING={setting} demands it; published files never "
                    "change and need no locks: unset the variable, or set it to FALSE"
                ) from error
            raise ConfigError(f"{path}: truncated or damaged ({error}); {_ANEW}") from error


_ANEW = "make it anew with: megaflow-hpc gather RUN --rebuild"


@contextmanager
def _no_plugins() -> Iterator[None]:
    """Takes libhdf5's plugin directories away for a while: what a file names is not looked for as a library."""
    kept = [h5pl.get(number) for number in range(h5pl.size())]
    while h5pl.size():
        h5pl.remove(0)
    try:
        yield
    finally:
        for path in kept:
            h5pl.append(path)


def _check(path: Path, file: h5py.File, complete: bool) -> None:
    columns = sound(file)
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
    if not complete:
        return
    missing = [name for name in COLUMNS if name not in columns and name not in OPTIONAL]
    if missing:
        raise ConfigError(f"{path}: lacks the dataset /{missing[0]}; run: megaflow-hpc validate {path}")
    for asked in (faults, lengths):
        for fault in asked(columns):
            raise ConfigError(f"{path}: {fault}; run: megaflow-hpc validate {path}")


def recorded_sources(path: Path) -> dict[str, Any] | None:
    """Returns the ``journals`` (none if the file says none) and seals it was gathered from; ``None`` without a readable
    file."""
    if not path.exists():
        return None
    try:
        with open_file(path) as file:
            found = attribute(file, "sources")
    except (ConfigError, OSError):
        return None
    return found if isinstance(found.get("journals"), dict) else {**found, "journals": {}}


def attribute(file: h5py.File, name: str) -> dict[str, Any]:
    """Returns a root attribute that holds an object in JSON; an empty one where it is missing or none."""
    try:
        found = parse_json(file.attrs.get(name, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
