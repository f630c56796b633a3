"""Fuzz the readers of campaign files (HDF5): changed bytes, and valid HDF5 that is no campaign."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.child import ProcessLimits, run_confined
from megaflow_hpc.trajectories import open_trajectories
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
from megaflow_hpc.trajectories.maintenance.compact import compact
from megaflow_hpc.trajectories.maintenance.validate import column_digests, validate
from tests.fuzz.contract import Target, reader, scratch
from tests.fuzz.journals import everything
from tests.support.samples import trajectory

_REFUSED = (AttributeError, KeyError, MemoryError, OSError, OverflowError, RuntimeError, TypeError, ValueError)
"""h5py raises these for an edit that it cannot make."""
LIMITS = ProcessLimits(memory_bytes=1 << 30, cpu_s=5, file_bytes=64 << 20)
_SECRET = b"a text that only the reader may have"


@cache
def _campaign(count: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trajectories.h5")
        with TrajectoryWriter(path, "sample") as writer:
            for number in range(count):
                writer.append(trajectory(number))
        return path.read_bytes()


@reader
def file_bytes(data: bytes) -> None:
    """Read changed bytes of a campaign file."""
    with scratch() as folder:
        file = folder / "trajectories.h5"
        file.write_bytes(data)
        _confined(lambda: _read(file))


def _confined(read: Callable[[], object]) -> None:
    """Read as verbs read a file of another user: the process ends with a message, or at a limit."""

    def call() -> int:
        with contextlib.suppress(MegaflowError):
            read()
        return 0

    assert run_confined(call, LIMITS) <= 0, "a reader failed without a message"


def _read(file: Path) -> list[str]:
    """Read a file in every way. Return the problems that its validation names."""
    with contextlib.suppress(OSError):  # a chunk is damaged, or the disk: h5py says which
        problems = validate(file)
        column_digests(file)
        with open_trajectories(file) as store:
            if problems:
                len(store)
            else:
                everything(store)
        return problems
    return ["damaged"]


@reader
def edits(data: bytes) -> None:
    """Read a valid file after HDF5 made edits, which the input chooses."""
    with scratch() as folder:
        (folder / "secret.bin").write_bytes(_SECRET * 100)
        with h5py.File(folder / "secret.h5", "w") as opened:
            opened["ids"] = np.frombuffer(_SECRET * 100, np.uint8)
        file = folder / "trajectories.h5"
        file.write_bytes(_campaign(6))
        with h5py.File(file, "r+") as opened:
            for start in range(0, min(len(data), 64), 8):
                with contextlib.suppress(*_REFUSED):
                    _edit(opened, random.Random(data[start : start + 8]), folder)
        _confined(lambda: _read_and_copy(file))


def _read_and_copy(file: Path) -> None:
    """Copy a valid file in every way. No copy contains data of another file."""
    if _read(file):
        return
    compacted, anonymous, exports = (file.with_name(name) for name in ("compacted.h5", "anonymous.h5", "exports"))
    with contextlib.suppress(OSError):
        compact(file, compacted)
        anonymise(file, anonymous)
        with open_trajectories(file) as store:
            export(store, ["jsonl"], exports)
        for made in (compacted, anonymous, exports / "trajectories.jsonl"):
            assert _SECRET not in made.read_bytes(), "a copy contains another file"


def _datasets(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(found)


def _edit(file: h5py.File, draw: random.Random, folder: Path) -> None:
    name = draw.choice(_datasets(file))
    dataset = file[name]
    values, kind, attributes = dataset[()], draw.randrange(16), dict(dataset.attrs)
    size = len(values) if dataset.shape else 0
    if kind < 4 and dataset.dtype.kind in "iuf" and size:
        info = np.iinfo(dataset.dtype) if dataset.dtype.kind in "iu" else np.finfo(dataset.dtype)
        dataset[draw.randrange(size)] = draw.choice((info.min, info.max, 0, 1, size, draw.randrange(100)))
        return
    if kind == 4:
        dataset.resize((draw.choice((0, 1, size + 1, 1 << 20, 1 << 40)),))
        return
    if kind == 5:
        dataset.attrs[draw.choice(("format", "note"))] = draw.choice((-1, "x", 1.5, np.arange(3), h5py.Empty("f")))
        return
    if kind == 6:
        key = draw.choice(("format", "format_version", "campaign", "versions", "sources", "software", "journal"))
        file.attrs[key] = draw.choice(
            (0, -1, 1 << 40, "x", "{}", "[1]", "[" * 3000, b"\xff", np.arange(9), h5py.Empty("S1"))
        )
        return
    del file[name]
    if kind == 7:
        return
    if kind == 8:
        file[name] = h5py.SoftLink(draw.choice((f"/{name}", "/", "/tokens/id", "/nowhere")))
    elif kind == 9:
        file[name] = h5py.ExternalLink(str(folder / "secret.h5"), "/ids")
    elif kind == 10:
        parts = [(str(folder / "secret.bin"), 0, 4096)]
        file.create_dataset(name, (draw.choice((size, 4096)),), "u1", external=parts)
    elif kind == 11:
        layout = h5py.VirtualLayout((size or 1,), "u1")
        layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "ids", shape=(size or 1,))
        file.create_virtual_dataset(name, layout)
    elif kind == 12:
        shape = draw.choice(((), (0,), (size, 1), (size + 1,), (1 << 40,), (2, 2, 2)))
        file.create_dataset(
            name,
            shape,
            draw.choice(("i4", "f8", "u1", "S3", h5py.string_dtype(), "?", "c8")),
            chunks=(len(shape) == 1) or None,
        )
    elif kind == 13:
        made = file.create_dataset(
            name, (size,), dataset.dtype, chunks=(max(size, 1),), compression="gzip", shuffle=True
        )
        made.id.write_direct_chunk((0,), draw.randbytes(draw.choice((1, 30))))
    elif kind == 14:
        file.create_group(name)
        return
    else:
        made = file.create_dataset(name, data=values, chunks=True if size else None, fletcher32=bool(size))
    for key, value in attributes.items():
        with contextlib.suppress(TypeError, OSError, KeyError):
            file[name].attrs[key] = value


def _choices() -> list[bytes]:
    draw = random.Random(7)
    return [b"", *(draw.randbytes(8 * length) for length in (1, 1, 2, 3, 8))]


_WORDS = (b"SNOD", b"TREE", b"HEAP", b"FRHP", b"OHDR", b"\xff" * 8)
TARGETS = {
    "hdf5": Target(file_bytes, lambda: [_campaign(3), _campaign(0)], words=_WORDS, examples=60),
    "hdf5-edits": Target(edits, _choices, examples=30),
}
