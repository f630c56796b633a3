"""Bounded capture of a command's output: the head and tail of each stream."""

from __future__ import annotations

import os
from collections.abc import Callable

READ_SIZE = 65536
"""Maximum size of one read in bytes, which is the capacity of a pipe."""

MAX_LEFT_PAIRS = 32
"""Maximum number of stream pairs held by background processes in one container. Each uses two of this process's
descriptors."""


class CappedBuffer:
    """Keeps the first and last ``limit // 2`` bytes of a stream. Uses at most about twice ``limit`` of memory."""

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
        """True if bytes in the middle were dropped."""
        return self._dropped + len(self._tail) > self._tail_limit

    def value(self) -> bytes:
        """Returns the head and tail. A line between them gives the number of dropped bytes."""
        self._trim()
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self._head, self._dropped, self._tail)


class StreamPair:
    """The two FIFOs that a command writes to. They are reused once all of its processes have closed them.

    A background process keeps its command's pair open. Its output is read and discarded, so a server that logs to
    standard output neither blocks nor dies when its command ends.
    """

    def __init__(self, directory: str, number: int) -> None:
        self.names = (f"o{number}", f"e{number}")
        self._paths = tuple(os.path.join(directory, name) for name in self.names)
        for path in self._paths:
            os.mkfifo(path, 0o600)
        self.descriptors: list[int] = []
        self.held = [True, True]
        """For each stream, True while a process may still write to it."""
        self._used = False

    def open(self) -> None:
        """Opens the reading ends if they are closed."""
        if not self.descriptors:
            self.descriptors = [self._open(path) for path in self._paths]

    def renew(self) -> None:
        """Reopens reading ends that earlier writers have closed, because polling them would report end-of-file
        forever."""
        if self._used:
            for stream, old in enumerate(self.descriptors):
                if self.held[stream]:
                    self.descriptors[stream] = self._open(self._paths[stream])
                    os.close(old)
            self._used = False

    def reuse(self) -> None:
        """Prepares the reading ends for the next command after the previous one has closed both streams."""
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
        """Removes the FIFOs. Further output of background processes is lost."""
        for path in self._paths:
            os.unlink(path)


class StreamPairs:
    """The stream pairs of one container. Each is used by one command until all processes inside have closed it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._made = 0
        self._all: dict[StreamPair, None] = {}
        self._free: list[StreamPair] = []
        self._held: dict[StreamPair, None] = {}
        """Pairs held by background processes, oldest first."""

    def prepare(self, count: int) -> None:
        """Opens ``count`` pairs in advance."""
        pairs = [self.take() for _ in range(count)]
        for pair in pairs:
            pair.open()
        self._free += pairs

    def take(self) -> StreamPair:
        """Returns a free pair, or a new one if all are in use."""
        if self._free:
            return self._free.pop()
        pair = StreamPair(self._directory, self._made)
        self._made += 1
        self._all[pair] = None
        return pair

    def give_back(self, pair: StreamPair) -> bool:
        """Frees a pair for the next command. Returns ``False`` if a process inside still has it open."""
        if any(pair.held):
            return False
        self._held.pop(pair, None)
        pair.reuse()
        self._free.append(pair)
        return True

    def leave(self, pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
        """Records that background processes hold a pair.

        If more than :data:`MAX_LEFT_PAIRS` are held, the oldest loses its reader, and its next writer gets SIGPIPE.
        """
        self._held[pair] = None
        if len(self._held) > MAX_LEFT_PAIRS:
            oldest = next(iter(self._held))
            del self._held[oldest], self._all[oldest]
            _close(oldest, remove_reader)
            oldest.remove()

    def unused(self, pair: StreamPair) -> None:
        """Frees a pair that no command used."""
        self._free.append(pair)

    def close(self, remove_reader: Callable[[int], object]) -> None:
        """Closes all descriptors, calling ``remove_reader`` for each one first."""
        for pair in self._all:
            _close(pair, remove_reader)
        self._all = {}


def _close(pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
    for descriptor in pair.descriptors:
        remove_reader(descriptor)
    pair.close()


def read_available(descriptor: int) -> bytes | None:
    """Returns up to :data:`READ_SIZE` available bytes, ``None`` if nothing is available yet, or ``b""`` at
    end-of-file."""
    try:
        return os.read(descriptor, READ_SIZE)
    except BlockingIOError:
        return None
