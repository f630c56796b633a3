"""Finds the addresses of this node, and free ports on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
"""Address that is reachable from this node only."""
LOOPBACKS = (LOOPBACK, "localhost", "::1")


def address() -> str:
    """Returns the address at which other nodes reach this one.

    It is ``MEGAFLOW_ADDRESS`` if set, else the host name if it resolves, else the source address of its outbound
    route, else :data:`LOOPBACK`.
    """
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
            probe.connect(("192.0.2.1", 9))  # a documentation address; a UDP connect sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


SIOCGIFADDR = 0x8915
"""ioctl request for an interface's IPv4 address; see netdevice(7)."""


def interface_towards(host: str) -> str:
    """Returns the interface through which this node reaches an IPv4 address, which may be its own. Empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or LOOPBACK, 9))  # sends nothing
        except OSError:
            return ""
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return ""


def unproxied(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``no_proxy`` and ``NO_PROXY`` with the loopback address added to the site's own entries.

    Gateways and engines are called at this node's own addresses. Without these entries, an agent's HTTP client would
    send such calls to the site's proxy. Clients prefer the lower-case variable if it is set, so both get the same
    value.
    """
    there = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join([*LOOPBACKS, there] if there else LOOPBACKS)
    return {"no_proxy": value, "NO_PROXY": value}


def free_port(host: str = LOOPBACK) -> int:
    """Returns a TCP port of ``host`` that is currently free. If another process binds it first, the caller must
    retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
