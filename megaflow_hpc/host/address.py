"""Where this node is reached, and ports that are free on it."""

from __future__ import annotations

import os
import socket


def address() -> str:
    """How other nodes reach this one: the host's name where it resolves, else the address of its route outward."""
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
            return "127.0.0.1"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; a start that loses the race for it is tried again with another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
