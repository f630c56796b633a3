"""Converts the campaign's ``model:`` section to a :class:`Launch`, with one adapter for each kind of engine.

A launch has a command line, environment variables, and an address: a Unix socket in a private directory if the engine
supports sockets (vLLM ``--uds``), otherwise a free loopback port. The section's ``args`` become command-line options:
``{max-model-len: 8192, enforce-eager: true, override-generation-config: {temperature: 1}}``.

``model.python``, a virtual environment or an interpreter, selects the engine's interpreter. The default is the virtual
environment ``MEGAFLOW_ENGINE_VENV`` if set, otherwise the server's own interpreter. With ``model.image``, the
interpreter is inside the image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.address import LOOPBACK, address, free_port
from megaflow_hpc.host.private import open_to_others
from megaflow_hpc.model.engines.launch import IMAGE_PYTHON, Launch, in_image, over_nodes
from megaflow_hpc.model.images import MAX_PIXELS

NO_HOST = "nowhere.invalid"
"""Host name that cannot exist (RFC 6761). It replaces an empty list of allowed hosts, because vLLM would then allow all
hosts."""
MAX_SOCKET_PATH = 100
"""Maximum length of a Unix socket path in bytes. Linux allows 108 (``sun_path``)."""


def launch(model: Mapping[str, Any], policy: str, private: Path, seen: Iterable[Path] = ()) -> Launch:
    """Returns the launch for the engine of a ``model:`` section.

    Args:
        model: The section: ``engine``, ``path``, ``gpus``, ``nodes``, ``args``, ``python``, ``image``, ``script``, …
        policy: Name under which the model is served.
        private: A directory of mode 0700 on a local file system, for the socket.
        seen: Host paths mounted read-only for an engine in an image, in addition to the model.

    Raises:
        ConfigError: The section is invalid for the engine.
    """
    engine = str(model.get("engine") or "vllm")
    if engine not in ADAPTERS:
        raise ConfigError(f"model.engine: {engine!r} is not one of {', '.join(ADAPTERS)}")
    result = ADAPTERS[engine](model, policy, private)
    if model.get("image") and result.command:
        result = in_image(result, model, private, seen)
    nodes = int(model.get("nodes") or 1)
    return over_nodes(result, nodes, private) if nodes > 1 else result


def _vllm(model: Mapping[str, Any], policy: str, private: Path) -> Launch:
    python = interpreter(model)
    options = options_of(model)
    gpus, nodes = int(model.get("gpus") or 0), int(model.get("nodes") or 1)
    rewards = model.get("judge") == "reward"
    built_in: dict[str, Any] = {"model": _path(model), "served-model-name": policy, "uvicorn-log-level": "warning"}
    if rewards:
        built_in |= {"runner": "pooling"}
    else:
        # Report log-probabilities under the distribution actually sampled from, after temperature and all other
        # options.
        built_in |= {"enable-scale-out": True, "logprobs-mode": "processed_logprobs"}
    built_in["allowed-media-domains"] = [NO_HOST]
    if gpus > 1:
        built_in["tensor-parallel-size"] = gpus
    program = "vllm.entrypoints.openai.api_server"
    subcommand: list[str] = []
    if nodes > 1:
        built_in |= {"pipeline-parallel-size": nodes, "nnodes": nodes, "master-addr": address()}
        built_in["master-port"] = free_port("")
        program, subcommand = "vllm.entrypoints.cli.main", ["serve"]  # the API server's own module lacks --headless
    enforced: dict[str, str] = {}
    """Environment variables that override the server's own."""
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise torch.distributed listens on the address of the host name
    env |= {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0", "VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS)}
    # Otherwise the parsers of some models enforce a grammar even if calling a tool is optional.
    env["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    env["VLLM_SERVER_DEV_MODE"] = "1"  # for the endpoints that change weights; the proxy forwards no requests to them
    if options.get("enable-lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if len(os.fsencode(private)) + 38 < 107:  # a killed engine leaves its processes' sockets behind, named by a UUID
        env["VLLM_RPC_BASE_PATH"] = str(private)
        if nodes == 1:
            enforced["TMPDIR"] = str(private)  # a killed engine leaves its rendezvous file behind too
    if _is_cpu_build(python):
        built_in["enforce-eager"] = True
        env["TORCHDYNAMO_DISABLE"] = "1"  # log-probabilities would still be compiled, which needs g++
    elif model.get("sleep_level"):  # the CPU build ignores sleep mode
        built_in["enable-sleep-mode"] = True
    result = Launch(
        [python, "-m", program, *subcommand, *flags({**built_in, **options})],
        {k: os.environ.get(k, v) for k, v in env.items()} | enforced,
        model_name=str(options.get("served-model-name", policy)),
        protocol="reward" if rewards else "split" if options.get("enable-scale-out", True) else "plain",
        reload="vllm",
        metrics=True,
        slots=int(options.get("max-num-seqs") or 0),
    )
    result.uds = socket_path(private)
    result.command += ["--uds", result.uds]
    return result


def _sglang(model: Mapping[str, Any], policy: str, private: Path) -> Launch:
    port, options = free_port(), options_of(model)
    built_in: dict[str, Any] = {"model-path": _path(model), "served-model-name": policy}
    built_in |= {"host": LOOPBACK, "port": port, "tp": max(1, int(model.get("gpus") or 1))}
    # No key: SGLang accepts one only on its command line, which other users can read.
    return Launch(
        [interpreter(model), "-m", "sglang.launch_server", *flags({**built_in, **options})],
        {"HF_HUB_OFFLINE": "1"},
        base_url=f"http://{LOOPBACK}:{port}",
        model_name=policy,
        protocol="sglang",
        reload="sglang",
        metrics=True,
        slots=int(options.get("max-running-requests") or 0),
    )


def _transformers(model: Mapping[str, Any], policy: str, private: Path) -> Launch:
    port, path, options = free_port(), _path(model), options_of(model)
    built_in: dict[str, Any] = {"host": LOOPBACK, "port": port}
    program = str(Path(interpreter(model)).with_name("transformers"))
    return Launch(
        [program, "serve", path, *flags({**built_in, **options})],
        {"HF_HUB_OFFLINE": "1"},
        base_url=f"http://{LOOPBACK}:{port}",
        model_name=path,
        slots=0 if "continuous-batching" in options else 1,
    )


def _scripted(model: Mapping[str, Any], policy: str, private: Path) -> Launch:
    uds = socket_path(private)
    options: dict[str, Any] = {"served-model-name": policy, "uds": uds}
    if model.get("script"):
        options["script"] = str(model["script"])
    options |= options_of(model)
    python = interpreter(model) if model.get("image") else sys.executable
    command = [python, "-m", "megaflow_hpc.model.engines.scripted", *flags(options)]
    slots = int(options.get("slots") or 0)
    env = {"PYTHONPATH": str(Path(__file__).parents[3])} if model.get("image") else {}
    return Launch(command, env, uds=uds, model_name=policy, protocol="plain", slots=slots, start_timeout_s=60.0)


def _external(model: Mapping[str, Any], policy: str, private: Path) -> Launch:
    given = str(model.get("base_url") or "").rstrip("/")
    if not re.match(r"https?://", given):
        raise ConfigError(f"model.base_url: {given!r}; an endpoint needs an address such as http://HOST:PORT/v1")
    options, engine = options_of(model), str(model.get("engine"))
    api = "" if engine == "external" else engine
    extra = options.get("request") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"model.args.request: {extra!r}: expected fields of each request, such as {{max_tokens: 4096}}"
        )
    version = "/v1beta" if api == "gemini" else "/v1"
    return Launch(
        base_url=given.removesuffix("/v1"),
        api_url=given if urlsplit(given).path else given + version,
        api=api,
        options=extra,
        key=_key_file(model.get("api_key_file")),
        model_name=str(options.get("model") or model.get("path") or policy),
        protocol=str(options.get("protocol", "text")),  # "plain" if the endpoint is a vLLM server
        start_timeout_s=120.0,
    )


Adapter = Callable[[Mapping[str, Any], str, Path], Launch]
ADAPTERS: Mapping[str, Adapter] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "transformers": _transformers,
    "scripted": _scripted,
    **dict.fromkeys(("external", "openai", "anthropic", "gemini"), _external),
}


