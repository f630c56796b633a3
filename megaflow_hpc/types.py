"""Types shared between subpackages: plain dataclasses and Protocols.

The subpackages (``environments``, ``model``, ``agents``, ``trajectories``, ``pod``) depend on one another only through
this module and :mod:`megaflow_hpc.trajectory`, so each can be replaced independently. Both modules are cheap to import.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import socket

Status = Literal["completed", "truncated", "failed", "cancelled"]
"""Outcome of a rollout. ``completed`` and ``truncated`` (ended by an agent limit) rollouts are verified. ``failed``
means an infrastructure failure."""
VERIFIED: tuple[Status, ...] = ("completed", "truncated")
"""Statuses of rollouts that may have a reward and are not run again."""

ErrorKind = Literal["", "agent", "model", "sandbox", "verifier", "node", "walltime", "preemption", "user"]
Network = Literal["none", "gateway", "host"]


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))


def known_fields(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``data`` that are fields of a dataclass. Drops entries that another version of the package
    wrote."""
    names = _names(cls)
    return {key: value for key, value in data.items() if key in names}


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. ``None`` means unlimited. Sizes are in MB (10^6 bytes), and times in seconds."""

    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """Limit on CPU seconds, applied to the agent and to the verifier separately."""


@dataclass(frozen=True)
class HealthCheck:
    """Checks whether a service is ready. Times are in seconds."""

    command: tuple[str, ...] = ()
    """Program with arguments that exits with 0 in a healthy service. If empty, every port must accept connections."""
    interval_s: float = 1.0
    timeout_s: float = 10.0
    """Timeout of one check."""
    ready_s: float = 60.0
    """Maximum time from the start of the service to the first successful check."""


@dataclass(frozen=True)
class Service:
    """A program, such as a database, that runs in its own sandbox. The rollout's sandboxes connect to its ports, with
    its name as the host name."""

    name: str
    """Host name of the service inside the sandboxes."""
    image: str = ""
    """Image name, as in :attr:`Task.image`. Empty for the task's image."""
    command: tuple[str, ...] = ()
    """Program with arguments. If empty, the image's own command runs."""
    entrypoint: tuple[str, ...] = ()
    """Program that is run with ``command`` as its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    ports: tuple[int, ...] = ()
    """TCP ports that sandboxes can connect to."""
    health: HealthCheck = field(default_factory=HealthCheck)
    after: tuple[str, ...] = ()
    """Services that must be healthy before this one starts."""
    limits: Limits = field(default_factory=Limits)
    dockerfile: str = ""
    """Dockerfile to build the image from. Empty if the image is used unmodified."""
    base: str = ""
    """Image in the Dockerfile's last ``FROM``."""
    per: Literal["rollout", "node", "campaign"] = "rollout"
    """Scope within which rollouts share the service."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Service:
        """Restores a service from the output of :func:`dataclasses.asdict`. Ignores unknown keys, which another version
        may have written."""
        values = known_fields(cls, data)
        for name in ("command", "entrypoint", "ports", "after"):
            values[name] = tuple(values.get(name, ()))
        health = known_fields(HealthCheck, data.get("health", {}))
        values["health"] = HealthCheck(**{**health, "command": tuple(health.get("command", ()))})
        return cls(**{**values, "limits": Limits(**known_fields(Limits, data.get("limits", {})))})


@dataclass(frozen=True)
class McpServer:
    """A Model Context Protocol (MCP) server that provides tools to agents. It has either a ``url`` or a ``command``."""

    name: str
    url: str = ""
    """Address as seen from inside the sandbox."""
    transport: Literal["streamable-http", "sse", "stdio"] = "streamable-http"
    command: tuple[str, ...] = ()
    """Program with arguments that an agent starts in the sandbox and calls through its standard streams."""


@dataclass(frozen=True)
class Task:
    """One problem for an agent, loaded by a task format. ``kind`` is the name of the format, such as ``harbor``."""

    id: str
    instruction: str
    image: str
    """Image name as given by the task. ``environment.images`` maps it to a SIF, a definition file or ``docker://``.
    Empty for a task without a sandbox, whose agent only converses."""
    path: str
    """The task's directory or file on the shared file system."""
    kind: str = "harbor"
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    agent_timeout_s: float = 900.0
    verifier_timeout_s: float = 600.0
    limits: Limits = field(default_factory=Limits)
    network: Network | None = None
    """Maximum network access that the task allows. If ``None``, the campaign decides."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    services: tuple[Service, ...] = ()
    """Programs that run next to the sandboxes of each rollout."""
    mcp_servers: tuple[McpServer, ...] = ()
    """MCP servers whose tools the agent may call."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that JSON and msgpack can encode. :meth:`from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        """Restores a task from :meth:`to_dict`. Ignores unknown keys, which another version may have written."""
        values = known_fields(cls, data)
        values["limits"] = Limits(**known_fields(Limits, data.get("limits", {})))
        values["services"] = tuple(map(Service.from_dict, data.get("services", ())))
        servers = [known_fields(McpServer, server) for server in data.get("mcp_servers", ())]
        values["mcp_servers"] = tuple(McpServer(**{**s, "command": tuple(s.get("command", ()))}) for s in servers)
        return cls(**values)


@dataclass(frozen=True)
class Rollout:
    """One sample of one task under one policy. Rollouts are scheduled individually, and each is stored exactly once."""

    task_id: str
    policy: str
    sample_index: int
    agent: str
    """Name of the agent in the campaign, which is unique among the agents of the policy."""
    round: int = 0
    """Number of times that training has requested this task before under this policy. Each round is a separate
    group."""
    scaffold: str = ""
    """Name of the agent as it appears in ids. It is set only if the policy has several agents whose samples form
    separate groups."""

    @cached_property
    def id(self) -> str:
        """Unique name of the rollout: ``<task>/<policy>/<sample>``. From round 1 on, ``<task>`` becomes
        ``<task>@<round>``. With a scaffold, ``<policy>`` becomes ``<policy>+<scaffold>``."""
        return f"{self.group_id}/{self.sample_index}"

    @cached_property
    def group_id(self) -> str:
        """Name of the rollout's group: the samples of one task, round, policy and scaffold, which are compared with
        one another."""
        task = f"{self.task_id}@{self.round}" if self.round else self.task_id
        return f"{task}/{self.arm}"

    @property
    def arm(self) -> str:
        """Policy and scaffold, by which results are compared: ``<policy>`` or ``<policy>+<scaffold>``."""
        return _arm(self.policy, self.scaffold)

    def to_dict(self) -> dict[str, Any]:
        """Returns the constructor arguments as a dictionary that JSON and msgpack can encode."""
        return {name: getattr(self, name) for name in _ROLLOUT_NAMES}

    def seed(self, campaign: int, attempt: int) -> int:
        """Returns the sampling seed, below 2**31. The seed depends only on the rollout, the attempt and the campaign's
        seed.

        Args:
            campaign: The campaign's ``seed``.
            attempt: Number of the attempt, from 0.
        """
        digest = hashlib.sha256(f"{campaign}\0{self.id}\0{attempt}".encode()).digest()
        return int.from_bytes(digest[:4]) % 2**31


class RolloutName(NamedTuple):
    """The parts of a rollout's id."""

    task_id: str
    policy: str
    scaffold: str = ""

    @classmethod
    def parse(cls, rollout_id: str) -> RolloutName:
        """Splits a rollout's id. If the id is invalid, all parts are empty."""
        task, slash, rest = rollout_id.rpartition("/")[0].rpartition("/")
        policy, _, scaffold = rest.partition("+")
        return cls(without_round(task)[0], policy, scaffold) if slash else cls("", "")

    @property
    def arm(self) -> str:
        """Policy and scaffold; see :attr:`Rollout.arm`."""
        return _arm(self.policy, self.scaffold)


