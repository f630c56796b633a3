"""The fields of a packed record that decide over winners: they come first, so that it need not be decoded for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from megaflow_hpc.trajectories.journal.frames import unpack_record

_WANTED = frozenset({"id", "status", "attempt", "epoch"})
HEAD_BYTES = 4096
"""Bytes of a record within which its deciding fields lie, where a pod has written it."""


HeadingFields = tuple[str, str, int, int, int]
"""A :class:`Heading` without its names, which whoever writes one for each record does without."""


class Heading(NamedTuple):
    """The fields of a trajectory's record that decide over winners."""

    id: str
    status: str
    epoch: int
    attempt: int
    block: int
    """-1 where the record names none."""


def head_of(payload: bytes) -> dict[str, Any]:
    """Decodes a record with only the deciding fields of its trajectory; all of it where they do not come first."""
    # The size also bounds what a length in it makes the unpacker ask for.
    unpacker = msgpack.Unpacker(
        raw=False, strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=HEAD_BYTES
    )
    unpacker.feed(payload[:HEAD_BYTES])
    record: dict[str, Any] = {}
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if key != "trajectory":
                record[key] = unpacker.unpack()
                continue
            data: dict[str, Any] = {}
            for _ in range(unpacker.read_map_header()):
                name = unpacker.unpack()
                if name in _WANTED:
                    data[name] = unpacker.unpack()
                else:
                    unpacker.skip()
                if len(data) == len(_WANTED) and {"kind", "epoch", "block"} <= record.keys():
                    return {**record, "trajectory": data}
            break
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        pass
    return unpack_record(payload)


def trajectory_data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the trajectory's map of a record, which may hold it as a worker's packed bytes."""
    data = record["trajectory"]
    if isinstance(data, bytes):
        data = unpack_record(data)
    if not isinstance(data, dict):
        raise TypeError(f"a trajectory is a {type(data).__name__}, expected a map")
    return data
