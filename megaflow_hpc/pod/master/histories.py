"""Stores the histories of unfinished rollouts for the pods that take over the rollouts.

A pod writes ``RUN/partial/<pod>.<start>.json`` once, before it releases its blocks. For each rollout, the file contains
the attempts and failure causes so far, the number of interruptions by the end of an allocation, and the checkpoint to
resume from. If several pods wrote a history of the same rollout, the longest one wins. A pod that takes over a block
reads the files of the block's earlier holders. The coordinator removes a file once all blocks that its pod ever held
are done (:mod:`megaflow_hpc.ledger.coordinator`).

A killed pod writes no file. Its rollouts restart from the beginning, and their failed attempts are read from the pod's
events.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field

import msgspec

from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import read_regular, remove_tree
from megaflow_hpc.pod.scheduling.failures import RULES
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import AttemptEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.summaries import Summary
from megaflow_hpc.trajectory import Attempt


@dataclass
class History:
    """History of a rollout that is not stored yet."""

    attempts: list[Attempt] = field(default_factory=list)
    """Attempts that ended without a final result."""
    causes: list[str] = field(default_factory=list)
    """Causes of the failed attempts."""
    cuts: int = 0
    """Number of times that the end of an allocation interrupted the rollout."""
    too_short: int = 0
    """Number of consecutive times that the rollout used most of a walltime and left no checkpoint."""
    partial: str = ""
    """Checkpoint to resume from, relative to ``RUN/partial``. Empty if there is none."""
    kept_s: float = 0.0
    """Seconds of work that are saved in the checkpoint."""

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt, from 0."""
        return max((attempt.attempt for attempt in self.attempts), default=-1) + 1

    def _weight(self) -> tuple[int, int, int]:
        return self.cuts, len(self.attempts), len(self.causes)

    def later(self, other: History | None) -> History:
        """Returns the longer of two histories. ``other`` may be ``None``."""
        return self if other is None or self._weight() >= other._weight() else other


class _HistoryFile(msgspec.Struct):
    rollouts: dict[str, History]


class Histories:
    """Reads the histories written by earlier pods. Reports unreadable files on stderr and ignores them."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: set[str] = set()
        self._written: dict[str, History] = {}
        """The longest history of each rollout in the files read so far, by rollout id."""
        self._failures = EventReader(run.events, only="attempt", use_summaries=True)
        self._failed: dict[str, dict[int, tuple[str, Attempt]]] = {}
        """Failed attempts in killed pods. Maps a rollout id to (cause, attempt) by attempt number."""

    def look(self, pods: Iterable[str]) -> None:
        """Reads the histories written by these pod starts (``<pod>.<start>``). Reads each file only once."""
        for pod in sorted(set(pods) - self._seen):
            path = self._run.partial / f"{pod}.json"
            try:
                content = json.loads(read_regular(path))  # error texts may contain lone surrogates
                histories = msgspec.convert(content, _HistoryFile).rollouts
            except FileNotFoundError:  # the pod was killed, or its blocks are done by now
                histories = {}
            except (OSError, ValueError) as error:
                print(f"pod: {path}: {error!r}; its rollouts restart from the beginning", file=sys.stderr)
                histories = {}
            self._seen.add(pod)
            for rollout, history in histories.items():
                self._written[rollout] = history.later(self._written.get(rollout))

    def look_at_events(self, pods: Collection[str]) -> None:
        """Reads the failed attempts from the events of these pod starts, which were killed."""
        for _, events in self._failures.read(pods):
            for event in events:
                # Summaries and condensed events contain the failed attempts of rollouts that were not stored.
                for each in event.events if isinstance(event, Summary) else (event,):
                    if isinstance(each, AttemptEvent) and each.kind in RULES:
                        self._add_failure(each)

    def _add_failure(self, event: AttemptEvent) -> None:
        cause, at = event.kind, event.t
        attempt = Attempt(event.attempt, "failed", RULES[cause].kind, event.error, started_at=at, finished_at=at)
        self._failed.setdefault(event.id, {})[event.attempt] = cause, attempt

    def take(self, rollout_id: str) -> History | None:
        """Removes and returns the history of a rollout. Returns ``None`` if it has no history."""
        written = self._written.pop(rollout_id, None)
        failed = self._failed.pop(rollout_id, {})
        if not failed:
            return written
        history = History()
        for _, (cause, attempt) in sorted(failed.items()):
            history.causes.append(cause)
            history.attempts.append(attempt)
        return written.later(history) if written else history


def write(run: RunDir, pod: str, histories: Mapping[str, History]) -> None:
    """Writes a pod's histories. Call it before the pod releases its blocks. Raises OSError.

    Args:
        pod: ``<pod>.<start>``.
        histories: Maps rollout ids to their histories.
    """
    if histories:
        content = {"rollouts": {rollout: asdict(history) for rollout, history in histories.items()}}
        write_atomic(run.partial / f"{pod}.json", json.dumps(content, default=str).encode("utf-8", "backslashreplace"))


def remove_partials(run: RunDir) -> None:
    """Removes all histories and checkpoints of a run. Call it once all rollouts are stored."""
    remove_tree(run.partial, ignore_errors=True)
