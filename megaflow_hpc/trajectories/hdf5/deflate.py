"""Deflate and CRC-32 by ISA-L where it is installed: several times as fast as zlib, with valid streams and equal sums.

What ISA-L writes is standard deflate, which every HDF5 reads; what it computes is zlib's CRC-32. Both release the
interpreter's lock, so chunks can be compressed by threads.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

THREADS = max(1, min(8, len(os.sched_getaffinity(0))))
"""Number of threads that compress or inflate chunks."""

try:
    import isal
    from isal import isal_zlib
except ImportError:  # no wheel for this processor: the same bytes, slower
    NAME = f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
    crc32: Callable[..., int] = zlib.crc32
    decompress: Callable[..., bytes] = zlib.decompress

    def compress(data: bytes | memoryview, level: int = 1) -> bytes:
        return zlib.compress(data, 1 if level == 1 else 4)

else:
    NAME = f"isal {isal.__version__}"
    crc32 = isal_zlib.crc32
    decompress = isal_zlib.decompress

    def compress(data: bytes | memoryview, level: int = 1) -> bytes:
        """Returns a zlib stream. ISA-L's level 1 is as small as zlib's, its level 3 nearly as small as zlib's 4."""
        packed: bytes = isal_zlib.compress(data, level)
        return packed
