"""How much a build takes from its context: bytes and entries, counted as they are read."""

from __future__ import annotations

from megaflow_hpc.errors import ConfigError

MAX_BYTES = 20 * 10**9
MAX_ENTRIES = 500_000


class DockerfileBounds:
    """What one instruction may still take; raises :class:`ConfigError` when it is used up."""

    def __init__(self) -> None:
        self.bytes = MAX_BYTES
        self.entries = MAX_ENTRIES

    def take(self, size: int) -> None:
        """Counts bytes."""
        self.bytes -= size
        if self.bytes < 0:
            raise ConfigError(f"more than {MAX_BYTES} bytes of the context in one instruction; copy less at once")

    def count(self) -> None:
        """Counts an entry: a file, a link or a directory."""
        self.entries -= 1
        if self.entries < 0:
            raise ConfigError(f"more than {MAX_ENTRIES} entries of the context in one instruction; copy less at once")
