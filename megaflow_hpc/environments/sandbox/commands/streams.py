"""Bounded capture of a command's output: the head and the tail of a stream, whatever passes between."""

from __future__ import annotations

import os
from collections.abc import Callable

READ_SIZE = 65536
"""One pipe's worth."""

MOST_LEFT = 32
"""Pairs that processes left in the background may hold in one container: two descriptors of the owner's each."""


class CappedBuffer:
    """The first and the last ``limit // 2`` bytes of a stream, in memory bounded by twice ``limit``."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Adds the next bytes of the stream."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._tail_limit + READ_SIZE:
                self._trim()

    def _trim(self) -> None:
        surplus = len(self._tail) - self._tail_limit
        if surplus > 0:
            self._dropped += surplus
            del self._tail[:surplus]

    @property
    def truncated(self) -> bool:
        """Whether bytes in the middle are, or will be, left out."""
        return self._dropped + len(self._tail) > self._tail_limit

    def value(self) -> bytes:
        """Returns head and tail, with a line between them that says how many bytes are missing."""
        self._trim()
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self._head, self._dropped, self._tail)


class StreamPair:
    """The two FIFOs that one command writes to, used again once nobody holds them open any more.

    A process left in the background keeps its command's pair; it is read on and thrown away, so that a server
    that logs to its standard output neither blocks nor dies when the command that started it has ended.
    """

    def __init__(self, directory: str, number: int) -> None:
        self.names = (f"o{number}", f"e{number}")
        self._paths = tuple(os.path.join(directory, name) for name in self.names)
        for path in self._paths:
            os.mkfifo(path, 0o600)
        self.descriptors: list[int] = []
        self.held = [True, True]
        """Whether somebody may still write to a stream."""
        self._used = False

    def open(self) -> None:
        """Opens the reading ends, unless they are."""
        if not self.descriptors:
            self.descriptors = [self._open(path) for path in self._paths]

    def renew(self) -> None:
        """Opens afresh the reading ends that have seen writers go, whose end a poll would report for ever; a read does
        not."""
        if self._used:
            for stream, old in enumerate(self.descriptors):
                if self.held[stream]:
                    self.descriptors[stream] = self._open(self._paths[stream])
                    os.close(old)
            self._used = False

    def reuse(self) -> None:
        """Takes the reading ends for the next command, after the last has let go of both streams."""
        self.held = [True, True]
        self._used = True

    def _open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the reading ends."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def remove(self) -> None:
        """Removes the FIFOs: nobody is to read what their holders print."""
        for path in self._paths:
            os.unlink(path)


class StreamPairs:
    """The pairs of one container: lent to one command each, and taken back once nobody inside holds them."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._made = 0
        self._all: dict[StreamPair, None] = {}
        self._free: list[StreamPair] = []
        self._left: dict[StreamPair, None] = {}
        """Held by processes in the background, the longest first."""

    def prepare(self, count: int) -> None:
        """Opens ``count`` pairs ahead."""
        pairs = [self.take() for _ in range(count)]
        for pair in pairs:
            pair.open()
        self._free += pairs

    def take(self) -> StreamPair:
        """Returns a pair that nobody holds, a new one if there is none."""
        if self._free:
            return self._free.pop()
        pair = StreamPair(self._directory, self._made)
        self._made += 1
        self._all[pair] = None
        return pair

    def give_back(self, pair: StreamPair) -> bool:
        """Keeps a pair for its next command; ``False`` if somebody inside holds it still."""
        if any(pair.held):
            return False
        self._left.pop(pair, None)
        pair.reuse()
        self._free.append(pair)
        return True

    def leave(self, pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
        """Notes that processes in the background hold a pair. Of more than :data:`MOST_LEFT` the one that was held
        longest loses its reader: who prints into it next gets SIGPIPE."""
        self._left[pair] = None
        if len(self._left) > MOST_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest], self._all[oldest]
            _close(oldest, remove_reader)
            oldest.remove()

    def unused(self, pair: StreamPair) -> None:
        """Takes a pair back that was taken and given to no command."""
        self._free.append(pair)

    def close(self, remove_reader: Callable[[int], object]) -> None:
        """Closes every descriptor, after ``remove_reader`` was called with it."""
        for pair in self._all:
            _close(pair, remove_reader)
        self._all = {}


def _close(pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
    for descriptor in pair.descriptors:
        remove_reader(descriptor)
    pair.close()


def read_available(descriptor: int) -> bytes | None:
    """Returns what there is now, at most :data:`READ_SIZE` bytes; ``None`` when there is nothing yet; ``b""`` at the
    end."""
    try:
        return os.read(descriptor, READ_SIZE)
    except BlockingIOError:
        return None