def _arm(policy: str, scaffold: str) -> str:
    return f"{policy}+{scaffold}" if scaffold else policy


_ROLLOUT_NAMES = tuple(each.name for each in fields(Rollout))
_ROUND = re.compile(r"@(\d+)\Z")


def without_round(name: str) -> tuple[str, int]:
    """Splits ``<task>`` or ``<task>@<round>`` into task and round. Task ids contain no @
    (:data:`megaflow_hpc.tasks.formats.TASK_ID`).
    """
    match = _ROUND.search(name)
    return (name[: match.start()], int(match[1])) if match else (name, 0)


def round_of(task_id: str, group_id: str) -> int:
    """Returns the round of a trajectory, given its task id and group id."""
    if not group_id.startswith(f"{task_id}@"):
        return 0
    task, _, _ = group_id.rpartition("/")
    return without_round(task)[1]


@dataclass(frozen=True)
class ExecResult:
    """Result of a finished command. ``exit_code`` is 128+n after signal n, and 124 if ``timed_out``. Long output is
    truncated in the middle."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    duration_s: float = 0.0
    breach: str = ""
    """The sandbox limit that the killed command exceeded, with the measured and the allowed value. Empty if no limit
    was exceeded."""

    @property
    def stdout(self) -> str:
        """Standard output as text. Bytes that are not UTF-8 become lone surrogates."""
        return self.stdout_bytes.decode("utf-8", "surrogateescape")

    @property
    def stderr(self) -> str:
        """Standard error as text. Bytes that are not UTF-8 become lone surrogates."""
        return self.stderr_bytes.decode("utf-8", "surrogateescape")


class Sandbox(Protocol):
    """A running container. Methods raise :class:`~megaflow_hpc.errors.SandboxError` only if the infrastructure
    fails."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
    ) -> ExecResult:
        """Runs a command and waits for it to finish. A failed command is a result, not an error.

        Args:
            command: A string is passed to ``/bin/sh -c``. A sequence is run directly.
            timeout_s: Seconds until the command and its children are killed (exit code 124). Default: no limit.
            cwd: Directory inside the sandbox. Default: the task's working directory.
            env: Variables to add to the sandbox's environment.
            user_input: Standard input of the command. Default: empty.
        """

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or directory from the host to the absolute path ``target`` in the sandbox."""

    async def download(self, source: str, target: str) -> None:
        """Copies a file or directory from the sandbox to ``target`` on the host."""

    async def kill_processes(self) -> None:
        """Kills all processes in the sandbox except its runner, so that no process of the agent can watch the
        verifier."""

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a socket listening on the sandbox's own 127.0.0.1. The caller accepts its connections. Port 0 picks a
        free port."""

    async def stop(self) -> None:
        """Kills all processes in the sandbox and removes its files. Safe to call more than once."""