def options_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section's ``args``, keyed by the names of command-line options, such as ``max-model-len``."""
    return {str(name).lstrip("-").replace("_", "-"): value for name, value in (model.get("args") or {}).items()}


def flags(options: Mapping[str, Any]) -> list[str]:
    """Converts ``{"max-model-len": 8, "enforce-eager": True, "x": False, "y": {…}}`` to command-line arguments.

    ``True`` gives the bare option, ``False`` and ``None`` omit it, a list gives several values, a mapping gives JSON.
    """
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if isinstance(value, Mapping):
            arguments.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            arguments += [str(v) for v in value]
        elif value is not True:
            arguments.append(str(value))
    return arguments


def interpreter(model: Mapping[str, Any]) -> str:
    """Returns the path of the engine's Python interpreter, inside the image if ``model.image`` is set.

    Raises:
        ConfigError: The interpreter does not exist or is not executable.
    """
    if model.get("image"):
        inside = str(model.get("python") or IMAGE_PYTHON)
        return f"{inside}/bin/python" if Path(inside).is_dir() else inside
    chosen = model.get("python") or os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not chosen:
        return sys.executable
    path = Path(str(chosen)).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if shutil.which(str(path)) is None:
        raise ConfigError(f"the engine's interpreter {path} does not exist or cannot be run; check model.python")
    return str(path)


def socket_path(private: Path) -> str:
    """Returns the path of the engine's Unix socket.

    Raises:
        ConfigError: The path is longer than :data:`MAX_SOCKET_PATH`.
    """
    path = str(private / "engine.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{path} is too long for a Unix socket; set TMPDIR to a shorter directory")
    return path


def _is_cpu_build(python: str) -> bool:
    """Returns whether ``vllm-cpu`` is installed. Reads the package metadata, because importing vLLM takes many
    seconds."""
    return any(Path(python).parent.parent.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"))


def _path(model: Mapping[str, Any]) -> str:
    if not model.get("path"):
        raise ConfigError(f"model.path: engine {model.get('engine')} needs a model directory or name")
    return str(model["path"])


def _key_file(path: Any) -> str:
    if not path:
        return ""
    file = Path(str(path)).expanduser()
    try:
        if others := open_to_others(file):
            raise ConfigError(f"model.api_key_file: {file}: {others}")
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"model.api_key_file: {file}: {error.strerror}") from error
