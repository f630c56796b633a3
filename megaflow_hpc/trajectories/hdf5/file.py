"""Opens and creates campaign files, and describes their origin in root attributes.

All readers open files through this module. It rejects files that are foreign, incomplete or of another version. It also
rejects files that store data elsewhere: HDF5 follows links, external storage and virtual datasets to other files, and
loads a plugin library for an unknown filter.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5z

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.ledger.tasks import image_files, planned_tasks
from megaflow_hpc.resources import __version__
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.hdf5.columns import filters_of
from megaflow_hpc.trajectories.hdf5.schema import (
    COLUMNS,
    FORMAT,
    FORMAT_VERSION,
    STRING,
    TEXT,
    escape,
    text_offset,
)

_FILTERS = {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32}
SOFTWARE = f"megaflow-hpc {__version__}"
"""Value of the root attribute ``software``."""
_CHUNK_CACHE_BYTES = 8 << 20
"""Size in bytes of HDF5's chunk cache for each dataset. Message chunks have 1 MiB each, and rows are mostly read in
order."""

_EXTENTS = {
    "n": "trajectories/id",
    "m": "sequences/trajectory",
    "t": "turns/sequence",
    "k": "tokens/id",
    "eb": "experts/bytes",
    "q": "messages/offset",
    "qb": "messages/json",
    "a": "attempts/attempt",
    "f": "artifacts/name",
    "fb": "artifacts/bytes",
    "i": "images/sha256",
    "ib": "images/bytes",
    "u": "image_uses/image",
    "p": "image_spans/image",
}
"""A column whose length is the count of an extent, by extent. ``messages/offset`` has one more entry than there are
messages."""

Datasets = Mapping[str, h5py.Dataset]
"""Datasets of a file, by path."""


class ForeignDataError(ValueError):
    """Raised if a file contains something that a campaign file never contains. The message names it."""


# --- reading ----------------------------------------------------------------------------------------------------------


def open_file(path: str | os.PathLike[str], *, complete: bool = True) -> h5py.File:
    """Opens a campaign file for reading.

    Uses no file locks: published files never change, and many file systems lack locks.

    Args:
        path: The campaign file.
        complete: Whether to reject a file whose columns differ from the schema in type or length.

    Raises:
        ConfigError: The file is missing, unreadable, truncated, not HDF5, of another format or version, or it
            stores data elsewhere.
    """
    path = Path(path)
    try:
        with open_regular(path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a trajectories.h5, or a run directory (see: "
            "megaflow-hpc list)"
        ) from error
    if not h5py.is_hdf5(path):
        raise ConfigError(f"{path}: not an HDF5 file; expected a trajectories.h5 (see: megaflow-hpc gather RUN)")
    try:
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=_CHUNK_CACHE_BYTES)
        try:
            _require_campaign(path, file, complete)
        except BaseException:
            file.close()
            raise
        return file
    except ForeignDataError as error:
        raise ConfigError(f"{path}: {error}; no campaign file contains that, do not trust it") from error
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:  # h5py raises any of them for damage
        if "lock file" in str(error):  # HDF5_USE_FILE_LOCKING overrides locking=False
            setting = os.environ.get("HDF5_USE_FILE_LOCKING")
            raise ConfigError(
                f"{path}: cannot be locked, and HDF5_USE_FILE_LOCKING={setting} demands it; published files never "
                "change and need no locks: unset the variable, or set it to FALSE"
            ) from error
        raise ConfigError(
            f"{path}: truncated or damaged ({error}); recreate it with: megaflow-hpc gather RUN --rebuild"
        ) from error


def _require_campaign(path: Path, file: h5py.File, complete: bool) -> None:
    columns = datasets(file)
    file_format = attribute_text(file, "format")
    if file_format != FORMAT:
        raise ConfigError(f"{path}: format {file_format!r}, expected {FORMAT!r}; this HDF5 file is not ours")
    version = file.attrs.get("format_version")
    try:
        readable = int(version) == FORMAT_VERSION
    except (TypeError, ValueError):
        readable = False
    if not readable:
        raise ConfigError(
            f"{path}: format_version {version!r}, expected {FORMAT_VERSION}; use the megaflow-hpc that wrote it"
        )
    faults = schema_faults(columns) if complete else []
    if faults:
        raise ConfigError(f"{path}: {faults[0]}; run: megaflow-hpc validate {path}")


def datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Returns the datasets of a file by path, after checking that each is stored in this file.

    Raises:
        ForeignDataError: A dataset is a link, is stored in another file, or uses an unknown filter.
        OSError, RuntimeError, LookupError: The file is damaged.
    """
    by_path: dict[str, h5py.Dataset] = {}
    for name in file:
        item = _member(file, name)
        if isinstance(item, h5py.Dataset):
            by_path[name] = item
            continue
        for inner in item:
            path = f"{name}/{inner}"
            by_path[path] = _member(file, path)
            if not isinstance(by_path[path], h5py.Dataset):
                raise ForeignDataError(f"/{path}: a group within a group, expected columns")
    return by_path


