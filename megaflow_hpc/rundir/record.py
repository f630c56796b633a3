"""Reads and writes ``RUN/run.json``: the plan of a run as a typed record, written once and never changed.

Pods read no other configuration, so editing the campaign file later does not affect a run. Defaults are defined here
and in :mod:`megaflow_hpc.config`. Unknown keys are ignored.
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
from megaflow_hpc.resources import __version__
from megaflow_hpc.rundir.events import Time
from megaflow_hpc.rundir.layout import RunDir, try_read_json

if TYPE_CHECKING:
    from megaflow_hpc.config import CampaignConfig

FORMAT = "megaflow-hpc/run"
FORMAT_VERSION = 3
MAX_RUN_JSON_BYTES = 2**30
"""Maximum size of ``run.json`` in bytes."""

_CLUSTER = r"(?:@[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?"
JOB_ID = re.compile(rf"[0-9][0-9_+,%\[\]-]{{0,99}}{_CLUSTER}")
"""Matches the id of a job, an array or array elements, followed by ``@name`` if it is on another cluster.

Job ids in a run directory are untrusted and are passed to ``scancel`` and to scripts, so anything else, such as an
option, is rejected.
"""


def array_of(pod: str) -> str | None:
    """Returns the job array of a pod, which is a part of the pod's name. Returns ``None`` if the pod does not run under
    Slurm."""
    return re.sub("_[^@]*", "", pod) if JOB_ID.fullmatch(pod) else None


T = TypeVar("T")


class _Header(msgspec.Struct):
    format: str = ""
    format_version: int = 0


class _Named(msgspec.Struct):
    name: str = ""
    pool: dict[str, Any] | None = None


class RunHead(msgspec.Struct):
    """The fields of ``run.json`` that are needed to list runs."""

    campaign: _Named = msgspec.field(default_factory=_Named)
    total: int = 0
    """Number of planned rollouts. Rollouts added later are not counted."""


class ServerRecord(msgspec.Struct):
    """An engine server: an element of the engine array, or a rank of the heterogeneous job."""

    policy: str
    model: dict[str, Any]
    """The fields of the policy's ``model`` section that this kind of server needs. Contains ``sleep_level`` if the
    server shares its trainer's job and sleeps during training steps."""
    held: bool = False
    """True if the element is submitted in state held. The autoscaler releases it."""
    service: dict[str, Any] | None = None
    """The service that this element runs instead of an engine: its definition, image file and sandbox limits."""


class ServerGroup(msgspec.Struct, array_like=True):
    """Consecutive servers with the same resources, submitted as one Slurm array."""

    first: int
    """Index of the first server."""
    count: int
    gpus: int
    """Number of GPUs per node."""
    held: bool = False
    nodes: int = 1
    """Number of nodes per server."""
    gpu_type: str = ""
    """Slurm's name for the type of the GPUs. Empty if any type will do."""
    service_cpus: int = 0
    """CPUs of a service, which runs in the pods' partition. 0 for engines."""
    service_mb: int | None = None
    """Memory of a service in MB; ``None`` for Slurm's default."""


class PolicyRecord(msgspec.Struct):
    """A policy's agents, and its model if it has one (:class:`megaflow_hpc.config.Policy`)."""

    agents: list[dict[str, Any]] = []
    model: dict[str, Any] | None = None
    samples: int = 1
    """Number of samples per group, without spare samples."""


class JobRecord(msgspec.Struct):
    """A job submitted to Slurm, as stored in ``RUN/ledger/jobs/<array>.json``."""

    role: str
    """Role of the job: ``pods``, ``servers``, ``trainer`` or ``gather``."""
    id: Annotated[str, Meta(pattern=rf"\A[0-9]{{1,20}}{_CLUSTER}\Z")]
    """Id of the job or array; ``123@name`` on another cluster."""
    elements: int | None = None
    """Number of array elements. ``None`` for a plain job or if unknown."""
    base: int = 0
    """Index of the server that runs in element 0."""
    policy: str = ""
    """Policy trained by a trainer job."""
    submitted_at: Time = 0.0
    """Submission time, as a Unix timestamp in seconds."""


class PackedTasks(msgspec.Struct, frozen=True):
    """Describes the task file, which :mod:`megaflow_hpc.ledger.tasks` reads."""

    count: int
    bytes: int


