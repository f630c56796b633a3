"""What crosses rooms: plain dataclasses and Protocols.

Every room (``environments``, ``model``, ``agents``, ``trajectories``, ``pod``) meets the others only through the names
in this module and in :mod:`megaflow_hpc.trajectory`, so each can be replaced alone. Neither imports anything heavy.
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
"""``completed`` and ``truncated`` (a limit of the agent) are verified and rewarded; ``failed`` is infrastructure."""
VERIFIED: tuple[Status, ...] = ("completed", "truncated")
"""What has one of these may have a reward, and nobody who knows of it runs it again."""

ErrorKind = Literal["", "agent", "model", "sandbox", "verifier", "node", "walltime", "preemption", "user"]
Network = Literal["none", "gateway", "host"]


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))


def known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``data`` that are fields of a dataclass: a later version may have written more."""
    names = _names(cls)
    return {key: value for key, value in data.items() if key in names}


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. ``None`` is unlimited; sizes in MB (10^6 bytes), times in seconds."""

    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """CPU time; agent and verifier apart, as all times of a sandbox."""
    wall_s: float | None = None


@dataclass(frozen=True)
class Task:
    """One problem for an agent, as a task format's reader yields it. ``kind`` names the format (``harbor``, …)."""

    id: str
    instruction: str
    image: str
    """Name as written in the task; ``environment.images`` maps it to a SIF, a definition file or ``docker://``."""
    path: str
    """The task's directory (or file) on the shared file system."""
    kind: str = "harbor"
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 900.0
    verifier_timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    network: Network | None = None
    """The most that the task allows; ``None`` leaves it to the campaign."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON and msgpack take them; :meth:`from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        """Returns the task that :meth:`to_dict` wrote; keys of a later version are ignored."""
        return cls(**{**known_fields(cls, data), "limits": Limits(**data.get("limits", {}))})


@dataclass(frozen=True)
class Rollout:
    """One sample of one task under one policy: the unit that is scheduled, stored once and named by ``id``."""

    task_id: str
    policy: str
    sample_index: int
    agent: str
    """Key into the campaign's resolved agents."""
    round: int = 0
    """How often the task was asked before under this policy: what training asks again is a group of its own."""

    @cached_property
    def id(self) -> str:
        """``<task>/<policy>/<sample>``, from round 1 on ``<task>@<round>/<policy>/<sample>``: the name under which the
        rollout is scheduled, stored and shown."""
        return f"{self.group_id}/{self.sample_index}"

    @cached_property
    def group_id(self) -> str:
        """Samples that are compared with one another: same task, same round, same policy."""
        return f"{self.task_id}@{self.round}/{self.policy}" if self.round else f"{self.task_id}/{self.policy}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON and msgpack take them: the arguments of the class."""
        return {name: getattr(self, name) for name in _OF_ROLLOUT}

    def seed(self, campaign: int, attempt: int) -> int:
        """Returns the seed of the sampling, below 2**31; always the same for one attempt under one campaign seed.

        Args:
            campaign: the campaign's own ``seed``.
            attempt: number of the attempt, from 0.
        """
        digest = hashlib.sha256(f"{campaign}\0{self.id}\0{attempt}".encode()).digest()
        return int.from_bytes(digest[:4]) % 2**31


_OF_ROLLOUT = tuple(each.name for each in fields(Rollout))
_ROUND = re.compile(r"@(\d+)\Z")


def without_round(name: str) -> tuple[str, int]:
    """Splits the first part of an id, ``<task>`` or ``<task>@<round>``, into task and round: no task's own id has an @
    (:data:`megaflow_hpc.tasks.formats.TASK_ID`)."""
    found = _ROUND.search(name)
    return (name[: found.start()], int(found[1])) if found else (name, 0)


def round_of(task_id: str, group_id: str) -> int:
    """Returns the round of a trajectory, as its task and its group say it."""
    known = group_id.startswith(f"{task_id}@")
    return without_round(group_id.rpartition("/")[0])[1] if known else 0


