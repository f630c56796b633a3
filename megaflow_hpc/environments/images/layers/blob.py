"""A layer as one file: read through its digest, whatever it is compressed by.

What a layer deletes is said as OCI's image specification has it: ``.wh.NAME`` hides NAME below, ``.wh..wh..opq`` in a
directory all that is below it.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.tar import RefusedMember, TarReader

try:
    from isal import isal_zlib
except ImportError:  # no wheel for this processor, or a program that imports little
    inflater: Callable[..., Any] = zlib.decompressobj
    deflater: Callable[[], Any] = lambda: zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731
else:
    inflater = isal_zlib.decompressobj
    deflater = lambda: isal_zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731

BLOCK = 4096
"""A file system gives out blocks, and at least one for what is not empty."""
MAX_LAYER_BYTES = 1 << 40
"""Bytes that a layer may hold, and the size of what it was compressed to."""
MAX_ENTRIES = 20_000_000

_CHUNK = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer: ``bytes`` of its blob, ``unpacked_bytes`` and ``inodes`` of its files."""

    digest: str
    """SHA-256 of the blob, in hexadecimal."""
    bytes: int
    unpacked_bytes: int
    inodes: int


class LayerStream(io.RawIOBase):
    """The archive in a blob, uncompressed; :meth:`finish` compares the blob with its digest.

    Args:
        blob: is read by ``read`` alone, and not closed.
    """

    def __init__(self, blob: BinaryIO) -> None:
        self._blob = blob
        self._digest = hashlib.sha256()
        self._read_bytes = 0
        self._inflater: Callable[[bytes], bytes] | None = None
        self._waiting = memoryview(b"")

    def _more(self) -> bytes:
        data = self._blob.read(_CHUNK)
        self._digest.update(data)
        self._read_bytes += len(data)
        return data

    def _inflate(self, data: bytes) -> bytes:
        if self._inflater is None:
            self._inflater = _inflater(data)
        try:
            return self._inflater(data)
        except Exception as error:  # each library has a class of its own
            raise RefusedMember(f"not to be decompressed: {error}") from None

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills ``buffer`` as far as there is something; returns the number of bytes, 0 at the end."""
        while not self._waiting:
            data = self._more()
            if not data:
                return 0
            self._waiting = memoryview(self._inflate(data))
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._waiting))
        view[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        return size

    def finish(self) -> tuple[str, int]:
        """Reads what is left; returns the blob's digest and its size in bytes."""
        while self._more():
            pass
        return self._digest.hexdigest(), self._read_bytes


def _inflater(first: bytes) -> Callable[[bytes], bytes]:
    if first.startswith(_GZIP):
        return _Gunzip()
    if first.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise SiteError(
                "a layer is compressed by zstd, which this Python cannot read; pip install zstandard"
            ) from None
        found: Callable[[bytes], bytes] = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress
        return found
    return lambda data: data


class _Gunzip:
    """Several gzip members one after the other are one stream."""

    def __init__(self) -> None:
        self._member: Any = inflater(wbits=31)

    def __call__(self, data: bytes) -> bytes:
        found = []
        while data:
            if self._member.eof:
                if not data.strip(b"\0"):  # padding
                    break
                self._member = inflater(wbits=31)
            found.append(self._member.decompress(data))
            data = self._member.unused_data if self._member.eof else b""
        return b"".join(found)


class Tally:
    """Counts what a layer's files take once unpacked; raises :class:`RefusedMember` beyond all reason."""

    def __init__(self) -> None:
        self.bytes = self.inodes = 0

    def add(self, size: int, *, is_directory: bool = False) -> None:
        """Counts a file of ``size`` bytes, or something else."""
        self.bytes += BLOCK if is_directory else -(-size // BLOCK) * BLOCK
        self.inodes += 1
        if self.bytes > MAX_LAYER_BYTES or self.inodes > MAX_ENTRIES:
            raise RefusedMember("more files than a layer may have")


def measure(blob: BinaryIO, digest: str) -> LayerFacts:
    """Reads a blob once, to its end, and returns its facts.

    Raises:
        SandboxError: it is not the one of ``digest``, or no layer.
    """
    stream, tally, why = LayerStream(blob), Tally(), ""
    try:
        for member in TarReader(stream):  # type: ignore[arg-type]
            tally.add(member.size, is_directory=member.kind == "directory")
    except RefusedMember as error:
        why = str(error)
    found, size = stream.finish()
    if found != digest:
        raise SandboxError(f"{digest}: what came has the digest {found}; fetch it again")
    if why:
        raise SandboxError(f"{digest}: not a layer of an image: {why}")
    return LayerFacts(digest, size, tally.bytes, tally.inodes)
