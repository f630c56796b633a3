"""Stores weight versions as deltas, the difference from an earlier full version, and restores them bit for bit.

::

    RUN/weights/7/
      delta.json                 {"base": 5, "files": {"model.safetensors": {"size": …, "word": 2, "sha256": …}}}
      model.safetensors.delta    positions and values of the words that differ from version 5
      config.json, …             as in a full version

At small learning rates, most bfloat16 weights do not change: one Adam step at 1e-6 changes about 2 %. Files are
compared word by word (2 bytes for bfloat16, 4 for float32). The gaps between changed words, and the XOR of those words
with the base, are deflated separately. An unchanged word costs a fraction of a bit. Files are processed in chunks of
:data:`WORDS` words, so they never need to fit in memory.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.host.files import open_regular, remove_tree
from megaflow_hpc.rundir.layout import read_json, write_record
from megaflow_hpc.rundir.safetensors import read_header
from megaflow_hpc.rundir.weight_source import ADAPTER, DELTA, Delta, DeltaFile

try:
    from isal.isal_zlib import compress as _compress
except ImportError:  # no wheel for this architecture: zlib writes the same format, only slower
    from zlib import compress as _compress

WORDS = 2**23
"""Number of words to compare at a time. They take 16 MB in bfloat16."""
MIN_DELTA_FACTOR = 4
"""Minimum ratio of full size to delta size. If the ratio is lower, the full version is published instead."""
SUFFIX = ".delta"
WIDTHS = {"BF16": 2, "F16": 2}
"""Word size in bytes, by the safetensors dtype of a file's first tensor. 4 for other dtypes."""
_HEADER = struct.Struct("<4I")
"""Header of a chunk: size of the gaps, size of the deflated gaps, number of changed words, size of the deflated words.
Sizes are in bytes."""


def write_delta(whole: Path, base: Path, number: int, folder: Path) -> tuple[int, int] | None:
    """Writes the delta from model directory ``base`` to ``whole`` into the new directory ``folder``.

    Args:
        whole: The model directory to publish, with safetensors files.
        base: Directory of an earlier full version.
        number: Version number of ``base``.

    Returns:
        Size of the tensor files and size of the delta, in bytes. ``None`` if the two directories do not have tensor
        files of the same names and sizes. In that case, nothing is written.
    """
    names = sorted(path.name for path in whole.iterdir() if path.suffix == ".safetensors")
    sizes = {name: (whole / name).stat().st_size for name in names}
    if not names:
        return None
    for name in names:
        if not (base / name).is_file() or (base / name).stat().st_size != sizes[name]:
            return None
    make_directory(folder)
    files: dict[str, DeltaFile] = {}
    for name in names:
        word = _width(whole / name)
        digest = hashlib.sha256()
        with (
            open_regular(whole / name) as new,
            open_regular(base / name) as old,
            open(folder / (name + SUFFIX), "wb") as to,
        ):
            while part := new.read(WORDS * word):
                digest.update(part)
                to.write(_encode(part, old.read(WORDS * word), word))
        files[name] = DeltaFile(sizes[name], word, digest.hexdigest())
    for path in whole.iterdir():
        if path.is_file() and path.name not in names:
            shutil.copyfile(path, folder / path.name)
    write_record(folder / DELTA, Delta(number, files))
    return sum(sizes.values()), sum((folder / (name + SUFFIX)).stat().st_size for name in names)


def write_small_delta(whole: Path, base: Path, number: int, folder: Path) -> bool:
    """Writes a delta like :func:`write_delta`, but only keeps it if it is small enough. Returns whether it was kept.

    LoRA adapters are never stored as deltas.
    """
    if (whole / ADAPTER).exists():
        return False
    delta = write_delta(whole, base, number, folder)
    if delta is not None and delta[0] >= MIN_DELTA_FACTOR * delta[1]:
        return True
    remove_tree(folder)
    return False


def put_together(delta: Path, base: Path, whole: Path) -> Path:
    """Restores the full model directory ``whole`` from a delta, atomically.

    Raises:
        ConfigError: The base is missing, or the result differs from the published model.
    """
    if whole.is_dir():
        return whole
    staged = whole.with_name(f".{whole.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        files = read_json(delta / DELTA, Delta).files
        make_directory(staged)
        for name, file in files.items():
            digest = hashlib.sha256()
            with (
                open_regular(delta / (name + SUFFIX)) as parts,
                open_regular(base / name) as old,
                open(staged / name, "wb") as to,
            ):
                for part in _decode(parts, old, file.word):
                    digest.update(part)
                    to.write(part)
            if digest.hexdigest() != file.sha256:
                raise ConfigError(
                    f"{delta}: combined with {base}, {name} differs from what was published (its SHA-256 differs)"
                )
        for path in delta.iterdir():
            if path.is_file() and path.name != DELTA and path.suffix != SUFFIX:
                shutil.copyfile(path, staged / path.name)
        os.rename(staged, whole)
    except (OSError, ValueError, LookupError, TypeError, struct.error, zlib.error) as error:
        if not whole.is_dir():
            raise ConfigError(f"{delta}: cannot be combined with {base}: {error}") from error
    finally:
        remove_tree(staged, ignore_errors=True)
    return whole


def _width(path: Path) -> int:
    """Returns the word size of a file in bytes. It is the item size of the file's first tensor."""
    return next((WIDTHS.get(tensor.dtype, 4) for tensor in read_header(path).values()), 4)


def _words(data: bytes, word: int) -> NDArray[Any]:
    return np.frombuffer(data.ljust(-(-len(data) // word) * word, b"\0"), f"<u{word}")


def _encode(new: bytes, old: bytes, word: int) -> bytes:
    """Encodes a chunk as gaps between changed words, and XOR values. A gap byte of 255 continues in the next byte."""
    change = _words(new, word) ^ _words(old, word)
    at = np.flatnonzero(change)
    gaps = np.diff(at, prepend=-1) - 1
    full = gaps // 255
    ends = np.cumsum(full + 1)
    coded = np.full(int(ends[-1]) if len(ends) else 0, 255, np.uint8)
    coded[ends - 1] = gaps % 255
    planes = change[at].view(np.uint8).reshape(-1, word).T.tobytes()  # high bytes are mostly equal
    packed = _compress(coded.tobytes(), 1), _compress(planes, 1)
    return _HEADER.pack(len(coded), len(packed[0]), len(at), len(packed[1])) + packed[0] + packed[1]


def _decode(parts: BinaryIO, base: BinaryIO, word: int) -> Iterator[bytes]:
    while old := base.read(WORDS * word):
        coded_size, gaps_size, count, values_size = _HEADER.unpack(parts.read(_HEADER.size))
        coded = np.frombuffer(_inflate(parts.read(gaps_size), coded_size), np.uint8)
        planes = np.frombuffer(_inflate(parts.read(values_size), count * word), np.uint8)
        words = _words(old, word).copy()
        last = coded != 255
        at = np.cumsum(coded, dtype=np.int64)[last] + np.arange(count)
        words[at] ^= planes.reshape(word, -1).T.copy().view(f"<u{word}")[:, 0]
        yield words.tobytes()[: len(old)]


def _inflate(packed: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, size + 1)
    if len(data) != size:
        raise ValueError(f"a part holds {len(data)} bytes, expected {size}: it is damaged")
    return data