@dataclass(frozen=True)
class ExecResult:
    """A finished command. ``exit_code``: 128+n on signal n, 124 with ``timed_out``. Streams keep head and tail."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    duration_s: float = 0.0
    breach: str = ""
    """The limit of the sandbox for which the command was killed, with value and allowance; empty if it was not."""

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become lone surrogates."""
        return self.stdout_bytes.decode("utf-8", "surrogateescape")

    @property
    def stderr(self) -> str:
        """Standard error as text; bytes that are not UTF-8 become lone surrogates."""
        return self.stderr_bytes.decode("utf-8", "surrogateescape")


class Sandbox(Protocol):
    """A running container. Raises :class:`~megaflow_hpc.errors.SandboxError` for infrastructure only."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
    ) -> ExecResult:
        """Runs a command to its end; one that fails is a result, not an error.

        Args:
            command: a string goes to ``/bin/sh -c``, a sequence is run as it is.
            timeout_s: seconds after which the command and its children are killed (exit code 124); ``None``: no limit.
            cwd: directory inside the sandbox; default: the task's work directory.
            env: variables added to the sandbox's own.
            user_input: what the command reads on standard input; nothing by default.
        """

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or directory of the host into the sandbox, at the absolute path ``target``."""

    async def download(self, source: str, target: str) -> None:
        """Copies a file or directory of the sandbox to ``target`` on the host."""

    async def kill_processes(self) -> None:
        """Ends every process of the sandbox but its runner: nothing of the agent is left to watch the verifier."""

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a socket that listens on the sandbox's own 127.0.0.1 (port 0: any free one); the caller serves it."""

    async def stop(self) -> None:
        """Ends every process of the sandbox and removes its files; idempotent."""


@dataclass(frozen=True)
class ModelEndpoint:
    """What an agent is told of its model: an address of its own, so every call is attributed without its help."""

    base_url: str
    """OpenAI-style root, ending in ``/v1``."""
    api_key: str
    model_name: str
    sandbox_url: str = ""
    """The same root as seen from inside the sandbox; empty where nothing inside can reach it."""


@dataclass
class AgentResult:
    """What an agent says of its own end. ``status`` is ``completed`` or ``truncated`` (a turn or time limit)."""

    status: Status = "completed"
    exit_code: int = 0
    error: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation in OpenAI message form. It is stored only if the gateway recorded no message itself."""
    state: dict[str, Any] | None = None
    """What ``resume`` needs, in msgpack's types, from an agent whose model call was refused because its rollout is
    suspended."""


class Agent(Protocol):
    """A scaffold. An instance serves one rollout.

    One whose program runs *in* the sandbox and calls the model from there has a true attribute ``in_sandbox``; its
    ``model.sandbox_url`` is then filled. What it needs to see of the host stands in ``binds`` (``SRC:DEST[:ro]``).
    """

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Works on the task until it is done or a limit of the agent ends it.

        Args:
            model: where to ask; ``None`` in a campaign without a model.

        Raises:
            ModelServiceError: the model could not be asked; the rollout is tried again.
            SandboxError: the sandbox is lost; the rollout is tried again.
        """


class ResumableAgent(Agent, Protocol):
    """An agent that can go on in another process, with a sandbox that holds the same files.

    When its allocation ends, a model call is refused with an error of type ``rollout_suspended``; then ``run`` returns
    with :attr:`AgentResult.state`, no command of its own under way.
    """

    def resume(self, state: Mapping[str, Any]) -> None:
        """Called before ``run``, which goes on from ``state``, with the call that was refused."""


@dataclass
class Artifact:
    """A file that is kept of a rollout (a log, a patch, an agent's own output)."""

    name: str
    data: bytes
    """Bounded by the one who collects it."""


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
    """What the task wanted kept, and what the tests left in ``/logs/verifier`` beside the reward."""
    agent_error: str = ""
    """Why there is a reward and no test was run for it, where that is the agent's doing."""

    @classmethod
    def of(cls, rewards: Mapping[str, float], output: str = "", artifacts: Sequence[Artifact] = ()) -> Verdict:
        """A verdict with these named rewards, at least one; ``reward`` is the one of that name, else the first."""
        kept = {name: value + 0.0 for name, value in rewards.items()}  # -0.0 becomes 0.0
        reward = kept["reward"] if "reward" in kept else next(iter(kept.values()))
        return cls(reward, kept, output, artifacts=list(artifacts))


@dataclass(frozen=True)
class CallBudget:
    """What a rollout may ask of its models; ``None`` is unlimited."""

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
