"""Deflate and CRC-32 by ISA-L where it is installed: several times as fast as zlib, with valid streams and equal sums.

Inflating stops at the size that is expected: a stream of a megabyte may hold a gigabyte. What ISA-L writes is standard
deflate, which every HDF5 reads; what it computes is zlib's CRC-32. Both release the interpreter's lock, so chunks can
be compressed by threads.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

_GIVEN = os.environ.get("SLURM_CPUS_PER_TASK", "")
CPUS = min(len(os.sched_getaffinity(0)), int(_GIVEN) if _GIVEN.isdigit() and int(_GIVEN) else 1 << 20)
"""CPUs of this process; those of its job where Slurm does not bind it to them."""
THREADS = min(8, CPUS)
"""Number of threads that compress or inflate chunks."""

try:
    import isal
    from isal import isal_zlib
except ImportError:  # no wheel for this processor: the same bytes, slower
    NAME = f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
    crc32: Callable[..., int] = zlib.crc32
    _decompressor: Callable[[], Any] = zlib.decompressobj

    def compress(data: bytes | memoryview, level: int = 1) -> bytes:
        return zlib.compress(data, 1 if level == 1 else 4)

else:
    NAME = f"isal {isal.__version__}"
    crc32 = isal_zlib.crc32
    _decompressor = isal_zlib.decompressobj

    def compress(data: bytes | memoryview, level: int = 1) -> bytes:
        """Returns a zlib stream. ISA-L's level 1 is as small as zlib's, its level 3 nearly as small as zlib's 4."""
        packed: bytes = isal_zlib.compress(data, level)
        return packed


def inflate(packed: bytes, size: int) -> bytes:
    """Returns the ``size`` bytes that a zlib stream holds, and never holds many more in memory.

    Raises:
        OSError: the stream is damaged, or holds another number of bytes.
    """
    stream = _decompressor()
    try:
        data: bytes = stream.decompress(packed, size + 1)  # room left: the end is seen, and the checksum with it
    except Exception as error:  # zlib's error, or ISA-L's own
        raise OSError(f"does not inflate ({error}); the file is damaged") from error
    if len(data) != size or not stream.eof:
        raise OSError(f"holds {'more' if len(data) > size else len(data)} bytes, expected {size}; the file is damaged")
    return data
