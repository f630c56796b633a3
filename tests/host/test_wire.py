"""Messages survive the wire: every size, every cut, and text that is not valid Unicode."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.host.wire import WireLink, frame, pack, unpack

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES))
def test_a_message_comes_out_as_it_went_in(message: dict[str, object]) -> None:
    assert unpack(pack(message)) == message


def test_undecodable_output_of_a_sandbox_passes_through() -> None:
    text = b"\xff\xfe ok".decode("utf-8", "surrogateescape")
    assert unpack(pack({"stdout": text}))["stdout"] == text


def test_frames_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    link = WireLink(ours)
    messages = [{"op": "x", "n": n, "data": b"z" * (n * 50_000)} for n in range(6)]
    data = b"".join(frame(pack(message)) for message in messages)

    def send() -> None:
        for start in range(0, len(data), 7919):
            theirs.sendall(data[start : start + 7919])
        theirs.close()

    thread = threading.Thread(target=send)
    thread.start()
    received: list[object] = []
    try:
        while True:
            message = link.receive()
            if message is not None:
                received.append(message)
    except EOFError:
        pass
    thread.join()
    assert received == messages


def test_a_broken_peer_is_not_taken_for_a_message() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\xff\xff\xff\xff garbage")
    with pytest.raises(EOFError, match="frame of"):
        WireLink(ours).receive()
