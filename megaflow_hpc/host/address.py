"""Finds the addresses of this node, and free ports on it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
"""IPv4 address that is reachable only from this node."""
LOOPBACKS = (LOOPBACK, "localhost", "::1")


_FAMILIES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Address families in order of preference, each with an address reserved for documentation. Nothing is sent to that
address."""


def address() -> str:
    """Returns the address at which other nodes reach this node, over IPv4 if possible.

    Uses ``MEGAFLOW_ADDRESS`` if set. Otherwise tries IPv4, then IPv6: the host name if it resolves, else the source
    address of the outbound route. Falls back to :data:`LOOPBACK`.
    """
    chosen = os.environ.get("MEGAFLOW_ADDRESS", "").strip("[]")
    if chosen:
        return chosen
    name = socket.gethostname()
    for family, elsewhere in _FAMILIES:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None, family)
            return name
        source = _source_towards(elsewhere, family)
        # A link-local address needs a scope, which differs on other nodes.
        if source and not ipaddress.ip_address(source).is_link_local:
            return source
    return LOOPBACK


def host_of_url(host: str) -> str:
    """Formats an address for a URL. IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def listen_everywhere() -> socket.socket:
    """Returns a listening socket for all IPv4 and IPv6 addresses of this node. The kernel chooses the port."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is disabled
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


def _source_towards(host: str, family: socket.AddressFamily) -> str:
    """Returns this node's own address on the route to ``host``, or an empty string if there is no route."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a UDP connect sends nothing
        return str(probe.getsockname()[0])
    return ""


def interface_towards(host: str) -> str:
    """Returns the interface through which this node reaches the IPv4 address ``host``, which may be the node itself.
    Returns an empty string if the interface is unknown."""
    own = _source_towards(host or LOOPBACK, socket.AF_INET)
    if not own:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == socket.inet_aton(own):
                    return name
    return ""


SIOCGIFADDR = 0x8915
"""ioctl request for an interface's IPv4 address. See netdevice(7)."""


def unproxied(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``no_proxy`` and ``NO_PROXY`` with the loopback address added to the site's own entries.

    Gateways and engines are called at this node's own addresses. Without these entries, an agent's HTTP client would
    send these calls to the site's proxy. Clients prefer the lower-case variable if it is set, so both get the same
    value.
    """
    existing = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join([*LOOPBACKS, existing] if existing else LOOPBACKS)
    return {"no_proxy": value, "NO_PROXY": value}


def free_port(host: str = LOOPBACK) -> int:
    """Returns a TCP port of ``host`` that is currently free. If another process binds it first, the caller must
    retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
