"""Writes an engine server's files in ``RUN/endpoints``: its address and its chat template's behaviour, or why it is not
serving."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.address import LOOPBACK, address, host_of_url
from megaflow_hpc.host.process import node_name
from megaflow_hpc.model.engine_api import RENDER
from megaflow_hpc.model.engines.adapters import options_of
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.process import Ask
from megaflow_hpc.model.server.proxy import Proxy
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles, FailedServer, Load, LoadingServer, RefusedWeights
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import ServerRecord


class Assignment(NamedTuple):
    """Entry ``number`` of ``servers`` in run.json, which describes the model that this array element serves."""

    number: int
    policy: str
    model: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Server name, ``POLICY.NUMBER``."""
        return f"{self.policy}.{self.number}"

    @property
    def weight(self) -> float:
        """Relative share of the policy's requests: the server's number of GPUs, at least 1."""
        return float(max(1, self.model.get("gpus", 0) * self.model.get("nodes", 1)))


def assignment(servers: Sequence[ServerRecord], index: int | None, policy: str | None) -> Assignment:
    """Returns the entry of ``servers`` that this process serves.

    Args:
        servers: ``servers`` of run.json.
        index: Number of the entry. If ``None``, the policy's first entry is used.
        policy: Policy to serve. If ``None``, the entry's policy is used.

    Raises:
        ConfigError: No entry matches.
    """
    if index is None:
        index = next((n for n, server in enumerate(servers) if policy in (None, server.policy)), -1)
    if not 0 <= index < len(servers):
        raise ConfigError(f"no model server {index}: the campaign has {len(servers)} (array elements count from 0)")
    entry = servers[index]
    if policy is not None and entry.policy != policy:
        raise ConfigError(f"model server {index} is of policy {entry.policy!r}, not {policy!r}")
    return Assignment(index, entry.policy, entry.model)


class Registration:
    """Writes and removes the endpoint files of one server, from its start to its exit."""

    def __init__(self, run: RunDir, what: Assignment, pool: EnginePool | None = None) -> None:
        self.what, self._pool = what, pool
        self._files = EndpointFiles(run)
        self.log_file = run.logs / f"{what.name}.engine.log"
        self.start = secrets.token_hex(8)
        self.beats = 0
        """Number of heartbeats since the engine's latest start, or 0 while the server is not registered."""
        self._endpoint: Endpoint
        self._down = False
        """True while the server waits for an external endpoint that is unavailable."""

    async def register(self, launch: Launch, proxy: Proxy, fingerprint: str) -> str:
        """Collects the fields that :meth:`beat` publishes. Returns the address and the template's behaviour, for the
        log."""
        template = await probe(proxy.ask, launch, parses_thoughts(self.what.model))
        url = self._collect(
            proxy.port,
            proxy.key,
            fingerprint,
            protocol=launch.protocol,
            model_name=launch.model_name,
            template=template,
            weight=self.what.weight,
        )
        return f"{url}; its chat template: {template}" if template else url

    def register_service(self, port: int, key: str, fingerprint: str) -> str:
        """Collects the fields that :meth:`beat` publishes for a service of the campaign. Returns the service's
        address."""
        return self._collect(port, key, fingerprint, protocol="service")

    def _collect(self, port: int, key: str, fingerprint: str, **more: Any) -> str:
        """Collects the fields of the endpoint file, and removes the record of an earlier failure. Returns the
        address."""
        url = f"{'https' if fingerprint else 'http'}://{host_of_url(address())}:{port}"
        self._endpoint = Endpoint(
            server=self.what.name,
            policy=self.what.policy,
            url=url,
            key=key,
            tls_fingerprint=fingerprint,
            node=node_name(),
            job_id=job_id(),
            start=self.start,
            started_at=time.time(),
            **more,
        )
        self._files.withdraw_failed(self.what.name)
        return url

    def beat(self, weight_version: int, refused: RefusedWeights | None, load: Load, down: str) -> None:
        """Publishes the endpoint file with a new heartbeat. Call :meth:`register` first.

        Args:
            weight_version: Version of the weights being served.
            refused: Latest version that this server failed to load.
            load: Load since the previous heartbeat.
            down: Reason why the engine did not answer the latest request. Empty if it did answer.
        """
        self.beats += 1
        endpoint = self._endpoint
        endpoint.heartbeat, endpoint.weight_version, endpoint.refused = self.beats, weight_version, refused
        endpoint.in_flight, endpoint.waiting, endpoint.wait_s = load.in_flight, load.waiting, load.wait_s
        endpoint.down, self._down = down, False
        self._files.publish(endpoint)
        if self._pool is not None:
            self._pool.advertise(endpoint)

    def loading(self, version: int) -> None:
        """Announces to the policy's other servers that this server is loading weights and not serving."""
        server, policy = self.what.name, self.what.policy
        self._files.publish_loading(
            LoadingServer(server=server, policy=policy, start=self.start, weight_version=version)
        )

    def unregister(self) -> None:
        """Removes the endpoint file, and the pool's copy of it, unless a later start has replaced it."""
        self.beats = 0
        if self._files.withdraw(self.what.name, self.start) and self._pool is not None:
            self._pool.withdraw(self.what.name)

    def leave(self) -> None:
        """Removes all endpoint files that this start of the server wrote."""
        self.unregister()
        self._files.withdraw_loading(self.what.name, self.start)
        self._files.withdraw_starting(self.what.name)

    def failed(self, cause: str, lasting: bool) -> None:
        """Publishes that this server has given up.

        Args:
            cause: Cause in one line.
            lasting: True if another start would fail for the same reason.
        """
        self._files.publish_failed(self._failure(cause, lasting))

    def starts_again(self, cause: str) -> None:
        """Publishes the reason why the engine's latest start failed. The server will try again."""
        failure = self._failure(cause, False)
        failure.down = self._down
        self._files.publish_starting(failure)

    def is_down(self, cause: str) -> None:
        """Publishes the reason why the external endpoint is unavailable. The server keeps polling it."""
        self._down = True
        with contextlib.suppress(OSError):  # the next reason is published instead
            self.starts_again(cause)

    def _failure(self, cause: str, lasting: bool) -> FailedServer:
        return FailedServer(
            server=self.what.name,
            policy=self.what.policy,
            cause=cause,
            lasting=lasting,
            job_id=job_id(),
            log=str(self.log_file) if self.log_file.exists() else "",
            at=time.time(),
        )