def _member(file: h5py.File, path: str) -> Any:
    """Returns a group, or a dataset stored in this file."""
    if not isinstance(file.get(path, getlink=True), h5py.HardLink):
        raise ForeignDataError(f"/{path}: a link to another place, expected a column in this file")
    item = file[path]
    if isinstance(item, h5py.Group):
        return item
    if not isinstance(item, h5py.Dataset):
        raise ForeignDataError(f"/{path}: a {type(item).__name__}, expected a column")
    options = item.id.get_create_plist()
    if options.get_layout() == h5d.VIRTUAL or options.get_external_count():
        raise ForeignDataError(f"/{path}: its bytes are in other files")
    filters = filters_of(item)
    if not _FILTERS.issuperset(filters):
        raise ForeignDataError(f"/{path}: filters {sorted(filters)}, expected shuffle, deflate and fletcher32")
    return item


def schema_faults(columns: Datasets) -> list[str]:
    """Lists differences between a file's datasets and the schema. Compares lengths only if names and types match."""
    faults: list[str] = []
    for column in COLUMNS.values():
        faults += _type_faults(column.path, column.dtype, columns)
    return faults or list(_length_faults(columns))


def _type_faults(path: str, dtype: str, columns: Datasets) -> Iterator[str]:
    dataset = columns.get(path)
    if dataset is None:
        yield f"/{path}: is missing"
        return
    if dtype == TEXT:
        yield from _type_faults(text_offset(path), "int64", columns)
        dtype = "uint8"
    if dataset.ndim != 1:
        yield f"/{path}: is not a one-dimensional dataset"
    elif dtype == STRING:
        text = h5py.check_string_dtype(dataset.dtype)
        if text is None or text.length is None or text.encoding != "utf-8":
            yield f"/{path}: type {dataset.dtype}, expected UTF-8 strings of fixed length"
    elif dataset.dtype != np.dtype(dtype):
        yield f"/{path}: type {dataset.dtype}, expected {dtype}"


def _length_faults(columns: Datasets) -> Iterator[str]:
    for path, column in COLUMNS.items():
        is_offset = column.is_offset
        if column.dtype == TEXT:
            path, is_offset = text_offset(path), True
        extent = column.extent.removesuffix("+1")
        expected = len(columns[_EXTENTS[extent]])
        if extent == "q":  # counted by the offsets column of the messages
            expected -= 1
        if is_offset:
            expected += 1
        if len(columns[path]) != expected:
            yield f"/{path}: {len(columns[path])} entries, expected {expected}"
    rows = columns["trajectories/id"].shape
    for path, dataset in columns.items():
        if path.startswith("rewards/") and (dataset.shape != rows or dataset.dtype != np.dtype("float32")):
            yield f"/{path}: {dataset.dtype} {dataset.shape}, expected float32 {rows}"


def recorded_sources(path: Path) -> dict[str, Any] | None:
    """Returns the journals and seals from which a file was gathered. Returns ``None`` if the file cannot be read."""
    if not path.exists():
        return None
    try:
        with open_file(path) as file:
            sources = attribute(file, "sources")
    except (ConfigError, OSError):
        return None
    if not isinstance(sources.get("journals"), dict):
        sources["journals"] = {}
    return sources


def attribute_text(file: h5py.File, name: str) -> str:
    """Returns a root attribute as text. Returns an empty string if it is missing."""
    value = file.attrs.get(name, "")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def attribute(file: h5py.File, name: str) -> dict[str, Any]:
    """Returns a root attribute that contains a JSON object. Returns an empty dict if it is missing or invalid."""
    try:
        return parse_object(attribute_text(file, name))
    except ValueError:
        return {}


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def new_file(
    path: Path, campaign: str, sources: Mapping[str, Any] | None = None, attributes: Mapping[str, str] | None = None
) -> Iterator[tuple[h5py.File, BackingFile]]:
    """Creates a file with the root attributes and no columns, yields it, and closes it on exit.

    Args:
        path: The new file, which must not exist.
        campaign: Name of the campaign.
        sources: The journals and seals from which the file is gathered. Readers compare them with the run's journals
            and seals.
        attributes: Additional root attributes.

    Raises:
        OSError: A write failed.
    """
    with _opened(BackingFile(path), "w") as (file, backing):
        set_attribute(file, "format", FORMAT)
        file.attrs["format_version"] = np.int32(FORMAT_VERSION)
        set_attribute(file, "campaign", campaign)
        set_attribute(file, "software", SOFTWARE)
        set_attribute(file, "sources", json.dumps(sources or {}, sort_keys=True))
        for name, text in (attributes or {}).items():
            set_attribute(file, name, text)
        yield file, backing


def continued_file(path: Path) -> AbstractContextManager[tuple[h5py.File, BackingFile]]:
    """Opens a file created by :func:`new_file` for appending, and closes it on exit. Raises like :func:`new_file`."""
    return _opened(BackingFile(path, "r+"), "r+")


