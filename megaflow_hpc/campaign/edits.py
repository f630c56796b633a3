"""What was edited since a run was planned: the copy of its campaign file, to no effect, and files of its tasks."""

from __future__ import annotations

import hashlib

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.types import Task


def digest(text: str | bytes) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class Edits:
    """Edits of one run's files; files that did not change since the last look are not read again."""

    def __init__(self, run: RunDir, planned: RunRecord) -> None:
        self._run, self._planned = run, planned
        self._seen: tuple[int, int] | None = None
        self._edited = False

    def tasks(self) -> list[str]:
        """Returns the ids of tasks whose files were edited; looks at every file, for whoever goes on with the run."""
        from megaflow_hpc.tasks.digests import changed

        return changed([Task.from_dict(task) for task in self._planned.tasks.values()])

    def warnings(self) -> list[str]:
        """Returns a sentence on each edit that has no effect."""
        file = self._run.campaign_yaml
        if not self._planned.source:  # planned by an earlier version
            return []
        try:
            status = file.stat()
            if (status.st_mtime_ns, status.st_size) != self._seen:
                self._edited = digest(file.read_bytes()) != self._planned.source
                self._seen = status.st_mtime_ns, status.st_size
        except OSError:
            return []
        if not self._edited:
            return []
        return [
            f"{file} was edited, which changes nothing: a run goes on as it was planned. Walltime, memory and "
            "partition change with resume --time, --mem and --partition, limits with resume --limit; for the rest plan "
            "a new run"
        ]
