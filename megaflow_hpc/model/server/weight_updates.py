"""How a model server comes from one version of its policy's weights to the next, without losing a request.

``RUN/weights/current.<policy>.json`` says which version shall be served; a server reads it every few seconds and loads
another one in place where its engine can, else by starting the engine anew. Meanwhile its proxy holds new requests back
instead of refusing them, so that each is sampled by one version:

``running: finish``     what is being sampled is answered by the old version first.
``running: continue``   the engine pauses, changes the weights, computes what its requests have so far anew and goes on.
                        Only requests whose answer tells which token is of which version (vLLM's generate) are
                        continued; others finish first, so that every token's version is known in either case.

``update: rolling`` lets a policy's servers load one after the other, ``together`` all at once. A version that a server
cannot load is *refused*: the server says so in its endpoint file and serves the one before, and with ``rolling`` the
servers behind it do not even try.

A version that is a LoRA adapter lies on the campaign's own model. vLLM has it under a name of its own beside that of
the version before; once it is there and nothing is being sampled, the proxy asks for the new name instead of the old.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import GENERATE
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.server.proxy import Proxy
from megaflow_hpc.model.server.registration import Assignment
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import Version

STALE_S = 100.0
"""A server whose heartbeat has not moved for three of its periods is not waited for."""
AWAY_S = 900.0
"""How long a server that starts its engine anew is waited for."""
LOAD_S = 1800.0
"""Seconds that one step of loading may take: a large model from a busy file system."""


class Follower:
    """Which version one server serves, and which comes next."""

    def __init__(self, run: RunDir, what: Assignment) -> None:
        settings: Mapping[str, Any] = what.model.get("weights") or {}
        self.continues = settings.get("running", "finish") == "continue"
        self._rolling = settings.get("update", "rolling") == "rolling"
        self._run, self._what = run, what
        self.serving = Version(policy=what.policy)
        self.refused: dict[int, str] = {}
        """Versions that could not be loaded here, and why."""
        self._seen: dict[str, tuple[Any, float]] = {}

    def choose(self) -> Version:
        """What to start the engine with: the current version, or the latest before it that was not refused."""
        wanted = weights.current(self._run, self._what.policy)
        if wanted.version in self.refused:
            older = weights.versions(self._run, self._what.policy)
            usable = [v for v in older if v.version < wanted.version and v.version not in self.refused]
            wanted = usable[-1] if usable else Version(policy=self._what.policy)
        return wanted

    def model(self, version: Version) -> Mapping[str, Any]:
        """The campaign's model section with that version's files in it."""
        if not version.path or version.adapter:
            return self._what.model
        place = {"script": f"{version.path}/script.yaml"} if "script" in _needs(self._what) else {"path": version.path}
        return {**self._what.model, **place}

    def next(self) -> Version | None:
        """The version to load now; ``None`` while there is no other, or others are to load it first."""
        wanted = weights.current(self._run, self._what.policy)
        if wanted.version in (self.serving.version, *self.refused):
            return None
        if self._rolling and not self._my_turn(wanted.version):
            return None
        return wanted

    def _my_turn(self, version: int) -> bool:
        now, mine = time.monotonic(), self._what.number
        for path in sorted(self._run.endpoints.glob(f"{self._what.policy}.*")):
            number, _, kind = path.name.removeprefix(f"{self._what.policy}.").partition(".")
            if kind not in ("json", "loading") or not number.isdecimal() or int(number) == mine:
                continue
            try:
                record = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # just taken away
            if (record.get("refused") or {}).get("version") == version:
                self.refused[version] = f"{record.get('server')} could not load it: {record['refused']['cause']}"
                return False
            ahead = int(number) < mine or kind == "loading"
            if not ahead or (kind == "json" and record.get("weight_version") == version):
                continue
            mark = (record.get("start"), record.get("heartbeat"))
            if self._seen.get(path.name, (None, 0.0))[0] != mark:
                self._seen[path.name] = (mark, now)
            if now - self._seen[path.name][1] < (AWAY_S if kind == "loading" else STALE_S):
                return False
        return True

    async def load(self, version: Version, proxy: Proxy, launch: Launch) -> None:
        """Loads ``version`` in place, or refuses it where that changed nothing.

        Raises:
            ModelServiceError: The engine cannot, or failed; what it serves now is not known.
        """
        if version.adapter and not (self.serving.path and not self.serving.adapter):
            try:
                await self._adapt(version, proxy)
            except ModelServiceError as error:
                self.refused[version.version] = str(error)
            return
        if version.adapter or self.serving.adapter:
            raise ModelServiceError("a LoRA adapter is on the campaign's own model: the engine is started anew for it")
        reload = RELOADERS.get(launch.reload)
        if reload is None:
            raise ModelServiceError("this engine loads no weights in place")
        goes_on = self.continues and launch.reload == "vllm" and await _tells_versions(proxy)
        async with proxy.hold(continued=goes_on):
            await reload(proxy, version, goes_on)
            self.serving = version
            proxy.weight_version = version.version

    async def started(self, version: Version, proxy: Proxy, launch: Launch) -> None:
        """The engine answers, started with ``version``."""
        self.serving, proxy.weight_version, proxy.served_as = Version(policy=version.policy), version.version, ""
        if version.adapter:
            await self._adapt(version, proxy)
        self.serving = version
        if launch.reload == "vllm":
            try:
                await _post(proxy, "/update_weight_version", {"new_version": str(version.version)})
            except ModelServiceError:
                pass  # started without its development mode, or an older one: it tells no versions then

    async def _adapt(self, version: Version, proxy: Proxy) -> None:
        """Has vLLM load an adapter, and then asks for that one only."""
        name, before = f"{version.policy}@{version.version}", proxy.served_as
        await _post(proxy, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": version.path})
        async with proxy.hold(continued=False):
            await _post(proxy, "/update_weight_version", {"new_version": str(version.version)})
            self.serving, proxy.weight_version, proxy.served_as = version, version.version, name
        if before:
            with contextlib.suppress(ModelServiceError):  # it costs memory and nothing else
                await _post(proxy, "/v1/unload_lora_adapter", {"lora_name": before})


async def _vllm(proxy: Proxy, version: Version, goes_on: bool) -> None:
    await _post(proxy, f"/pause?mode={'keep' if goes_on else 'wait'}", {})
    load = {"method": "reload_weights", "kwargs": {"weights_path": version.path}}
    await _post(proxy, "/collective_rpc", load)
    # Nothing computed with the old weights is used again, not by the requests that go on either.
    told = await _post(proxy, f"/reset_prefix_cache?reset_running_requests={'true' if goes_on else 'false'}", {})
    if json.loads(told or "{}").get("success") is False:
        raise ModelServiceError("the engine could not drop its prefix cache")
    await _post(proxy, "/update_weight_version", {"new_version": str(version.version)})
    await _post(proxy, "/resume", {})


async def _sglang(proxy: Proxy, version: Version, goes_on: bool) -> None:
    told = await _post(proxy, "/update_weights_from_disk", {"model_path": version.path, "flush_cache": True})
    if json.loads(told or "{}").get("success") is False:
        raise ModelServiceError(f"/update_weights_from_disk: {told[:300]}")


RELOADERS: Mapping[str, Callable[[Proxy, Version, bool], Awaitable[None]]] = {"vllm": _vllm, "sglang": _sglang}
"""By :attr:`~megaflow_hpc.model.engines.adapters.Launch.reload`."""


async def _tells_versions(proxy: Proxy) -> bool:
    """Whether the engine's generate says which tokens were sampled by which version (vLLM 0.32 does)."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "stream": False}
    try:
        choice = json.loads(await _post(proxy, GENERATE, body))["choices"][0]
    except (ModelServiceError, ValueError, LookupError, TypeError):
        return False
    return bool(choice.get("weight_versions"))


async def _post(proxy: Proxy, path: str, body: dict[str, Any]) -> str:
    try:
        status, text = await proxy.ask(path, body, timeout_s=LOAD_S)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ModelServiceError(f"{path}: {type(error).__name__}: {error}") from error
    if status != 200:
        raise ModelServiceError(f"{path}: HTTP {status}: {text[:300]}")
    return text


def _needs(what: Assignment) -> str:
    return "script" if what.model.get("engine") == "scripted" else "path"