@contextmanager
def _opened(backing: BackingFile, mode: str) -> Iterator[tuple[h5py.File, BackingFile]]:
    try:
        with h5py.File(backing, mode, libver=("v110", "v110")) as file:
            yield file, backing
    finally:
        backing.close()
    backing.check()


def set_attribute(file: h5py.File, name: str, text: str) -> None:
    """Sets a root attribute to a fixed-length string."""
    data = escape(text).encode()
    file.attrs.create(name, np.array(data, h5py.string_dtype("utf-8", max(1, len(data)))))


class BackingFile(io.FileIO):
    """File object for h5py that records write errors instead of raising them.

    After a failed write (no space, quota, file size limit), HDF5 can neither continue nor close its file, and crashes
    the process at exit. This class therefore keeps all writes after the first error in memory, where HDF5 can read them
    back. The caller must call :meth:`check` regularly and stop on an error.

    Args:
        mode: ``x+`` for a new file, ``r+`` for an existing one.

    Raises:
        OSError: The file exists, or cannot be created.
    """

    def __init__(self, path: Path, mode: str = "x+") -> None:
        super().__init__(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600))
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []
        """Offset and bytes of each write since the first error."""

    def check(self) -> None:
        """Raises the first write error, if there was one.

        Raises:
            OSError: A write failed.
        """
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.name))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = super().seek(offset, whence)
        if whence == io.SEEK_END and self._kept:
            end = max(start + len(data) for start, data in self._kept)
            position = super().seek(max(position, end + offset))
        return position

    def write(self, data: Any) -> int:
        """Writes all of ``data`` and returns its length. If the write fails, the data is kept in memory."""
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        while len(remaining) and self._error is None:
            try:
                remaining = remaining[super().write(remaining) :]
            except OSError as error:
                self._error = error
        if len(remaining):
            self._kept.append((self.tell(), bytes(remaining)))
            self.seek(len(remaining), io.SEEK_CUR)
        return size

    def readinto(self, buffer: Any) -> int:
        """Reads into ``buffer``, including writes that are kept in memory. Returns the number of bytes read."""
        view = memoryview(buffer).cast("B")
        start = self.tell()
        size = super().readinto(view) or 0
        for offset, data in self._kept:
            first = max(offset, start)
            last = min(offset + len(data), start + len(view))
            if first < last:
                view[first - start : last - start] = data[first - offset : last - offset]
                size = max(size, last - start)
        self.seek(start + size)
        return size

    def truncate(self, size: int | None = None) -> int:
        """Sets the size of the file, unless a write has failed. Returns the size."""
        size = self.tell() if size is None else size
        if self._error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._error = error
        return size


# --- origin -----------------------------------------------------------------------------------------------------------


def root_attributes(run: RunDir) -> dict[str, str]:
    """Returns the JSON attributes ``config`` (the resolved campaign, secrets masked) and ``versions``."""
    planned = read_run(run) if run.run_json.exists() else RunRecord()
    versions = planned.versions | {
        "megaflow-hpc": __version__,
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
        "h5py": h5py.version.version,
        "numpy": np.version.version,
    }
    if planned.version:
        versions["planned by megaflow-hpc"] = planned.version
    with suppress(ConfigError):  # the task file may have been purged; then the images are unknown
        images = image_files(planned_tasks(run, planned))
        if images:
            versions["images"] = images
    return {
        "config": json.dumps(without_secrets(planned.campaign), sort_keys=True, default=str),
        "versions": json.dumps(without_secrets(versions), sort_keys=True, default=str),
    }


def campaign_name(run: RunDir) -> str:
    """Returns the campaign's name from ``run.json``. Falls back to the directory name."""
    return (read_run(run).name if run.run_json.exists() else "") or run.path.name


_NAMES = r"(?:key|token|secret|password|passwd|pwd|credentials?)"
_SECRET_NAME = re.compile(rf"(?:.*[_-])?(?:api)?{_NAMES}", re.IGNORECASE)
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"']+)"""
_SECRET_TEXT = (
    (re.compile(rf"(\b(?:\w*_)?(?:api)?{_NAMES}=){_WORD}", re.IGNORECASE), r"\1***"),
    (re.compile(rf"(--(?:[\w-]+-)?{_NAMES}[ =]){_WORD}", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\bBearer )[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE), r"\1***@"),
)


def without_secrets(value: Any) -> Any:
    """Masks secrets in a JSON value: replaces any value named like a key, token, secret or password with ``***``.

    The name may be a mapping key, a shell variable, a command-line option, or part of a URL. A campaign's configuration
    may contain secrets; results, which are shared, must not.
    """
    if isinstance(value, dict):
        return {name: "***" if _is_secret(name, item) else without_secrets(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        for pattern, replacement in _SECRET_TEXT:
            value = pattern.sub(replacement, value)
    return value


def _is_secret(name: Any, value: Any) -> bool:
    return _SECRET_NAME.fullmatch(str(name)) is not None and value is not None and not isinstance(value, bool)
