"""Turns campaign files into files of earlier versions of the format."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from megaflow_hpc.trajectories.hdf5.columns import read_column, text
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, STRING, TEXT, text_offset


def as_version_2(path: Path) -> None:
    """Stores texts with variable length."""
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = np.int32(2)
        _with_variable_length(file, {TEXT})


def as_version_1(path: Path) -> None:
    """Stores all strings with variable length, and removes the optional columns, such as links between messages and
    calls."""
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = np.int32(1)
        for name in OPTIONAL:
            del file[name]
        _with_variable_length(file, {TEXT, STRING})


def _with_variable_length(file: h5py.File, types: set[str]) -> None:
    for path, column in COLUMNS.items():
        if column.dtype not in types or path not in file:
            continue
        values = text(read_column(file, path))
        del file[path]
        if column.dtype == TEXT:
            del file[text_offset(path)]
        options = {"dtype": h5py.string_dtype(), "maxshape": (None,), "chunks": (7,)}
        file.create_dataset(path, data=values, compression=1, shuffle=column.dtype == STRING, **options)
