"""The addresses of this node, and ports that are free on it."""

from __future__ import annotations

import os
import socket

LOOPBACK = "127.0.0.1"
"""Reached from this node alone."""


def address() -> str:
    """Returns how other nodes reach this one: ``MEGAFLOW_ADDRESS``, else the host's name where it resolves, else the
    address of its route outward, else :data:`LOOPBACK`."""
    chosen = os.environ.get("MEGAFLOW_ADDRESS")
    if chosen:
        return chosen
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
        return name
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def free_port(host: str = LOOPBACK) -> int:
    """Returns a TCP port of ``host`` that was free a moment ago; who loses the race for it tries another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
