"""What all copies of a node's cache together may take."""

from __future__ import annotations

import os
from contextlib import suppress

from megaflow_hpc.environments.images.cache.shelf import Room, Shelf
from megaflow_hpc.errors import ConfigError

SHARE_OF_DISK = 0.8
"""The default budget: this part of what is free on scratch and what the cache has already."""


def budget(shelf: Shelf, bytes_: int | None, inodes: int | None) -> Room:
    """Returns what was asked for, else what the environment says, else a share of what is free."""
    disk = os.statvfs(shelf.root)
    have = sum((entry.size for entry in shelf.entries()), Room(0, 0))
    if bytes_ is None:
        gigabytes = _number("MEGAFLOW_CACHE_GB")
        free = disk.f_bavail * disk.f_frsize + have.bytes
        bytes_ = int(SHARE_OF_DISK * free) if gigabytes is None else int(gigabytes * 1e9)
    if inodes is None:
        # Some file systems have no fixed number of inodes, and say 0.
        free = disk.f_favail + have.inodes if disk.f_files else 1 << 62
        inodes = int(SHARE_OF_DISK * free)
    return Room(bytes_, inodes)


def _number(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise ConfigError(f"{variable}={text}: expected a number above 0; unset it for the default")