@dataclass(frozen=True)
class ModelEndpoint:
    """An agent's access to its model. Each rollout has its own URL, so the gateway can attribute calls without the
    agent's cooperation."""

    base_url: str
    """Base URL of an OpenAI-compatible API, ending in ``/v1``."""
    api_key: str = field(repr=False)
    model_name: str
    sandbox_url: str = ""
    """The same API as seen from inside the sandbox. Empty if the sandbox cannot reach it."""


CALL_HEADER = "x-megaflow-call"
"""Response header of the gateway: number of the model call within its rollout, from 0. Streamed responses lack it,
because they begin before the number is known."""
STARTED_BY_HEADER = "x-megaflow-started-by"
"""Request header: number of the model call that caused this one, such as a call of the parent agent."""
TURN_REWARD = "turn."
"""Prefix of the rewards of single turns: ``turn.0`` is the reward of the rollout's first model call."""
SEQUENCE_REWARD = "sequence."
"""Prefix of a scorer's rewards for single token sequences of the policy."""
MAX_REWARD = 3.4028234663852886e38
"""Largest absolute value of a reward. Rewards are stored as float32."""
MAX_REWARDS = 1000
"""Maximum number of named rewards per rollout, not counting rewards of turns and sequences. Each name becomes a column
for all trajectories."""
MAX_NAME_LENGTH = 1024
"""Maximum length of a stored name in characters. Every row of a string column is as wide as its longest string."""
_PART_REWARD = re.compile(r"(turn|sequence)\.-?\d+")


def is_part_reward(name: str) -> bool:
    """Returns whether a reward of this name belongs to a single turn or token sequence."""
    return _PART_REWARD.fullmatch(name) is not None


def whole_rewards(rewards: Mapping[str, float]) -> dict[str, float]:
    """Returns the rewards of the whole rollout, without those of single turns and token sequences."""
    return {name: value for name, value in rewards.items() if not is_part_reward(name)}


def main_reward(rewards: Mapping[str, float]) -> float | None:
    """Returns the reward named ``reward``. If it is missing, returns the first of the :func:`whole_rewards`, if any."""
    reward = rewards.get("reward", next(iter(whole_rewards(rewards).values()), math.nan))
    return None if math.isnan(reward) else reward


def checked_rewards(rewards: Mapping[Any, Any]) -> dict[str, float]:
    """Returns named rewards as floats, if a trajectory can store them.

    Raises:
        ValueError: A value is not a finite number in the range of float32, or there are more than :data:`MAX_REWARDS`
            names. Also raised if a name is not a text of at most :data:`MAX_NAME_LENGTH` characters.
    """
    checked: dict[str, float] = {}
    for name, value in rewards.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise ValueError(f"reward {name!r:.80}: expected a name of 1 to {MAX_NAME_LENGTH} characters")
        if not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:  # NaN fails this test too
            raise ValueError(f"reward {name!r:.80} is {value!r:.80}; expected a finite number that 32 bits hold")
        checked[name] = float(value)
    if (count := len(whole_rewards(checked))) > MAX_REWARDS:
        raise ValueError(f"{count} names of rewards; expected at most {MAX_REWARDS}, those of turns not counted")
    return checked


