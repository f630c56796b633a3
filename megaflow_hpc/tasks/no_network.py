"""Recognises programs that failed because their sandbox has no network."""

from __future__ import annotations

import re

from megaflow_hpc.types import Network

_FAILED = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Temporary failure resolving|Name or service not known"
    r"|Network is unreachable|getaddrinfo (?:ENOTFOUND|EAI_AGAIN)|NameResolutionError|no such host",
    re.IGNORECASE,
)


def network_hint(output: str, network: Network) -> str:
    """Returns the end of a message about a failed program: the key that gives its sandbox a network.

    Returns an empty string if the sandbox has the host's network, or if the output names no network failure.

    Args:
        output: What the program printed.
        network: The sandbox's network.
    """
    failed = None if network == "host" else _FAILED.search(output)
    if failed is None:
        return ""
    return (
        f"; it printed {failed[0]!r}, and its sandbox has network: {network}; set environment: {{network: host}}, or "
        "tasks validate --network host, if the task may use the network, or install what it fetches in the image"
    )
