"""Reads chunks of a dataset as they are stored, and decodes them here.

HDF5 holds a lock of the whole process while it decodes, and its deflate takes twice as long as isal's. Random batches
touch most chunks of the token columns, so :func:`megaflow_hpc.trajectories.hdf5.columns.read_slices` decodes them in
threads. Only pipelines that this package writes are decoded. HDF5 reads all other chunks, and reports what is damaged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from h5py import h5z
from numpy.typing import NDArray

try:
    from isal import isal_zlib
except ImportError:  # no wheel for this processor
    inflater: Callable[[], Any] = zlib.decompressobj
    InflateError: Any = zlib.error
else:
    inflater = isal_zlib.decompressobj
    InflateError = isal_zlib.error

_PIPELINE = (h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32)
_CHECKSUM_BYTES = 4
_OVERHEAD_BYTES = 64
"""Upper bound of the headers and checksums of a short chunk. No deflate doubles the size of its input."""


class ChunkDecoder:
    """Decodes chunks of a one-dimensional chunked dataset of numbers. Threads may share a decoder."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        stored = dataset.id.get_create_plist()
        filters = [stored.get_filter(number)[0] for number in range(stored.get_nfilters())]
        in_order = [each for each in _PIPELINE if each in filters]
        self._dataset = dataset
        self._dtype = dataset.dtype
        self._shuffled = h5z.FILTER_SHUFFLE in filters
        self._checked = h5z.FILTER_FLETCHER32 in filters
        self._known = filters == in_order and h5z.FILTER_DEFLATE in filters

    def decode(self, number: int) -> NDArray[Any] | None:
        """Returns a whole chunk, counted from 0; ``None`` if HDF5 must read it."""
        if not self._known:
            return None
        size = self._dataset.chunks[0]
        size_bytes = size * self._dtype.itemsize
        buffer = np.empty(2 * size_bytes + _OVERHEAD_BYTES, np.uint8)
        try:
            skipped_filters, stored = self._dataset.id.read_direct_chunk((number * size,), out=buffer)
        except (OSError, RuntimeError, ValueError):  # never written, damaged, or larger than the buffer
            return None
        data = bytes(stored)
        if skipped_filters:
            return None
        if self._checked:
            data, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
            if not _matches_fletcher32(data, checksum):
                return None
        stream = inflater()
        try:
            inflated = stream.decompress(data, size_bytes + 1)  # with room left it also reads deflate's own checksum
        except InflateError:
            return None
        if not stream.eof or len(inflated) != size_bytes:
            return None
        entries = np.frombuffer(inflated, np.uint8)
        if self._shuffled:
            entries = _unshuffled(entries, self._dtype.itemsize)
        return entries.view(self._dtype)


def _matches_fletcher32(data: bytes, stored: bytes) -> bool:
    """Returns whether ``stored`` is HDF5's checksum of ``data``: two sums of 16-bit words, modulo 65535."""
    padded = data + b"\0" * (len(data) % 2)
    words = np.frombuffer(padded, ">u2").astype(np.int64)
    weights = np.arange(len(words), 0, -1)
    checksum = int.from_bytes(stored, "little")
    sum_matches = (int(words.sum()) - (checksum & 0xFFFF)) % 65535 == 0
    weighted_sum_matches = (int(words @ weights) - (checksum >> 16)) % 65535 == 0
    return sum_matches and weighted_sum_matches


def _unshuffled(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Returns entries of ``width`` bytes from their first bytes, their second bytes and so on."""
    planes = data.reshape(width, -1)
    entries = np.empty((planes.shape[1], width), np.uint8)
    for place, plane in enumerate(planes):
        entries[:, place] = plane
    return entries.reshape(-1)
