"""Tar archives that a hostile task or agent could send."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Iterable
from typing import Any


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return one archive entry. ``fields`` are fields of ``tarfile.TarInfo``."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hardlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def archive(members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an archive with these entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def raw(info: tarfile.TarInfo, **fields: tuple[int, bytes]) -> bytes:
    """Return a header with bytes overwritten at an offset and a corrected checksum."""
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for offset, data in fields.values():
        header[offset : offset + len(data)] = data
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


END = bytes(1024)


@functools.cache
def hostile() -> dict[str, bytes]:
    """Return invalid or hostile archives by the name of their defect."""
    sparse, plain_file = member("s", type=b"S")[0], member("x")[0]
    pax = b"9" * 30_000 + b" path=x\n"
    return {
        "a link to itself": archive([symlink("a", "a"), hardlink("b", "a")]),
        "a zero byte": archive([member("x", b"z", pax_headers={"path": "a\0b"})]),
        "a sparse file": raw(sparse, real=(483, b"\x80" + (1500 << 20).to_bytes(11, "big"))) + END,
        "a sparse file, posix": archive([member("s", b"z", pax_headers={"GNU.sparse.realsize": str(1 << 40)})]),
        "hard links": archive([member("big", bytes(8 << 20)), *(hardlink(f"l{n}", "big") for n in range(200))]),
        "parents": archive([member("../../escape", b"z")]),
        "a file through a link": archive([symlink("d", ".."), member("d/escape", b"z")]),
        "a file through a later link": archive([symlink("d", "../.."), hardlink("e", "d"), member("e/escape", b"z")]),
        "a hard link outside": archive([hardlink("x", "/etc/passwd"), hardlink("y", "../../etc/passwd")]),
        "a long name": archive([member("n" * 300, b"z")]),
        "a file and below it": archive([member("p", b"z"), member("p/q", b"z")]),
        "a directory and a file": archive([member("p/q", b"z"), member("p", b"z")]),
        "no name": archive([member("", b"z"), member(".", b"z")]),
        "a deep nest": archive([member("d/" * 3000 + "x", b"z")]),
        "many files": raw(plain_file) * 120_000 + END,
        "a negative size": raw(plain_file, size=(124, b"\xff" * 12)) + END,
        "a size beyond reason": raw(plain_file, size=(124, b"\x80" + b"\xff" * 11)) + END,
        "a negative extension": raw(member("x", type=b"L")[0], size=(124, b"\xff" * 11 + b"\0")) + END,
        "an endless extension": raw(member("x", type=b"x")[0], size=(124, b"77777777777\0")) + END,
        "a slow extension": raw(member("x", type=b"x", size=len(pax))[0]) + pax + bytes(-len(pax) % 512) + END,
        "no end": archive([member("x", bytes(5000))])[:2000],
        "nothing": b"",
        "noise": bytes(range(256)) * 40,
    }
