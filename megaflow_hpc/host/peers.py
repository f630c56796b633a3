"""Find the user whose process is at the other end of a TCP connection over the loopback.

The kernel is asked about that socket (netlink, ``sock_diag(7)``). This takes some microseconds, however many
connections the node has, while ``/proc/net/tcp`` would list them all. The answer has the user id, but not the process.
"""

from __future__ import annotations

import os
import socket
import struct

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _LISTENS = 4, 20, 1, 10
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""
_ASKED = struct.Struct("=BBBxI2s2s16s16sIII")
"""struct inet_diag_req_v2: family, protocol, extensions, states, ports and addresses, interface, cookie."""
_STATE, _UID = _HEADER.size + 1, _HEADER.size + 64
"""Offsets in an answer, a struct inet_diag_msg after its header."""


def uid_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Returns the user id of the socket at ``peer`` that is connected to ``here``. Both are IPv4 addresses of this
    node.

    ``None`` if the kernel does not answer, or has no such connection in this network namespace.
    """
    try:
        ends = [struct.pack("!H", port) for _, port in (peer, here)]
        addresses = [socket.inet_aton(host) + bytes(12) for host, _ in (peer, here)]
        asked = _ASKED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF, *ends, *addresses, 0, *[0xFFFFFFFF] * 2)
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        with socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG) as kernel:
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked)
            answer = kernel.recv(4096)  # the answer is already there: the kernel answers during send
    except (OSError, struct.error):
        return None
    if len(answer) < _UID + 4 or _HEADER.unpack_from(answer)[1] != _BY_FAMILY or answer[_STATE] == _LISTENS:
        return None
    uid: int = struct.unpack_from("=I", answer, _UID)[0]
    return uid


def name_of(peer: tuple[str, int], here: tuple[str, int]) -> str:
    """Describes the other end: ``uid N`` over the loopback if the kernel knows it, else the address."""
    if peer[0].startswith("127."):
        uid = uid_of(peer, here)
        if uid is not None:
            return "this user" if uid == os.geteuid() else f"uid {uid}"
    return peer[0]