class RunRecord(msgspec.Struct, kw_only=True, dict=True):
    """Content of ``run.json``."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    version: str = ""
    """The megaflow-hpc version that planned the run."""
    python: str = ""
    versions: dict[str, Any] = {}
    """Versions of software, engines and models, by name."""
    planned_at: float = 0.0
    """Planning time, as a Unix timestamp in seconds."""
    site: dict[str, Any] = {}
    """The site profile that supplied defaults to the campaign file: ``name``, ``file`` and ``fields``."""
    campaign: dict[str, Any] = {}
    """The resolved campaign file. Use :attr:`config` to get the typed form."""
    source: str = ""
    """SHA-256 of the campaign file, which is copied to ``RUN/campaign.yaml``."""
    file: str = ""
    """Path of the campaign file. Empty if the run has none."""
    beside: str = ""
    """Directory of the campaign file. Agents that are not in ``RUN/code`` are imported from it. Empty if the run has no
    campaign file."""
    policies: dict[str, PolicyRecord] = {}
    packed: PackedTasks | None = None
    """Description of the task file. ``None`` if the run has no tasks."""
    sandboxes: bool = True
    """False if no task has an image. The pods then need no Apptainer."""
    left_out: int = 0
    """Number of tasks that could not be read or tested when the run was planned."""
    held_out: list[str] = []
    """Tasks reserved for evaluation during training."""
    servers: list[ServerRecord] = []
    server_groups: list[ServerGroup] = []
    pools: dict[str, int] = {}
    """Number of servers of each policy's engine pool. Contains only policies that an engine pool serves."""
    only: list[str] = []
    """Patterns that were passed to ``--only`` when the run was planned. Empty for the whole campaign."""
    total: int = 0
    """Number of rollouts in the campaign."""

    @property
    def name(self) -> str:
        """Name of the campaign. Empty if the run directory was created without a campaign."""
        return str(self.campaign.get("name") or "")

    @functools.cached_property
    def config(self) -> CampaignConfig:
        """The resolved campaign file in typed form.

        Raises:
            ConfigError: This version does not support it.
        """
        from megaflow_hpc.config import CampaignConfig, resolved

        return resolved(CampaignConfig, self.campaign)


def check_version(planned: RunRecord, run: RunDir) -> None:
    """Checks that the same minor version of the package planned the run. Other versions may not modify it.

    Raises:
        ConfigError: The versions do not match. The message names both.
    """
    if planned.version.split(".")[:2] != __version__.split(".")[:2]:
        raise ConfigError(
            f"{run.run_json}: made by megaflow-hpc {planned.version}, this is {__version__}; install {planned.version} "
            "to continue it, or plan again"
        )


def write_run(run: RunDir, record: RunRecord) -> None:
    """Publishes ``run.json``."""
    write_json(run.run_json, msgspec.to_builtins(record, enc_hook=str))


def read_run(run: RunDir) -> RunRecord:
    """Reads ``run.json``.

    Raises:
        ConfigError: The file is missing, damaged, unreadable for this user, or has another format version.
    """
    return _read(run, RunRecord)


def read_head(run: RunDir) -> RunHead:
    """Reads the part of ``run.json`` needed to list runs. Raises the errors of :func:`read_run`."""
    return _read(run, RunHead)


def read_jobs(run: RunDir) -> dict[str, JobRecord]:
    """Returns all recorded submissions by job or array id. Skips unreadable files."""
    jobs: dict[str, JobRecord] = {}
    for path in run.jobs.glob("[0-9]*.json"):
        if job := try_read_json(path, JobRecord):
            jobs[path.stem] = job
    return jobs


def _read(run: RunDir, kind: type[T]) -> T:
    try:
        data = read_regular(run.run_json, MAX_RUN_JSON_BYTES)
    except FileNotFoundError:
        wrong = "not a run directory (no run.json)" if run.path.is_dir() else "there is no such directory"
        raise ConfigError(f"{run}: {wrong}; list run directories with: megaflow-hpc list") from None
    except NotADirectoryError:
        raise ConfigError(
            f"{run}: a file, expected a run directory; list run directories with: megaflow-hpc list"
        ) from None
    except PermissionError:
        raise ConfigError(
            f"{run}: not readable for this user; its owner can share it with a group by share: group in the campaign "
            "file"
        ) from None
    except OSError as error:
        raise _damaged(run, error) from error
    try:
        header = decode(data, _Header)
    except ValueError as error:
        raise _damaged(run, error) from error
    if header.format != FORMAT or header.format_version != FORMAT_VERSION:
        remedy = "use a newer megaflow-hpc" if header.format_version > FORMAT_VERSION else "plan a new run"
        raise ConfigError(
            f"{run.run_json}: {header.format} version {header.format_version}, expected {FORMAT} version "
            f"{FORMAT_VERSION}; {remedy}"
        )
    try:
        return decode(data, kind)
    except ValueError as error:
        raise _damaged(run, error) from error


def decode(data: bytes, kind: type[T]) -> T:
    """Decodes JSON, including Python's extensions such as NaN. Raises :class:`ValueError`."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            raise
        except ValueError:  # NaN in a task's metadata, as written by Python's json module
            return msgspec.convert(json.loads(data), kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _damaged(run: RunDir, error: Exception) -> ConfigError:
    return ConfigError(f"{run.run_json}: cannot be read ({error}); the run directory is damaged")
