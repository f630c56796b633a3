"""The types that rooms exchange: plain dataclasses and Protocols.

Rooms (``environments``, ``model``, ``agents``, ``trajectories``, ``pod``) meet only through the names in this module
and in :mod:`megaflow_hpc.trajectory`, so each room can be replaced alone. Neither module imports anything heavy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import socket

Status = Literal["completed", "truncated", "failed", "cancelled"]
"""``completed`` and ``truncated`` (by a limit of the agent) are verified. ``failed`` is a failure of the
infrastructure."""
VERIFIED: tuple[Status, ...] = ("completed", "truncated")
"""Statuses of rollouts that may have a reward and do not run again."""

ErrorKind = Literal["", "agent", "model", "sandbox", "verifier", "node", "walltime", "preemption", "user"]
Network = Literal["none", "gateway", "host"]


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))


def known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``data`` that are fields of a dataclass. A later version may have written more."""
    names = _names(cls)
    return {key: value for key, value in data.items() if key in names}


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. ``None`` is unlimited. Sizes are in MB (10^6 bytes), times in seconds."""

    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """CPU time. All times apply to the agent and to the verifier separately."""
    wall_s: float | None = None


@dataclass(frozen=True)
class Task:
    """One problem for an agent, as read by a task format. ``kind`` names the format (``harbor``, …)."""

    id: str
    instruction: str
    image: str
    """Image name in the task. ``environment.images`` maps it to a SIF, a definition file or ``docker://``."""
    path: str
    """Directory or file of the task on the shared file system."""
    kind: str = "harbor"
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 900.0
    verifier_timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    network: Network | None = None
    """Widest network access that the task allows. ``None``: the campaign decides."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON or msgpack. :meth:`from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        """Returns the task that :meth:`to_dict` wrote. Ignores keys of a later version."""
        return cls(**{**known_fields(cls, data), "limits": Limits(**data.get("limits", {}))})


@dataclass(frozen=True)
class Rollout:
    """One sample of one task under one policy: the unit that is scheduled and stored once."""

    task_id: str
    policy: str
    sample_index: int
    agent: str
    """Name of one of the campaign's agents."""
    round: int = 0
    """How often training has requested the task before under this policy. Each round is a group of its own."""

    @cached_property
    def id(self) -> str:
        """``<task>/<policy>/<sample>``, from round 1 on ``<task>@<round>/<policy>/<sample>``: the rollout's name
        everywhere."""
        return f"{self.group_id}/{self.sample_index}"

    @cached_property
    def group_id(self) -> str:
        """Names the group: the samples of one task, round and policy, which are compared with one another."""
        return f"{self.task_id}@{self.round}/{self.policy}" if self.round else f"{self.task_id}/{self.policy}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments of the class, for JSON or msgpack."""
        return {name: getattr(self, name) for name in _ROLLOUT_NAMES}

    def seed(self, campaign: int, attempt: int) -> int:
        """Returns the seed for sampling, below 2**31. It is always the same for one attempt and campaign seed.

        Args:
            campaign: the campaign's ``seed``.
            attempt: number of the attempt, from 0.
        """
        digest = hashlib.sha256(f"{campaign}\0{self.id}\0{attempt}".encode()).digest()
        return int.from_bytes(digest[:4]) % 2**31


_ROLLOUT_NAMES = tuple(each.name for each in fields(Rollout))
_ROUND = re.compile(r"@(\d+)\Z")


def without_round(name: str) -> tuple[str, int]:
    """Splits ``<task>`` or ``<task>@<round>`` into task and round. A task's own id has no @
    (:data:`megaflow_hpc.tasks.formats.TASK_ID`).
    """
    match = _ROUND.search(name)
    return (name[: match.start()], int(match[1])) if match else (name, 0)


def round_of(task_id: str, group_id: str) -> int:
    """Returns the round of a trajectory with these ids."""
    if not group_id.startswith(f"{task_id}@"):
        return 0
    task, _, _ = group_id.rpartition("/")
    return without_round(task)[1]


