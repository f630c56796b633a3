"""``RUN/run.json``: what a run was planned with, as one typed record that is written once and never changed.

A pod needs nothing beside it, so that a run means the same after the campaign file was edited. Every value has its
default here, or in the campaign file's sections (:mod:`megaflow_hpc.config`); keys of a later version are ignored.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.events import Time
from megaflow_hpc.rundir.json_files import try_read_json
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.version import __version__

if TYPE_CHECKING:
    from megaflow_hpc.config import CampaignConfig

FORMAT = "megaflow-hpc/run"
FORMAT_VERSION = 2
"""2: tasks are in a file of their own; 1 is read as well."""
LONGEST = 2**30
"""Bytes of ``run.json``; of version 1, it holds the tasks."""

_CLUSTER = r"(?:@[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?"
JOB_ID = re.compile(rf"[0-9][0-9_+,%\[\]-]{{0,99}}{_CLUSTER}")
"""A job, an array or elements of one, ``@name`` where it is another cluster's. What a run directory names as its jobs
goes to ``scancel`` and into scripts: whatever is spelled otherwise, such as an option, is none."""

T = TypeVar("T")


class _Header(msgspec.Struct):
    format: str = ""
    format_version: int = 0


class _Named(msgspec.Struct):
    name: str = ""
    pool: dict[str, Any] | None = None


class RunHead(msgspec.Struct):
    """What a list of runs needs of ``run.json``."""

    campaign: _Named = msgspec.field(default_factory=_Named)
    total: int = 0
    """Rollouts of the campaign, those aside that were added later."""


class ServerRecord(msgspec.Struct):
    """One engine server: an element of the engine array, or a rank of the heterogeneous job."""

    policy: str
    model: dict[str, Any]
    """The section ``model`` of its policy, one kind of server alone; with ``sleep_level`` where it is in its trainer's
    job, and sleeps while that steps."""
    held: bool = False
    """Whether its element is submitted held, for the autoscaler to release."""


class ServerGroup(msgspec.Struct, array_like=True):
    """Neighbouring servers of one shape, which are one Slurm array."""

    first: int
    """Index of the first server."""
    count: int
    gpus: int
    """GPUs on each node."""
    held: bool = False
    nodes: int = 1
    """Nodes of each server."""


class PolicyRecord(msgspec.Struct):
    """One agent with one model, or none; see :class:`megaflow_hpc.config.Policy`."""

    agent: dict[str, Any] = {}
    model: dict[str, Any] | None = None
    samples: int = 1
    """Samples of each group; spare ones not counted."""
    include: list[str] = []
    """Shell patterns on task ids; empty for every task."""


class JobRecord(msgspec.Struct):
    """One submission to Slurm, as ``RUN/ledger/jobs/<array>.json`` holds it."""

    role: str
    """``pods``, ``servers``, ``trainer`` or ``gather``."""
    id: Annotated[str, Meta(pattern=rf"\A[0-9]{{1,20}}{_CLUSTER}\Z")]
    """Job or array id; ``123@name`` at another cluster."""
    elements: int | None = None
    """Array elements; ``None`` for a job that is no array, or whose size is not known."""
    base: int = 0
    """Added to an element's index to give its server's."""
    policy: str = ""
    """Whom a trainer trains."""
    submitted_at: Time = 0.0
    """Seconds UTC; 0 in runs of earlier versions."""


class PackedTasks(msgspec.Struct, frozen=True):
    """What ``run.json`` says of the file that holds the tasks (:mod:`megaflow_hpc.ledger.tasks`)."""

    count: int
    bytes: int


class RunRecord(msgspec.Struct, kw_only=True, dict=True):
    """What ``run.json`` holds."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    version: str = ""
    """Version of megaflow-hpc that planned the run."""
    python: str = ""
    versions: dict[str, Any] = {}
    """Versions of software, engines and models, by name."""
    planned_at: float = 0.0
    """Seconds UTC; 0 in runs of earlier versions."""
    site: dict[str, Any] = {}
    """The site profile that completed the campaign file: its ``name``, ``file`` and ``fields``."""
    campaign: dict[str, Any] = {}
    """The resolved campaign file; read it as :attr:`config`."""
    source: str = ""
    """SHA-256 of the campaign file's text, as ``RUN/campaign.yaml`` holds it; empty in runs of earlier versions."""
    beside: str = ""
    """The campaign file's directory, where its own agents are looked for after ``RUN/code``; empty if it has none."""
    policies: dict[str, PolicyRecord] = {}
    tasks: dict[str, dict[str, Any]] = {}
    """Tasks by id in a run of earlier versions; :func:`~megaflow_hpc.ledger.tasks.planned_tasks` gives those of any."""
    packed: PackedTasks | None = None
    """The file of tasks; ``None`` where they are here, or there are none."""
    held_out: list[str] = []
    """Tasks that are evaluated on while the campaign trains, and never trained on."""
    images: dict[str, str] = {}
    """Image name in the tasks → SIF file or directory, in a run of earlier versions."""
    servers: list[ServerRecord] = []
    server_groups: list[ServerGroup] = []
    pools: dict[str, int] = {}
    """Servers of the engine pool that is a policy's model, by policy."""
    total: int = 0
    """Rollouts of the campaign."""
    learned: list[list[Any]] = []
    """What earlier campaigns tell of durations."""
    jobs: list[JobRecord] = []
    """Empty; early versions kept submissions here."""

    @property
    def name(self) -> str:
        """The campaign's name; empty in a run directory made without a campaign."""
        return str(self.campaign.get("name") or "")

    @functools.cached_property
    def config(self) -> CampaignConfig:
        """The resolved campaign file.

        Raises:
            ConfigError: It is not one that this version understands.
        """
        from megaflow_hpc.config import CampaignConfig, resolved

        return resolved(CampaignConfig, self.campaign)


