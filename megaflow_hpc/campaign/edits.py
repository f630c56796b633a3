"""Detects changes to a run's files since planning: edits without effect, changed tasks and purged files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.config import load
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.accounts import stored_by
from megaflow_hpc.ledger.tasks import accept, accepted_line, planned_tasks
from megaflow_hpc.rundir.budget import LIMITS
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.overrides import in_effect
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.types import Task


def digest(text: str | bytes) -> str:
    """Returns the hexadecimal SHA-256 of a file's content."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


EXTENDABLE = ("tasks", "samples", "environment.images")
"""Keys of the campaign file that ``extend`` can change in a run."""
BY_RESUME = {
    **{
        f"slurm.{jobs}.{key}": "resume --time, --mem or --partition"
        for jobs in ("pods", "servers", "trainer", "gather")
        for key in ("time", "mem", "partition")
    },
    **{f"limits.{name}": "resume --limit" for name in LIMITS},
    "slurm.pods.count": "scale --pods",
}
"""Verb that can change a key in a run, by key."""


def differing_keys(before: str, after: str) -> list[str]:
    """Returns the dotted keys whose values differ between two campaign files. Lists are compared as a whole.

    Raises:
        ConfigError: A file is not valid YAML.
    """
    try:
        old, new = (dict(_flat(yaml.safe_load(text) or {})) for text in (before, after))
    except (yaml.YAMLError, RecursionError):
        raise ConfigError("not valid YAML; see: megaflow-hpc check FILE") from None
    return [key for key in {**old, **new} if old.get(key, ...) != new.get(key, ...)]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and key not in EXTENDABLE:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


class Edits:
    """Detects edits of a run's files. Rereads a file only if its size or modification time has changed."""

    def __init__(self, run: RunDir, planned: RunRecord) -> None:
        self._run, self._planned = run, planned
        self._seen: tuple[int, int] | None = None
        self._edited = False

    def tasks(self) -> list[str]:
        """Returns the ids of tasks whose files were edited. Expensive, because it reads every file."""
        from megaflow_hpc.tasks.digests import changed

        return changed([Task.from_dict(each.task) for each in planned_tasks(self._run, self._planned).values()])

    def accept_tasks(self) -> list[str]:
        """Accepts the changed task files for all remaining rollouts. Returns the ids of the changed tasks.

        Raises:
            ConfigError: A file cannot be read.
        """
        from megaflow_hpc.tasks.digests import KEY, fixed

        planned = planned_tasks(self._run, self._planned)
        before = [Task.from_dict(planned[name].task) for name in self.tasks()]
        files = {task.id: task.metadata[KEY] for task in fixed(before)}
        if files:
            accept(self._run, {task.id: (task.metadata[KEY]["content"], files[task.id]) for task in before})
        return [*files]

    def warnings(self) -> list[str]:
        """Returns warnings about edits of the run's copy of the campaign file, which have no effect, and about accepted
        changes to tasks."""
        return [*self._campaign_file(), *filter(None, [accepted_line(self._run)])]

    def campaign_keys(self) -> list[str]:
        """Compares the campaign file with the run. Returns lines that name the keys that differ, one for each remedy.

        Reads the file from which the run was planned, not the run's own copy. Returns an empty list if the file is
        missing or invalid.
        """
        file = Path(self._planned.file)
        try:
            text = read_regular(file).decode()
            if digest(text) == self._planned.source:
                return []
            keys = differing_keys(self.planned_text(), text)
            edited = load(file).model_dump(include={"slurm", "limits"})
        except (OSError, UnicodeDecodeError, ConfigError):
            return []
        run, wanted = (dict(_flat(values)) for values in (in_effect(self._run, self._planned.config), edited))
        remedies: dict[str, list[str]] = {}
        for key in keys:
            if key in BY_RESUME and str(run.get(key)) == str(wanted.get(key)):
                continue  # a command has already changed it in the run
            verb = f"extend {self._run}" if key in EXTENDABLE else BY_RESUME.get(key, "")
            remedies.setdefault(verb, []).append(key)
        return [
            f"{file}: {', '.join(changed[:5])}{', …' if len(changed) > 5 else ''}: edited after planning, which does "
            "not change the run; "
            + (f"change it with: megaflow-hpc {verb}" if verb else "undo the edit, or plan a new run")
            for verb, changed in remedies.items()
        ]

    def planned_text(self) -> str:
        """Returns the text of the campaign file from which the run was planned.

        Raises:
            ConfigError: Both the file and the run's copy were edited.
        """
        for path in (self._run.campaign_yaml, Path(self._planned.file)):
            with suppress(OSError, UnicodeDecodeError):
                text = read_regular(path).decode()
                if digest(text) == self._planned.source:
                    return text
        raise ConfigError(f"{self._run.campaign_yaml}: not as it was planned; restore it, or plan a new run")

    def _campaign_file(self) -> list[str]:
        file = self._run.campaign_yaml
        try:
            status = file.stat()
            if (status.st_mtime_ns, status.st_size) != self._seen:
                self._edited = digest(read_regular(file)) != self._planned.source
                self._seen = status.st_mtime_ns, status.st_size
        except OSError:
            return []
        if not self._edited:
            return []
        return [
            f"{file} was edited, but edits do not affect a planned run. Walltime, memory and partition "
            "change with resume --time, --mem and --partition, limits with resume --limit; for the rest plan a new run"
        ]


def restore_rooms(run: RunDir, planned: RunRecord, ledger: Ledger) -> None:
    """Recreates empty directories of a run that a scratch purge has deleted.

    Raises:
        ConfigError: The purge deleted more than empty directories.
    """
    if not run.ledger.is_dir():
        raise _purged(run, "ledger/, which records what is done, is missing")
    run.create(planned.config.run_share)
    ledger.create()
    total = planned.total + sum(ledger.rollouts_added(added) for added in ledger.added())
    left = len({rollout.id for block in read_blocks(run) for rollout in block.rollouts})
    if left < total:
        raise _purged(run, f"{total - left} of {total} rollouts are missing from the blocks in tasks/")


def lost_journals(run: RunDir, ledger: Ledger) -> list[str]:
    """Returns a warning if journals are missing and no trajectories.h5 can contain their rollouts."""
    if run.trajectories.exists():
        return []
    from megaflow_hpc.trajectories.journal.winners import journals

    existing = {path.name.removesuffix(".journal") for path in journals(run)}  # <pod>.<start>
    leases = ledger.leases()
    lost = [stored_by(run, name, lease) for name, lease in leases.items() if name not in existing]
    lost = [count for count in lost if count]
    accounts = ledger.accounts(leases)
    # The leases of earlier starts were removed. We know how many journals there were, but not which are missing.
    earlier = sum(facts["journals"] for name, facts in accounts.items() if name not in leases)
    missing = len(lost) + max(0, earlier - len(existing - leases.keys()))
    if not missing:
        return []
    several = f" with {sum(lost)} stored rollouts" if len(lost) == missing else ""
    return [
        f"{run.journal}: journals of {missing} pods{several} are missing, perhaps "
        "purged from scratch, and there is no trajectories.h5; restore them, or these rollouts are lost"
    ]


def _purged(run: RunDir, what: str) -> ConfigError:
    return ConfigError(
        f"{run}: was partly deleted, perhaps by a purge of scratch: {what}; restore it, or gather the rest and "
        "plan a new run"
    )