@dataclass(frozen=True)
class ExecResult:
    """A finished command. ``exit_code`` is 128+n after signal n, and 124 with ``timed_out``. Long streams lose their
    middle."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    duration_s: float = 0.0
    breach: str = ""
    """The sandbox limit for which the command was killed, with value and allowance. Empty if it was not."""

    @property
    def stdout(self) -> str:
        """Standard output as text. Bytes that are not UTF-8 become lone surrogates."""
        return self.stdout_bytes.decode("utf-8", "surrogateescape")

    @property
    def stderr(self) -> str:
        """Standard error as text. Bytes that are not UTF-8 become lone surrogates."""
        return self.stderr_bytes.decode("utf-8", "surrogateescape")


class Sandbox(Protocol):
    """A running container. Raises :class:`~megaflow_hpc.errors.SandboxError` only if the infrastructure fails."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
    ) -> ExecResult:
        """Runs a command to its end. A failed command is a result, not an error.

        Args:
            command: a string is passed to ``/bin/sh -c``. A sequence is run as it is.
            timeout_s: seconds after which the command and its children are killed (exit code 124). ``None``: no limit.
            cwd: directory inside the sandbox. Default: the task's work directory.
            env: variables added to those of the sandbox.
            user_input: standard input of the command. Default: empty.
        """

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or directory of the host to the absolute path ``target`` in the sandbox."""

    async def download(self, source: str, target: str) -> None:
        """Copies a file or directory of the sandbox to ``target`` on the host."""

    async def kill_processes(self) -> None:
        """Kills every process of the sandbox except its runner, so that nothing of the agent can watch the verifier."""

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a socket that listens on the sandbox's own 127.0.0.1. The caller serves it. Port 0: any free port."""

    async def stop(self) -> None:
        """Kills every process of the sandbox and removes its files. May be repeated."""


@dataclass(frozen=True)
class ModelEndpoint:
    """An agent's access to its model. The address is its own, so every call is attributed without its help."""

    base_url: str
    """Root of an OpenAI-style API, ending in ``/v1``."""
    api_key: str
    model_name: str
    sandbox_url: str = ""
    """The same root from inside the sandbox. Empty if nothing inside can reach it."""


@dataclass
class AgentResult:
    """An agent's own report of its end. ``status`` is ``completed`` or ``truncated`` (a limit of turns or time)."""

    status: Status = "completed"
    exit_code: int = 0
    error: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation in OpenAI form. It is stored only if the gateway recorded no message."""
    state: dict[str, Any] | None = None
    """State for ``resume``, in msgpack's types. Set if a model call was refused because the rollout is suspended."""


class Agent(Protocol):
    """A scaffold. An instance serves one rollout.

    If its program runs *in* the sandbox and calls the model from there, set an attribute ``in_sandbox`` to true. Then
    ``model.sandbox_url`` is set. List the parts of the host that it must see in ``binds`` (``SRC:DEST[:ro]``).
    """

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Works on the task until it is done or a limit of the agent ends it.

        Args:
            model: the model's address. ``None`` in a campaign without a model.

        Raises:
            ModelServiceError: the model did not answer. The rollout is retried.
            SandboxError: the sandbox is lost. The rollout is retried.
        """


class ResumableAgent(Agent, Protocol):
    """An agent that can continue in another process, with a sandbox that holds the same files.

    When its allocation ends, a model call is refused with an error of type ``rollout_suspended``. Then ``run`` returns
    :attr:`AgentResult.state`, and no command of the agent may run.
    """

    def resume(self, state: Mapping[str, Any]) -> None:
        """Prepares ``run``, which continues from ``state`` with the refused call."""


@dataclass
class Artifact:
    """A file that is kept of a rollout, such as a log, a patch, or an agent's own output."""

    name: str
    data: bytes
    """Content. Its collector limits the size."""


@dataclass(frozen=True)
class Verdict:
    """Result of a verification. ``output`` is the output of the tests, up to a size limit. A task format sets
    ``reward`` to ``None`` only together with an ``error``; :func:`megaflow_hpc.tasks.steps.verify` then makes it 0."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    output: str = ""
    error: str = ""
    """Reason why the tests gave no valid reward; the reward is then 0."""
    artifacts: list[Artifact] = field(default_factory=list)
    """Files that the task keeps, and other files that the tests left in ``/logs/verifier``."""
    agent_error: str = ""
    """Why the agent is to blame for a reward that was given without running a test."""

    @classmethod
    def of(cls, rewards: Mapping[str, float], output: str = "", artifacts: Sequence[Artifact] = ()) -> Verdict:
        """Returns a verdict with these named rewards, at least one. ``reward`` is the one of that name, or else the
        first."""
        kept = {name: value + 0.0 for name, value in rewards.items()}  # -0.0 becomes 0.0
        reward = kept["reward"] if "reward" in kept else next(iter(kept.values()))
        return cls(reward, kept, output, artifacts=list(artifacts))


@dataclass(frozen=True)
class CallBudget:
    """Limits of a rollout's model calls. ``None`` is unlimited."""

    calls: int | None = None
    """Maximum number of answers. A call with ``n`` answers counts ``n`` times."""
    tokens: int | None = None
    """Maximum number of sampled tokens, including those of calls in progress."""


NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling setting → its neutral value, with which tokens are sampled from the model's own distribution."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a policy."""

    settings: Mapping[str, float] = field(default_factory=lambda: dict(NEUTRAL))
    """A value for every name in :data:`NEUTRAL`."""

    @property
    def unusual(self) -> dict[str, float]:
        """The settings that are not neutral."""
        return {name: value for name, value in self.settings.items() if value != NEUTRAL[name]}