def check_version(planned: RunRecord, run: RunDir) -> None:
    """Refuses a run planned by another minor version, which must not write into it.

    Raises:
        ConfigError: names both versions.
    """
    if planned.version.split(".")[:2] != __version__.split(".")[:2]:
        raise ConfigError(
            f"{run.run_json}: made by megaflow-hpc {planned.version}, this is {__version__}; install {planned.version} "
            "to go on with it, or plan again"
        )


def write_run(run: RunDir, record: RunRecord) -> None:
    """Publishes ``run.json``."""
    write_json(run.run_json, msgspec.to_builtins(record, enc_hook=str))


def read_run(run: RunDir) -> RunRecord:
    """Reads ``run.json``.

    Raises:
        ConfigError: There is none, it is damaged, of a later format, or closed to this user.
    """
    return _read(run, RunRecord)


def read_head(run: RunDir) -> RunHead:
    """Reads the little of ``run.json`` that a list of runs needs; raises as :func:`read_run` does."""
    return _read(run, RunHead)


def read_jobs(run: RunDir) -> dict[str, JobRecord]:
    """Returns every submission that was written down, by job or array; a file that cannot be read tells nothing."""
    found: dict[str, JobRecord] = {}
    for path in run.jobs.glob("[0-9]*.json"):
        if job := try_read_json(path, JobRecord):
            found[path.stem] = job
    return found


def _read(run: RunDir, kind: type[T]) -> T:
    try:
        data = read_regular(run.run_json, LONGEST)
    except FileNotFoundError:
        raise ConfigError(
            f"{run}: not a run directory (no run.json); make one with: megaflow-hpc plan CAMPAIGN"
        ) from None
    except NotADirectoryError:
        raise ConfigError(f"{run}: a file, expected a run directory; see those here with: megaflow-hpc list") from None
    except PermissionError:
        raise ConfigError(
            f"{run}: closed to this user; its owner lets a group look with share: group in the campaign file"
        ) from None
    except OSError as error:
        raise _damaged(run, error) from error
    try:
        header = decode(data, _Header)
    except ValueError as error:
        raise _damaged(run, error) from error
    if header.format != FORMAT or header.format_version > FORMAT_VERSION:
        raise ConfigError(
            f"{run.run_json}: {header.format} version {header.format_version}, expected {FORMAT} up to version "
            f"{FORMAT_VERSION}; use a newer megaflow-hpc"
        )
    try:
        return decode(data, kind)
    except ValueError as error:
        raise _damaged(run, error) from error


def decode(data: bytes, kind: type[T]) -> T:
    """Decodes JSON that Python has written. Raises :class:`ValueError`."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            raise
        except ValueError:  # NaN in a task's metadata, which Python's json writes
            return msgspec.convert(json.loads(data), kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _damaged(run: RunDir, error: Exception) -> ConfigError:
    return ConfigError(f"{run.run_json}: cannot be read ({error}); the run directory is damaged")
