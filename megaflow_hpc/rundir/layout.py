"""The layout of a run directory, and its typed JSON files. One class defines every path.

::

    RUN/
      campaign.yaml       copy of the user's campaign file
      run.json            format, package version, resolved campaign
      tasks.jsonl         the tasks and their images, one per line; tasks.index has the byte offset of each line
      env.sh              environment that every job sources first
      code/               copies of the campaign's own agent modules, made during planning
      sbatch/             scripts for manual submission
      tasks/              <block>.json: immutable blocks of rollouts
      ledger/             claims/, leases/, gone/, done/: who works on which block; jobs/: submissions
      endpoints/          <server>.json: engines that are serving
      weights/            <version>/
      training/           <policy>/: plans, commits and checkpoints of its trainer (:mod:`.training`)
      journal/            <pod>.<start>.journal: acknowledged trajectories; <pod>.<start>.1.pack: small journals
      partial/            checkpoints of rollouts that were interrupted by the end of an allocation
      trajectories.h5     the result
      rewards/            <name>/<time>.<random>.jsonl: rewards that ``reverify`` gave later (:mod:`.rewards`)
      events/             <pod>.<start>.jsonl: life-cycle events; <pod>.<start>.summary: summary of its earlier events;
                          <pod>.<start>.condensed: this start and all earlier ones
      live/               requests from viewers, and the pods' replies about running rollouts (:mod:`.live`)
      logs/               one file per job element, to which each start appends a few lines
      report/

Everything is private to its user (modes 0700 and 0600). With ``share: group``, directories have mode 2750 and files
0640, so the group of RUN can read but not write. ``endpoints/``, which contains keys, and ``partial/`` stay private.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode, make_directory, write_json
from megaflow_hpc.host.files import LARGEST, read_regular
from megaflow_hpc.host.mounts import refusal_of_links
from megaflow_hpc.host.private import make_parents, who_may_replace
from megaflow_hpc.host.process import user_name


class RunDir:
    """Paths in one run directory. Creating the object does not access the file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.campaign_yaml = self.path / "campaign.yaml"
        self.run_json = self.path / "run.json"
        self.packed_tasks = self.path / "tasks.jsonl"
        self.tasks_index = self.path / "tasks.index"
        self.env_sh = self.path / "env.sh"
        self.code = self.path / "code"
        self.sbatch = self.path / "sbatch"
        self.tasks = self.path / "tasks"
        self.ledger = self.path / "ledger"
        self.jobs = self.ledger / "jobs"
        self.gpus = self.ledger / "gpus"
        self.raised_limits = self.ledger / "limits.json"
        self.changed_requests = self.ledger / "slurm.json"
        self.accepted_tasks = self.ledger / "tasks.json"
        self.endpoints = self.path / "endpoints"
        self.weights = self.path / "weights"
        self.training = self.path / "training"
        self.journal = self.path / "journal"
        self.partial = self.path / "partial"
        self.trajectories = self.path / "trajectories.h5"
        self.rewards = self.path / "rewards"
        self.events = self.path / "events"
        self.live = self.path / "live"
        self.logs = self.path / "logs"
        self.report = self.path / "report"

    def __str__(self) -> str:
        return str(self.path)

    def create(self, share: str = "user") -> None:
        """Creates the directory and its subdirectories. With ``share="group"``, its group can read them.

        Raises:
            ConfigError: Another user may write to a parent directory, or the file system does not support hard links.
        """
        make_parents(self.path)
        self.check_place()
        self.path.mkdir(mode=0o700, exist_ok=True)
        if why := refusal_of_links(self.path):
            raise ConfigError(f"run directory {self.path}: {why} (run_dir, or --run-dir)")
        self.endpoints.mkdir(mode=0o700, exist_ok=True)
        if share == "group":
            self.path.chmod(0o2750)
            file_mode.cache_clear()
        for room in ("tasks", "ledger", "weights", "journal", "events", "logs", "report"):
            make_directory(self.path / room)

    def check_ours(self, to_run: bool = False) -> None:
        """Checks that this user owns the run directory, and that no symlink redirects writes elsewhere.

        Args:
            to_run: Whether jobs will execute files from the directory. If so, also call :meth:`check_place`.

        Raises:
            ConfigError: The directory belongs to another user, or one of its subdirectories is a symlink (for example,
                from an unpacked archive).
        """
        try:
            owner = self.path.stat().st_uid
        except FileNotFoundError:
            return  # the reader reports the error
        if os.getuid() not in (owner, 0):
            raise ConfigError(f"{self.path}: belongs to {user_name(owner)}; other users may read it, but not change it")
        for room in (self.tasks, self.ledger, self.endpoints, self.partial, self.events, self.live, self.rewards):
            if room.is_symlink():
                raise ConfigError(
                    f"{room}: is a symbolic link, which is not followed; replace it by the directory itself"
                )
        if to_run:
            self.check_place()

    def check_place(self) -> None:
        """Checks that no other user can replace the run directory. Jobs execute its files, possibly days later.

        Raises:
            ConfigError: Another user may write to a parent directory. The message names it and the remedy.
        """
        if why := who_may_replace(self.path):
            raise ConfigError(f"run directory {self.path}: {why}; jobs would run its files")

    def check_new(self) -> None:
        """Checks that the directory can be created, before anything else is prepared. Leaves no files behind.

        Raises:
            ConfigError: :meth:`check_place` failed, or an existing parent is not writable or does not support hard
                links.
        """
        parent = next(path for path in (self.path, *self.path.absolute().parents) if os.path.isdir(path))
        try:
            why = refusal_of_links(parent) if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is not writable"
        except OSError as error:  # no space or quota is left
            why = f"{parent}: {error.strerror}"
        if why:
            raise ConfigError(f"run directory {self.path}: {why} (run_dir, or --run-dir)")
        self.check_place()

    def full(self) -> str:
        """Returns an error message if the file system is full. Returns an empty string if it has space or this is
        unknown."""
        try:
            free = os.statvfs(self.path)
        except OSError:
            return ""
        if free.f_bavail and (free.f_favail or not free.f_files):
            return ""
        what = "space" if not free.f_bavail else "file names (inodes)"
        return (
            f"{self.path}: no {what} left on its file system, so results cannot be stored: delete files, or ask for a "
            "larger quota; pods wait and continue by themselves"
        )

    def block(self, number: int) -> Path:
        """Returns the path of a block file."""
        return self.tasks / f"{number:06d}.json"

    def journal_file(self, pod: str, start: str) -> Path:
        """Returns the path of the journal written by one pod start."""
        return self.journal / f"{pod}.{start}.journal"

    def event_file(self, pod: str, start: str) -> Path:
        """Returns the path of the event file written by one pod start."""
        return self.events / f"{pod}.{start}.jsonl"

    def log(self, role: str) -> str:
        """Returns the path of a log as a Slurm filename pattern with job id and array index."""
        return str(self.logs / f"{role}-%A_%a.log")


def new_run_name(campaign: str) -> str:
    """Generates a run name of the form ``<campaign>-<UTC timestamp>-<4 hex digits>``."""
    return f"{campaign}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


# --- JSON files, whose content is untrusted ---------------------------------------------------------------------------

T = TypeVar("T")


def read_json(path: str | os.PathLike[str], kind: type[T], max_bytes: int = LARGEST) -> T:
    """Reads and decodes one file. Ignores unknown keys.

    Raises:
        OSError: The file is missing, not a regular file, or temporarily unreadable.
        ValueError: The file is damaged. The message names the file, the field and the expected type.
    """
    data = read_regular(path, max_bytes)
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def try_read_json(path: str | os.PathLike[str], kind: type[T], max_bytes: int = LARGEST) -> T | None:
    """Reads and decodes one file. Returns ``None`` if it is missing, damaged or temporarily unreadable."""
    try:
        return read_json(path, kind, max_bytes)
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: msgspec.Struct, mode: int | None = None) -> None:
    """Publishes a record atomically at ``path`` (:func:`~megaflow_hpc.host.atomic.write_atomic`)."""
    write_json(path, msgspec.to_builtins(record), mode)
