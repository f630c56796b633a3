"""Updates an engine server's weights from one version to the next without losing a request.

``RUN/weights/current.<policy>.json`` names the version to serve. Each server polls it. The server loads a new version
in place if its engine supports that, and otherwise restarts the engine. Meanwhile the proxy holds requests back, so
that each response is sampled by one version:

``weights: rolling``    requests being sampled are completed with the old version first. A policy's servers load one
                        after the other.
``weights: together``   the same, but all servers load at the same time.
``weights: continue``   all servers load at the same time. The engine pauses, changes the weights, recomputes the state
                        of its requests and continues them. Only requests whose response reports each token's version
                        (vLLM's generate) are continued. Other requests finish first, so every token's version is known
                        in any case.

A server that cannot load a version *refuses* it: the server reports the version in its endpoint file and continues to
serve the previous version. With ``rolling``, later servers do not try a version that two servers have refused. A single
refusal does not count, because that server's node may be at fault, and training may be waiting for the version.

The servers of a policy pass a version on to each other (:mod:`.weight_copies`) as soon as they notice it. A version may
be a delta to an earlier version (:mod:`megaflow_hpc.rundir.weight_delta`). Each server builds the complete files on its
node's local disk.

A LoRA adapter applies to the campaign's original model. vLLM loads it under a new name next to the previous adapter.
Once no request is being sampled, the proxy switches to the new adapter's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from megaflow_hpc.errors import ConfigError, ModelServiceError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.engine_api import GENERATE
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.server.proxy import Proxy, Serving
from megaflow_hpc.model.server.registration import Assignment
from megaflow_hpc.model.server.weight_copies import WeightCopies, number_of
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles, Heartbeats
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.rundir.weight_source import base_of
from megaflow_hpc.rundir.weights import Version

MAX_REFUSALS = 2
"""A version is considered faulty once this many servers have refused it."""
POLL_INTERVAL_S = 5.0
"""Seconds between polls of the weights pointer for a policy that the campaign does not train."""
TRAINED_POLL_INTERVAL_S = 0.2
"""Seconds between polls for a trained policy. On average, half of this adds to the delay of a new version."""
MAX_POLLS_PER_S = 100
"""Maximum polls per second by all servers of a policy. Each poll opens a file on the shared file system."""
RESTART_S = 900.0
"""Maximum seconds that other servers wait for a server that is restarting its engine."""
LOAD_TIMEOUT_S = 1800.0
"""Timeout in seconds for one loading step, enough for a large model on a busy file system."""


def poll_interval_s(record: RunRecord, policy: str) -> float:
    """Returns the interval in seconds at which each server of ``policy`` polls the weights pointer."""
    trained = (record.campaign.get("training") or {}).get("policies") or ()
    if policy not in trained:
        return POLL_INTERVAL_S
    servers = sum(server.policy == policy for server in record.servers)
    return max(TRAINED_POLL_INTERVAL_S, servers / MAX_POLLS_PER_S)


class WeightUpdater:
    """Chooses the weight version that one server serves, and loads it.

    Args:
        run: The campaign's run directory.
        what: The server's policy, number and model section.
        proxy: The server's proxy. Its ``serving`` is the version being served.
    """

    def __init__(self, run: RunDir, what: Assignment, proxy: Proxy) -> None:
        how = what.model.get("weights", "rolling")
        self.continues, self._rolling = how == "continue", how not in ("together", "continue")
        self._run, self._what, self._proxy = run, what, proxy
        self.refused: dict[int, str] = {}
        """Causes of failure, by the version that this server failed to load."""
        self._heartbeats = Heartbeats()
        self.copies = proxy.copies = WeightCopies(run, what.name, what.policy, self._live)

    def _live(self) -> list[Endpoint]:
        servers = EndpointFiles(self._run).serving(self._what.policy)
        return [server for server in servers if self._heartbeats.alive(server)]

    def choose(self) -> Version:
        """Returns the version with which to start the engine. If this server refused the current version, this is the
        latest earlier version that it did not refuse.

        Raises:
            ModelServiceError: The run directory cannot be read.
        """
        try:
            wanted = weights.newest(self._run, self._what.policy)
            older = weights.versions(self._run, self._what.policy) if wanted.version in self.refused else []
        except OSError as error:
            raise ModelServiceError(f"{self._run.weights}: cannot be read ({error.strerror})") from error
        if wanted.version in self.refused:
            usable = [v for v in older if v.version < wanted.version and v.version not in self.refused]
            wanted = usable[-1] if usable else Version(policy=self._what.policy)
        return wanted

    def model(self, version: Version) -> Mapping[str, Any]:
        """Returns the campaign's model section, pointing to the files of this version."""
        if not version.path or version.adapter:
            return self._what.model
        if self._what.model.get("engine") == "scripted":
            return {**self._what.model, "script": f"{version.path}/script.yaml"}
        return {**self._what.model, "path": version.path}

    def whole(self, version: Version) -> Version:
        """Returns the version with the path of its complete files, and deletes copies of earlier versions.

        The files are a copy on this node if the policy has several servers. A delta's files are rebuilt on this node.

        Raises:
            ModelServiceError: The delta's base is missing, or files differ from the published files.
        """
        if not version.path:
            return version
        local, needed, serving = self.copies.local(version), {version.version}, self._proxy.serving.weights
        try:
            base = base_of(local)
            if base is not None:
                from megaflow_hpc.rundir.weight_delta import put_together  # imports numpy, which few servers need

                source = self.copies.local(Version(base, str(self._run.weights / str(base)), version.policy))
                local = put_together(local, source, self.copies.scratch / f"weights-{version.version}")
                needed.add(base)
        except ConfigError as error:
            raise ModelServiceError(str(error)) from error
        self.copies.keep(needed | {serving.version})
        for folder in self.copies.scratch.glob("weights-*"):
            if folder not in (local, Path(serving.path)):
                remove_tree(folder, ignore_errors=True)
        return version if local == Path(version.path) else replace(version, path=str(local))

    def next(self) -> Version | None:
        """Returns the version to load now. Returns ``None`` if there is no new version, or if other servers must load
        it first."""
        handled = (self._proxy.serving.weights.version, *self.refused)
        try:
            wanted = weights.current(self._run, self._what.policy)
            if wanted.version not in handled:  # a publisher that died may have left an old pointer
                wanted = weights.newest(self._run, self._what.policy)
        except OSError:  # the run directory is unreachable
            return None
        if wanted.version in handled:
            return None
        self.copies.begin(wanted)
        if self._rolling and not self._my_turn(wanted.version):
            return None
        return wanted

    def _my_turn(self, version: int) -> bool:
        files, own = EndpointFiles(self._run), self._what.name
        refusals: list[str] = []
        for server in files.serving(self._what.policy):
            if server.server == own:
                continue
            if server.refused is not None and server.refused.version == version:
                refusals.append(f"{server.server} could not load it: {server.refused.cause}")
                continue
            loads_first = server.weight_version != version and number_of(server.server) < self._what.number
            if loads_first and self._heartbeats.alive(server):
                return False
        if len(refusals) >= MAX_REFUSALS:
            self.refused[version] = refusals[0]
            return False
        for loading in files.loading(self._what.policy):
            unchanged_s = self._heartbeats.unchanged_s(f"{loading.server} loading", loading.start)
            if loading.server != own and unchanged_s < RESTART_S:
                return False
        return True

    async def load(self, version: Version, launch: Launch) -> None:
        """Loads ``version`` in place, or refuses it if the engine still serves the previous version.

        Raises:
            ModelServiceError: The engine failed, or must be restarted for this version.
        """
        serving, proxy = self._proxy.serving, self._proxy
        try:
            version = await asyncio.to_thread(self.whole, version)
        except ModelServiceError as error:
            self.refused[version.version] = str(error)
            return
        if version.adapter and (serving.adapter_name or not serving.weights.path):
            try:
                await self._load_adapter(version)
            except ModelServiceError as error:
                self.refused[version.version] = str(error)
            return
        if version.adapter or serving.adapter_name:
            raise ModelServiceError("a LoRA adapter is loaded on the campaign's original model: the engine restarts")
        reload = RELOADERS.get(launch.reload)
        if reload is None:
            raise ModelServiceError("this engine cannot load weights in place")
        keep_running = self.continues and launch.reload == "vllm" and await _reports_versions(proxy)
        async with proxy.hold(continued=keep_running):
            await reload(proxy, version, keep_running)
            proxy.serving = Serving(version)

    async def complete_start(self, version: Version, launch: Launch) -> None:
        """Completes an engine's start with ``version``: loads the adapter, if any, and sets the version number.

        Raises:
            ModelServiceError: The engine cannot load the adapter.
        """
        proxy = self._proxy
        if version.adapter:
            proxy.serving = Serving(Version(policy=version.policy))
            await self._load_adapter(version)
        else:
            proxy.serving = Serving(version)
        if launch.reload == "vllm":
            try:
                await post(proxy, "/update_weight_version", {"new_version": str(version.version)})
            except ModelServiceError:
                pass  # engines that are old or not in development mode report no versions

    async def _load_adapter(self, version: Version) -> None:
        """Makes vLLM load an adapter, switches requests to the adapter and unloads the previous one."""
        proxy = self._proxy
        name, before = f"{version.policy}@{version.version}", proxy.serving.adapter_name
        await post(proxy, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": version.path})
        async with proxy.hold(continued=False):
            await post(proxy, "/update_weight_version", {"new_version": str(version.version)})
            proxy.serving = Serving(version, name)
        if before:
            with contextlib.suppress(ModelServiceError):  # an adapter that remains loaded only costs memory
                await post(proxy, "/v1/unload_lora_adapter", {"lora_name": before})


async def _vllm(proxy: Proxy, version: Version, keep_running: bool) -> None:
    await post(proxy, f"/pause?mode={'keep' if keep_running else 'wait'}", {})
    load = {"method": "reload_weights", "kwargs": {"weights_path": version.path or None}}
    await post(proxy, "/collective_rpc", load)
    # No state computed with the old weights may be reused, not even by continued requests.
    reply = await post(proxy, f"/reset_prefix_cache?reset_running_requests={'true' if keep_running else 'false'}", {})
    if json.loads(reply or "{}").get("success") is False:
        raise ModelServiceError("the engine could not reset its prefix cache")
    await post(proxy, "/update_weight_version", {"new_version": str(version.version)})
    await post(proxy, "/resume", {})


async def _sglang(proxy: Proxy, version: Version, keep_running: bool) -> None:
    reply = await post(proxy, "/update_weights_from_disk", {"model_path": version.path, "flush_cache": True})
    if json.loads(reply or "{}").get("success") is False:
        raise ModelServiceError(f"/update_weights_from_disk: {reply[:300]}")


RELOADERS: Mapping[str, Callable[[Proxy, Version, bool], Awaitable[None]]] = {"vllm": _vllm, "sglang": _sglang}
"""Function that loads a version in place, for each value of
:attr:`~megaflow_hpc.model.engines.launch.Launch.reload`."""


async def _reports_versions(proxy: Proxy) -> bool:
    """Returns whether the engine's generate endpoint reports each token's weight version, as in vLLM 0.32."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "stream": False}
    try:
        choice = json.loads(await post(proxy, GENERATE, body))["choices"][0]
    except (ModelServiceError, ValueError, LookupError, TypeError):
        return False
    return bool(choice.get("weight_versions"))


async def post(proxy: Proxy, path: str, body: dict[str, Any], timeout_s: float = LOAD_TIMEOUT_S) -> str:
    """Posts one of the server's own requests to its engine. Returns the response text.

    Raises:
        ModelServiceError: The status is not 200.
    """
    try:
        status, text = await proxy.ask(path, body, timeout_s)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ModelServiceError(f"{path}: {type(error).__name__}: {error}") from error
    if status != 200:
        raise ModelServiceError(f"{path}: HTTP {status}: {text[:300]}")
    return text
