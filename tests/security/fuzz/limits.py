"""What one input may cost, and where a child notes which one it is at."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

ADDRESS_SPACE = 1 << 30
"""Bytes of address space that a child may map beyond what it has when its target is ready."""
MEMORY = 200 << 20
"""Bytes by which one input may raise a child's resident memory: some thousand times the size of any."""
CPU_S = 10.0
"""Seconds of processor time that one input may take; all but a few take less than a hundredth of one."""
WALL_S = 120.0
"""Seconds after which an input is stuck, whatever it waits for."""

_HEAD = struct.Struct("<QQQ")


class Notes:
    """A file that both processes map: the number of inputs begun and ended, and the one it is at.

    It outlives the child, however that ends.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(bytes(1 << 20))
            new.rename(path)  # the other process may look at any time
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 1 << 20)

    def begin(self, data: bytes) -> None:
        """Notes an input before it is fed."""
        begun, ended, _ = _HEAD.unpack_from(self._map)
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, begun + 1, ended, len(data))

    def end(self) -> None:
        """Notes that the input was dealt with."""
        begun, _, size = _HEAD.unpack_from(self._map)
        _HEAD.pack_into(self._map, 0, begun, begun, size)

    @property
    def counts(self) -> tuple[int, int]:
        """Inputs begun, and inputs ended."""
        begun, ended, _ = _HEAD.unpack_from(self._map)
        return begun, ended

    @property
    def input(self) -> bytes:
        """The latest input."""
        size = _HEAD.unpack_from(self._map)[2]
        return self._map[_HEAD.size : _HEAD.size + size]
