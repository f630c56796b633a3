"""Which rollouts of a block its earlier holders have stored: only their journals' tables of contents are read, each
once, and of the journals themselves what no table tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.contents import Contents, Listed, OpenPart, open_part, read_contents
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE
from megaflow_hpc.trajectories.journal.headings import Heading
from megaflow_hpc.trajectories.journal.records import headings
from megaflow_hpc.trajectories.journal.writer import SUFFIX, base_of, part_path, parts, valid_length

BEAT_BYTES = 8 << 20
"""Bytes of a journal that are read between two signs of life."""


class Holding(NamedTuple):
    """One epoch of a block that is over."""

    epoch: int
    owner: str
    """``<pod>.<start>``."""
    sealed: int
    """Bytes of its journal that count."""


@dataclass(frozen=True)
class _Known:
    """What is known of one journal, which was read to its end."""

    size: tuple[int, int]
    """Number of parts and size of the last one, when it was looked at."""
    length: int
    """Logical offset behind the last whole record."""
    records: dict[tuple[int, int], list[tuple[int, str, Listed | None]]] | None = None
    """Block and epoch → of each record that did not fail: logical end, rollout, and what a table of contents says of
    it, unless it was read; ``None`` if only the length is."""


class StoredRollouts:
    """What the journals of earlier holders say; for one thread, which may have to show that it lives.

    Args:
        beat: called between two journals, and of one that has to be read every few megabytes.
    """

    def __init__(self, run: RunDir, beat: Callable[[], object] = lambda: None) -> None:
        self._folder, self._beat = run.journal, beat
        self._known: dict[str, _Known] = {}
        """By owner."""
        self._part: tuple[OpenPart, int] | None = None
        """The part of a journal that was looked at last, and the bytes of those before it."""

    def ids(self, block: int, held: Iterable[Holding]) -> set[str]:
        """Returns the rollouts of a block that are stored and did not fail.

        Raises:
            ConfigError: a journal is not one, or of a newer version.
        """
        found: set[str] = set()
        for epoch, owner, sealed in held:
            known = self._known.get(owner)
            if known is None or known.records is None or known.length < sealed:
                known = self._look(owner, whole=True)
            of_block = _within(known, block, epoch, sealed)
            if not all(listed is None or self._stands(owner, listed) for _, listed in of_block):
                of_block = _within(self._look(owner, whole=True, believed=False), block, epoch, sealed)
            found.update(rollout for rollout, _ in of_block)
        return found

    def length(self, owner: str) -> int:
        """Returns the bytes of whole records in a journal; one that has not grown is not read again."""
        known = self._known.get(owner)
        if known is None or known.size != _size(parts(self._path(owner))):
            known = self._look(owner, whole=False)
        return known.length

    def _stands(self, owner: str, listed: Listed) -> bool:
        """Looks whether a journal holds what its table says, of which a forged one says anything."""
        path = part_path(self._path(owner), listed.part)
        if self._part is None or self._part[0].path != path:
            part = open_part(path) if path.exists() else None
            if part is None:
                return False
            self._part = part, _bytes_before(parts(self._path(owner)), listed.part)
        part, before = self._part
        # A part that is finished is as long as the next one says, unless a disk was full then.
        return (listed.base == before or listed.base == base_of(path)) and part.holds(listed)

    def _look(self, owner: str, whole: bool, believed: bool = True) -> _Known:
        """Looks at a journal anew; for its length alone, one without a table is read from its last part on.

        Nothing is known of one that could not be read to its end: the next call looks again.

        Args:
            believed: whether its table of contents is.
        """
        self._beat()
        found = parts(self._path(owner))
        size, contents = _size(found), read_contents(found) if believed else None
        self._part = None
        if contents is not None and contents.journal is not None:
            self._part = contents.journal, _bytes_before(found, contents.part)
        if contents is None and not whole:
            known = _Known(size, valid_length(self._path(owner)))
        else:
            end = min(HEADER_SIZE, found[0].stat().st_size) if found else 0
            records: dict[tuple[int, int], list[tuple[int, str, Listed | None]]] = {}
            for heading, end, listed in self._records(found, contents or Contents([])):
                if heading is not None and heading.status != "failed":
                    records.setdefault((heading.block, heading.epoch), []).append((end, heading.id, listed))
            known = _Known(size, end, records)
        self._known[owner] = known
        return known

    def _records(self, found: list[Path], contents: Contents) -> Iterator[tuple[Heading | None, int, Listed | None]]:
        """Yields every record of a journal with its logical end: those that its table tells of, then the others."""
        for listed in contents.records:
            yield listed.heading, listed.end, listed
        if contents.records:
            yield None, contents.covered, None
        for number in range(contents.part, len(found)):
            start = contents.covered - contents.base if number == contents.part else 0
            if start and start == contents.size:
                continue
            base = contents.base if number == contents.part else base_of(found[number])
            beaten = start
            for frame, heading in headings(found[number], start):
                yield heading, base + frame.end, None
                if frame.end - beaten >= BEAT_BYTES:
                    beaten = frame.end
                    self._beat()
            self._beat()

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}{SUFFIX}"


def _within(known: _Known, block: int, epoch: int, sealed: int) -> list[tuple[str, Listed | None]]:
    """Returns the rollouts of an epoch of a block that lie within a seal."""
    of_block = (known.records or {}).get((block, epoch), ())
    return [(rollout, listed) for end, rollout, listed in of_block if end <= sealed]


def _bytes_before(found: list[Path], part: int) -> int:
    return sum(path.stat().st_size for path in found[:part])


def _size(found: list[Path]) -> tuple[int, int]:
    return len(found), found[-1].stat().st_size if found else 0