def check_address() -> None:
    """Checks that other nodes can reach this node, if this is a Slurm job.

    Raises:
        ConfigError: The node's host name does not resolve, and the node has no route to other nodes.
    """
    if os.environ.get("SLURM_JOB_ID") and address() == LOOPBACK:
        raise ConfigError(
            f"pods cannot reach this server: host name {socket.gethostname()!r} does not resolve, and the node has "
            "no route to other nodes; export MEGAFLOW_ADDRESS=… in slurm.servers.setup, with its name or address"
        )


def in_slurm() -> bool:
    """Returns whether this process is an element of a job array."""
    return bool(os.environ.get("SLURM_ARRAY_JOB_ID"))


def job_id() -> str:
    """Returns the Slurm job's id, ``ARRAY_ELEMENT`` for an element of a job array, or an empty string outside Slurm."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "")


# --- the chat template ------------------------------------------------------------------------------------------------

APPENDS = "append-only"
DROPS = "drops the thoughts of earlier answers"
DROPS_AT_USER = "drops thoughts at the next user message"
REWRITES = "rewrites earlier messages"
PROBE_TIMEOUT_S = 30.0
Message = dict[str, Any]


def parses_thoughts(model: Mapping[str, Any]) -> bool:
    """Returns whether the engine of a ``model`` section reports reasoning in a separate field. vLLM does so only with
    an option."""
    return model.get("engine", "vllm") != "vllm" or bool(options_of(model).get("reasoning-parser"))


async def probe(ask: Ask, launch: Launch, parsed: bool) -> str:
    """Describes how the chat template changes earlier messages. Returns an empty string if the engine cannot render
    these conversations::

        user → answer with reasoning → user
        user → answer with reasoning and a tool call → tool → answer → user

    If two different reasoning texts render to the same tokens, the template drops reasoning. If a rendering does not
    begin with the previous rendering, the template rewrites earlier messages. The result only tells the user in advance
    when sequences will end, because the gateway makes its own decision for each call
    (:mod:`megaflow_hpc.model.gateway.continuation`).

    Args:
        ask: Posts one request to the engine.
        launch: The engine's launch.
        parsed: True if the engine reports reasoning in a separate field, false if it is part of the text.
    """
    if launch.protocol != "split":
        return ""

    async def rendered(*messages: Message) -> list[int]:
        body = {"model": launch.model_name, "messages": messages}
        status, text = await ask(RENDER, body, PROBE_TIMEOUT_S)
        return list(json.loads(text)["token_ids"]) if status == 200 else []

    try:
        asks, again = {"role": "user", "content": "Which colour?"}, {"role": "user", "content": "And then?"}
        one, other = ([asks, _answer(thought, parsed), again] for thought in ("A red one.", "A blue one."))
        renderings = [await rendered(asks), await rendered(*one)]
        at_user = await rendered(*other) == renderings[-1]
        at_tool = at_user
        call, result = _tool("A red one.", parsed)
        if in_turn := await rendered(asks, call, result):
            at_tool = await rendered(asks, *_tool("A blue one.", parsed)) == in_turn
        renderings.append(await rendered(*one, _answer("A green one.", parsed), again))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return ""
    if not all(renderings):
        return ""
    if at_user or at_tool:
        return DROPS if at_tool else DROPS_AT_USER
    turns = [renderings, [renderings[0], in_turn]] if in_turn else [renderings]
    return APPENDS if all(_grows(prompts) for prompts in turns) else REWRITES


def _answer(thought: str, parsed: bool) -> Message:
    if parsed:
        return {"role": "assistant", "content": "This one.", "reasoning": thought}
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nThis one."}


def _tool(thought: str, parsed: bool) -> tuple[Message, Message]:
    function = {"name": "look", "arguments": "{}"}
    call = {**_answer(thought, parsed), "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    return call, {"role": "tool", "tool_call_id": "call00001", "content": "Nothing."}


def _grows(prompts: Sequence[list[int]]) -> bool:
    return all(late[: len(early)] == early for early, late in pairwise(prompts))
