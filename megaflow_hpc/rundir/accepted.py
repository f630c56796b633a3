"""Tasks whose changed files were accepted after planning (``resume --accept-changes``).

::

    RUN/ledger/tasks.json    task id → :class:`AcceptedTask`

``run.json`` and ``tasks.jsonl`` never change. Readers of the tasks replace the digests of these tasks. Instructions and
settings stay as planned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.json_files import read_json
from megaflow_hpc.rundir.layout import RunDir


class Change(msgspec.Struct):
    """One accepted change of a task's files."""

    at: float
    """Unix seconds."""
    before: str
    """Digest of the files before the change."""
    after: str


class AcceptedTask(msgspec.Struct):
    """A task with changed files."""

    files: dict[str, Any]
    """Digests of the current files, which replace those in the task's metadata."""
    changes: list[Change] = []
    """All changes, in order."""


def accepted(run: RunDir) -> dict[str, AcceptedTask]:
    """Returns the tasks with accepted changes by id.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        return read_json(run.accepted_tasks, dict[str, AcceptedTask])
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{error}; remove the file and resume with --accept-changes again") from None


def accept(run: RunDir, tasks: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Records changed tasks.

    Args:
        tasks: Task id → (digest of the files before the change, digests of the current files).
    """
    known, now = accepted(run), time.time()
    for name, (before, files) in tasks.items():
        task = known.setdefault(name, AcceptedTask({}))
        task.files = dict(files)
        task.changes.append(Change(now, before, str(files["content"])))
    write_json(run.accepted_tasks, msgspec.to_builtins(known))


def accepted_line(run: RunDir) -> str:
    """Describes the accepted changes in one line. Empty without any."""
    tasks = accepted(run)
    if not tasks:
        return ""
    last = max(change.at for task in tasks.values() for change in task.changes)
    shown = f"{', '.join(sorted(tasks)[:3])}{', …' if len(tasks) > 3 else ''}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last))
    return (
        f"{len(tasks)} tasks were changed during the run and accepted (last: {when}), so their earlier rewards are not "
        f"comparable: {shown}; digests: {run.accepted_tasks}"
    )