@dataclass
class AgentResult:
    """Outcome of an agent's run. ``status`` is ``completed``, or ``truncated`` if the agent reached a limit on turns or
    time."""

    status: Status = "completed"
    exit_code: int = 0
    error: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation in OpenAI format. It is stored only if the gateway recorded no messages."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards of the model calls, in order, stored as ``turn.0``, ``turn.1``, …"""
    rewards: dict[str, float] = field(default_factory=dict)
    """Further rewards by name, such as those of a team's roles. A verifier's reward of the same name replaces one."""
    state: dict[str, Any] | None = None
    """State for ``resume``, which msgpack must be able to encode. Set if the rollout is suspended."""


class Agent(Protocol):
    """A scaffold. Each instance serves one rollout.

    If the agent's program runs *in* the sandbox and calls the model from inside it, set the attribute ``in_sandbox`` to
    true. ``model.sandbox_url`` is then set. List the host paths that the program needs in ``binds``
    (``SRC:DEST[:ro]``).
    """

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Works on the task until the agent is done or reaches one of its limits.

        Args:
            model: Access to the model. ``None`` in a campaign without a model.

        Raises:
            ModelServiceError: The model did not respond. The rollout is retried.
            SandboxError: The sandbox was lost. The rollout is retried.
        """


class ResumableAgent(Agent, Protocol):
    """An agent that can continue in another process, in a sandbox with the same files.

    When the allocation ends, a model call is refused with an error of type ``rollout_suspended``. ``run`` must then
    return :attr:`AgentResult.state` without running any further command.
    """

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores ``state``. The following ``run`` continues with the refused call."""


@dataclass
class Artifact:
    """A file stored with a rollout, such as a log, a patch, or output of the agent."""

    name: str
    data: bytes
    """Content of the file."""

    def __repr__(self) -> str:
        return f"<Artifact {self.name!r}: {len(self.data)} bytes>"


ONLY_PARTS = "the rollout has no reward, only rewards of turns; add one called reward"
"""Error of a verdict whose rewards all belong to turns or sequences."""


@dataclass(frozen=True)
class Verdict:
    """Result of a verification. ``output`` is the output of the tests, up to a size limit. A task format may set
    ``reward`` to ``None`` if it also sets ``error``. In that case, :func:`megaflow_hpc.tasks.steps.verify` sets
    ``reward`` to 0."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    output: str = ""
    error: str = ""
    """Reason why the tests gave no valid reward, in which case the reward is 0. Empty otherwise."""
    artifacts: list[Artifact] = field(default_factory=list)
    """Files that the task declares as artifacts, and other files that the tests left in ``/logs/verifier``."""
    agent_error: str = ""
    """Reason why the agent is at fault, if the reward was decided without running any test."""

    @classmethod
    def of(cls, rewards: Mapping[str, float], output: str = "", artifacts: Sequence[Artifact] = ()) -> Verdict:
        """Creates a verdict from named rewards. The verdict's reward is their :func:`main_reward`.

        If all rewards belong to turns or sequences, the verdict has an error. Otherwise every rollout of the group
        would
        get reward 0, and the user would not learn why training uses none of them.
        """
        kept = {name: value + 0.0 for name, value in rewards.items()}  # turns -0.0 into 0.0
        reward = main_reward(kept)
        error = ONLY_PARTS if reward is None else ""
        return cls(reward, kept, output, error, artifacts=list(artifacts))


@dataclass(frozen=True)
class CallBudget:
    """Limits on a rollout's model calls. ``None`` means unlimited."""

    calls: int | None = None
    """Maximum number of responses. A call with ``n`` choices counts ``n`` times."""
    tokens: int | None = None
    """Maximum number of sampled tokens, including those of calls in progress."""
    image_bytes: int | None = None
    """Maximum total size in bytes of the images in the rollout's calls. Each image is counted once."""


ENDPOINTS = ("external", "openai", "anthropic", "gemini")
"""Engines that are already running elsewhere."""
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Maps each sampling setting to its neutral value. With neutral values, tokens are sampled from the model's unmodified
distribution."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a policy."""

    settings: Mapping[str, float] = field(default_factory=lambda: dict(NEUTRAL))
    """Values of all settings in :data:`NEUTRAL`."""

    @property
    def unusual(self) -> dict[str, float]:
        """The settings whose values are not neutral."""
        return {name: value for name, value in self.settings.items() if value != NEUTRAL[name]}
