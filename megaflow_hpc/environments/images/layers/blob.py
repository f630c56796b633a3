"""Reads layer blobs, compressed or not, and computes their digests on the way.

Deletions are marked as in the OCI image specification. A file ``.wh.NAME`` hides NAME in the layers below.
``.wh..wh..opq`` in a directory hides everything that lower layers have in it.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.tar import RefusedMember, TarReader

try:
    from isal import isal_zlib
except ImportError:  # There is no wheel for this architecture, or the program runs with minimal imports.
    inflater: Callable[..., Any] = zlib.decompressobj
    deflater: Callable[[], Any] = lambda: zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731
else:
    inflater = isal_zlib.decompressobj
    deflater = lambda: isal_zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731

BLOCK = 4096
"""File systems allocate whole blocks, at least one for a non-empty file."""
MAX_LAYER_BYTES = 1 << 40
"""Maximum total size of a layer's files, and of its blob."""
MAX_ENTRIES = 20_000_000

_CHUNK = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class LayerFacts:
    """Digest and sizes of a layer: ``bytes`` of its blob, ``unpacked_bytes`` and ``inodes`` of its files."""

    digest: str
    """Hexadecimal SHA-256 of the blob."""
    bytes: int
    unpacked_bytes: int
    inodes: int


class LayerStream(io.RawIOBase):
    """The decompressed archive of a blob that arrives in chunks."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._digest = hashlib.sha256()
        self._read_bytes = 0
        self._decompress: Callable[[bytes], bytes] | None = None
        self._decompressed = memoryview(b"")

    @classmethod
    def of_file(cls, file: BinaryIO) -> LayerStream:
        """Creates a stream from an open file."""
        return cls(iter(lambda: file.read(_CHUNK), b""))

    def members(self) -> TarReader:
        """Returns an iterator over the archive's members."""
        return TarReader(cast(BinaryIO, self))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into ``buffer``. Returns the number of bytes read, 0 at the end."""
        while not self._decompressed:
            data = self._read_blob()
            if not data:
                return 0
            if self._decompress is None:
                self._decompress = _decompressor(data)
            try:
                self._decompressed = memoryview(self._decompress(data))
            except Exception as error:  # Each library raises its own exception class.
                raise RefusedMember(f"not to be decompressed: {error}") from None
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._decompressed))
        view[:size] = self._decompressed[:size]
        self._decompressed = self._decompressed[size:]
        return size

    def finish(self) -> tuple[str, int]:
        """Consumes the rest of the blob. Returns its digest and its size in bytes."""
        while self._read_blob():
            pass
        return self._digest.hexdigest(), self._read_bytes

    def _read_blob(self) -> bytes:
        """Returns the next chunk of the blob, empty at the end."""
        data = next(filter(None, self._pieces), b"")
        self._digest.update(data)
        self._read_bytes += len(data)
        if self._read_bytes > MAX_LAYER_BYTES:
            raise SandboxError(f"more than {MAX_LAYER_BYTES} bytes in one layer")
        return data


def _decompressor(first: bytes) -> Callable[[bytes], bytes]:
    """Returns the decompression function for a blob, chosen by its magic bytes."""
    if first.startswith(_GZIP):
        return _Gunzip()
    if first.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise SiteError(
                "a layer is compressed by zstd, which this Python cannot read; pip install zstandard"
            ) from None
        zstd = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        return cast(Callable[[bytes], bytes], zstd.decompress)
    return lambda data: data


class _Gunzip:
    """Decompresses concatenated gzip members as one stream."""

    def __init__(self) -> None:
        self._member: Any = inflater(wbits=31)

    def __call__(self, data: bytes) -> bytes:
        pieces = []
        while data:
            if self._member.eof:
                is_padding = not data.strip(b"\0")
                if is_padding:
                    break
                self._member = inflater(wbits=31)
            pieces.append(self._member.decompress(data))
            data = self._member.unused_data if self._member.eof else b""
        return b"".join(pieces)


class Tally:
    """Totals the disk space of a layer's files. Raises :class:`RefusedMember` if it exceeds the maximum."""

    def __init__(self) -> None:
        self.bytes = self.inodes = 0

    def add(self, size: int, *, is_directory: bool = False) -> None:
        """Counts one file of ``size`` bytes, or a directory."""
        self.bytes += BLOCK if is_directory else -(-size // BLOCK) * BLOCK
        self.inodes += 1
        if self.bytes > MAX_LAYER_BYTES or self.inodes > MAX_ENTRIES:
            raise RefusedMember("more files than a layer may have")


def measure(pieces: Iterable[bytes], digest: str) -> LayerFacts:
    """Consumes a blob that arrives in chunks and returns its facts.

    Raises:
        SandboxError: The digest is not ``digest``, or the blob is not a layer.
    """
    stream, tally = LayerStream(pieces), Tally()
    refusal: RefusedMember | None = None
    try:
        for member in stream.members():
            tally.add(member.size, is_directory=member.kind == "directory")
    except RefusedMember as error:
        refusal = error
    actual, size = stream.finish()
    if actual != digest:
        raise SandboxError(f"{digest}: what came has the digest {actual}; fetch it again")
    if refusal is not None:
        raise SandboxError(f"{digest}: not a layer of an image: {refusal}")
    return LayerFacts(digest, size, tally.bytes, tally.inodes)
