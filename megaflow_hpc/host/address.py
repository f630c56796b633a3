"""The addresses of this node, and ports that are free on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
"""Reached from this node alone."""
LOOPBACKS = (LOOPBACK, "localhost", "::1")


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


SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""


def interface_towards(host: str) -> str:
    """Returns the interface by which this node reaches an IPv4 address, its own ones included; else ``""``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or LOOPBACK, 9))  # nothing is sent
        except OSError:
            return ""
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return ""


def unproxied(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``no_proxy`` and ``NO_PROXY`` with the loopback in them, and what a site has there already.

    Gateways and engines are called at this node's own addresses; an agent's HTTP client would send those calls to the
    site's proxy too. Clients read the variable in small letters where there is one, so both say the same.
    """
    there = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join([*LOOPBACKS, there] if there else LOOPBACKS)
    return {"no_proxy": value, "NO_PROXY": value}


def free_port(host: str = LOOPBACK) -> int:
    """Returns a TCP port of ``host`` that was free a moment ago; who loses the race for it tries another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
