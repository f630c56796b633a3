"""Say what a reader may do with hostile bytes, and describe a target."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.errors import MAX_MESSAGE_CHARACTERS, MegaflowError

LONGEST_INPUT = 1 << 17
ADDRESS_SPACE_BYTES = 1 << 30
"""Limits what one input may map. It turns an unbounded allocation into a MemoryError."""
MEMORY_BYTES = 200 << 20
"""Limits how much one input may raise resident memory: a thousand times the size of any input."""
CPU_S = 10.0
"""Limits the processor time of one input. Almost all take less than 0.01 s."""
PART = b"\x1e"
"""Separates the files of an input that stands for several files."""

Feed = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """A function under test, and the inputs to start from.

    Args:
        feed: reads one input; made by :func:`reader`.
        seeds: makes valid inputs.
        known: makes inputs that every run reads unchanged: they revealed defects, or take long.
        form: ``json`` or ``msgpack`` if inputs are such documents, so that their values are changed too.
        words: parts of the input's language, which are inserted.
        examples: inputs of a short run.
    """

    feed: Feed
    seeds: Callable[[], Sequence[bytes]]
    known: Callable[[], Sequence[bytes]] = tuple
    form: str = ""
    words: Sequence[bytes] = ()
    examples: int = 100


def reader(read: Feed) -> Feed:
    """Turn a reader into a target: it may refuse an input in a short message, within limits of time and memory."""

    @functools.wraps(read)
    def target(data: bytes) -> None:
        message = ""
        _reset_peak_memory()
        memory_before, cpu_before = _memory_bytes("VmRSS"), time.process_time()
        try:
            with _limited_address_space():
                read(data)
        except MegaflowError as error:
            message = str(error)
        assert len(message) <= 2 * MAX_MESSAGE_CHARACTERS, f"an error message of {len(message)} characters"
        cpu_s = time.process_time() - cpu_before
        assert cpu_s <= CPU_S, f"{cpu_s:.1f} s of processor time for {len(data)} bytes"
        grown = _memory_bytes("VmHWM") - memory_before
        assert grown <= MEMORY_BYTES, f"{grown >> 20} MiB of memory for {len(data)} bytes"

    return target


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make an empty directory, in memory if possible: some readers write durably, which is slow on a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        yield Path(folder)


def parts(data: bytes, count: int) -> list[bytes]:
    """Split an input into ``count`` files. Missing files are empty."""
    found = data.split(PART, count - 1)
    return [*found, *[b""] * (count - len(found))]


@contextlib.contextmanager
def _limited_address_space() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _memory_bytes("VmSize") + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory_bytes(name: str) -> int:
    """Read a line of /proc/self/status. ``ru_maxrss`` cannot be reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {name}")
