"""Messages between processes: msgpack in frames, errors by name, trajectories as records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.agents import wire as agents_wire
from megaflow_hpc.host import wire
from megaflow_hpc.trajectories.journal.checks import checked
from megaflow_hpc.trajectories.journal.frames import unpack_record
from megaflow_hpc.trajectory import Trajectory
from tests.security.fuzz.journals import same
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.samples import trajectory


def _parcels() -> list[bytes]:
    packed = [
        wire.pack(message)
        for message in ({"a": 1, "text": "\udc80", "list": [1.5, None, b"x"]}, {"error": "SandboxError", "text": "t"})
    ]
    return [wire.frame(packed[0]), wire.frame(b"".join(packed)) + wire.frame(packed[1]), wire.frame(b"")]


@contextlib.contextmanager
def _linked(folder: Path) -> Iterator[Feed]:
    """Frames over a socket, by both readers; what is unpacked is packed again to the same."""

    def feed(data: bytes) -> None:
        with contextlib.suppress(EOFError, ValueError):
            _through_a_link(data)
        asyncio.run(_through_a_stream(data))
        with contextlib.suppress(ValueError):
            message = wire.unpack(data)
            if not same(wire.unpack(wire.pack(message)), message):
                raise Broken("packed again, it is another message")

    yield feed


def _through_a_link(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        link = wire.Link(ours)
        while (message := link.receive()) is not None:
            if not isinstance(message, dict):
                raise Broken("a message is no map", type(message))


async def _through_a_stream(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    while (message := await agents_wire.read(reader)) is not None:
        if "error" in message and "text" in message:
            raise_nothing = agents_wire.decode_error(message)
            assert isinstance(raise_nothing, Exception)


@contextlib.contextmanager
def _recorded(folder: Path) -> Iterator[Feed]:
    """A trajectory's record, as a worker's bytes: refused, or kept whole."""

    def feed(data: bytes) -> None:
        with contextlib.suppress(
            AttributeError, KeyError, TypeError, ValueError
        ):  # what its callers take for no record
            found = checked(Trajectory.from_record(unpack_record(data)))
            again = Trajectory.from_record(found.to_record())
            if repr(again) != repr(found):
                raise Broken("recorded again, it is another trajectory")

    yield feed


@contextlib.contextmanager
def _packed(folder: Path) -> Iterator[Feed]:
    """Whatever JSON an agent or a tool gives is sent and received as it was."""

    def feed(data: bytes) -> None:
        try:
            given = {"value": json.loads(data)}
        except (ValueError, RecursionError):
            return
        try:
            frame = agents_wire.frame(given)
        except (TypeError, ValueError, OverflowError):
            return
        if not same(wire.unpack(frame[4:]), given):
            raise Broken("received, it is another message")
        if not same(list(wire.unpack_all(wire.pack(given) * 2)), [given, given]):
            raise Broken("received in a parcel, it is another message")

    yield feed


def targets() -> list[Target]:
    """Frames, records and messages."""
    words = (
        b"\xdd\x05\xf5\xe0\xff",
        b"\xdf\x02\0\0\0",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\x7f\xff\xff\xff",
        b"\xc7\x04\xff",
        b"\xd6\xff\0\0\0\0",
        b"\xc1",
    )
    return [
        Target("wire", _linked, _parcels, words=words),
        Target(
            "record",
            _recorded,
            lambda: [wire.pack(trajectory(n).to_record()) for n in (1, 2, 5)],
            form="msgpack",
            words=words,
        ),
        Target("packed", _packed, lambda: [b'{"a": [1, 2.5, null, "\\udc80"], "b": {"c": true}}'], form="json"),
    ]
