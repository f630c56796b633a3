"""Makes the paths of models and agents in a campaign file absolute, and checks that engines and trainers can load the
models.

Nothing is loaded. The checks look for the files of a model directory, or for a Hugging Face name in the cache, because
nodes may have no network. They also look for the engine in its interpreter. If ``args`` name another tokenizer or load
format, the checks do not cover it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.config import CampaignConfig, ModelConfig, Policy
from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.private import open_to_others
from megaflow_hpc.model.engines.adapters import interpreter, options_of
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.safetensors import read_directory
from megaflow_hpc.rundir.weight_source import why_not_served
from megaflow_hpc.types import ENDPOINTS

Where = Callable[[str], str]
"""Function that returns ``file:line`` of a dotted key, for error messages."""
AGENT_PATHS = ("config", "messages_file", "toolbox")
"""Arguments of built-in agents that are paths."""
ELSEWHERE = "; if only the nodes of the jobs have it, write slurm.check: false"


def absolute(policy: Policy, base: Path, where: Where, name: str, named: bool) -> Policy:
    """Resolves the paths of a policy's model and of its built-in agents against the campaign file's directory. Keeps
    names that are not paths.

    Args:
        base: Directory of the campaign file.
        named: True if the model is listed in ``models`` under its policy's name.

    Raises:
        ConfigError: A file does not exist. The message names file, line and key.
    """
    policy = policy.model_copy(update={"agents": tuple(_with_paths(agent, base) for agent in policy.agents)})
    model = policy.model
    if model is None:
        return policy
    changes: dict[str, Any] = {}
    if model.pool:
        pool = (base / os.path.expanduser(os.path.expandvars(model.pool))).absolute()
        try:
            EnginePool(pool).policy(name)
        except ConfigError as error:
            raise ConfigError(f"{where(f'models.{name}.path' if named else 'model.path')}: {error}") from None
        changes["path"] = str(pool)
    for field in ("path", "script", "api_key_file", "python", "image"):
        value = getattr(model, field)
        names_model = field == "path" and model.engine in ("pool", *ENDPOINTS)
        if value is not None and not names_model:
            may_be_name = field == "python" or (field == "path" and _looks_like_name(value))
            key = f"models.{name}.{field}" if named else f"model.{field}"
            changes[field] = _existing(value, base, where, key, may_be_name)
            problem = open_to_others(Path(changes[field])) if field == "api_key_file" else ""
            if problem:
                raise ConfigError(f"{where(key)}: {key}: {value}: {problem}")
    changes["binds"] = [os.path.expanduser(os.path.expandvars(bind)) for bind in model.binds]
    resolved = ModelConfig.model_validate({**model.model_dump(), **changes})
    return policy.model_copy(update={"model": resolved})


def _with_paths(agent: AgentConfig, base: Path) -> AgentConfig:
    given = {} if ":" in agent.name else {key: agent.args.get(key) for key in AGENT_PATHS}
    paths = {
        key: str((base / os.path.expanduser(os.path.expandvars(value))).absolute())
        for key, value in given.items()
        if isinstance(value, str) and value
    }
    return agent.model_copy(update={"args": {**agent.args, **paths}}) if paths else agent


def check_models(policies: Mapping[str, Policy], config: CampaignConfig, where: Where) -> list[str]:
    """Returns a message for each reason why engines or trainers cannot load their model on a node.

    A missing engine is acceptable if ``slurm.setup`` or ``slurm.servers.setup`` may install it.

    Args:
        policies: Policies with absolute paths. Paths in ``config.training`` must be absolute too.
    """
    reasons: dict[str, str] = {}
    for name, policy in policies.items():
        section = f"models.{name}" if config.models else "model"
        for kind in policy.model.kinds() if policy.model and not policy.model.pool else ():
            fields = kind.model_dump()
            why = _why_not_loaded(fields)
            if why:
                reasons.setdefault(why, f"{where(f'{section}.path')}: {section}.path: {why}{ELSEWHERE}")
            may_be_installed = config.slurm.setup or config.slurm.servers.setup
            why = "" if may_be_installed else why_no_engine(fields)
            if why:
                reasons.setdefault(why, f"{where(f'{section}.engine')}: {section}: {why}{ELSEWHERE}")
    for name, trained in config.training.policies.items() if config.training else ():
        why = _why_not_loaded({"engine": "transformers", "path": trained.base})
        model = policies[name].model if name in policies else None
        if not why and trained.base and model and model.path:
            why = why_not_served(Path(trained.base), Path(model.path))
        if why:
            key = f"training.policies.{name}.base"
            reasons.setdefault(why, f"{where(key)}: {key}: {why}{ELSEWHERE}")
    return list(reasons.values())


def _why_not_loaded(model: Mapping[str, Any]) -> str:
    """Returns the reason why an engine cannot load its model, or an empty string. Reads only the headers of weight
    files, which take a few kilobytes each."""
    if why := _why_incomplete(model):
        return why
    try:
        if weights := _weights_of(model):
            read_directory(weights)
    except ConfigError as error:
        return str(error)
    return ""


def absolute_training(training: TrainingConfig, base: Path, where: Where) -> TrainingConfig:
    """Resolves the paths of the models from which training starts."""
    policies = {
        name: policy.model_copy(
            update={
                "base": policy.base
                and _existing(policy.base, base, where, f"training.policies.{name}.base", _looks_like_name(policy.base))
            }
        )
        for name, policy in training.policies.items()
    }
    return training.model_copy(update={"policies": policies})


def _looks_like_name(value: str) -> bool:
    """Returns whether a model may be a Hugging Face repository id, ``owner/name``."""
    return not value.startswith((".", "/", "~", "$")) and "/" in value


def _existing(value: str, base: Path, where: Where, key: str, may_be_name: bool) -> str:
    path = (base / os.path.expanduser(os.path.expandvars(value))).absolute()
    if path.exists():
        return str(path)
    if may_be_name:
        return value
    absolute = "" if str(path) == value else f" (looked for {path})"
    raise ConfigError(f"{where(key)}: {key}: {value!r} does not exist{absolute}; give an existing path")


# --- models and engines on nodes without a network --------------------------------------------------------------------

MODULES = {"vllm": "vllm", "sglang": "sglang", "transformers": "transformers"}
"""Python module of each engine that loads models itself."""
CONFIGS = ("config.json", "params.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json", "spiece.model")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
PYTHON_TIMEOUT_S = 30.0


def hub_cache() -> Path:
    """Returns the Hugging Face cache directory, as set by environment variables."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def cached_models() -> list[str]:
    """Returns the Hugging Face names of cached models that have a config file."""
    names = (entry.name.removeprefix("models--").replace("--", "/") for entry in hub_cache().glob("models--*"))
    return sorted(name for name in names if _snapshot(name) is not None)


def _snapshot(name: str) -> Path | None:
    """Returns the snapshot directory of a cached model's latest revision, or ``None`` if it has no config file."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
        snapshots = [repository / "snapshots" / revision]
    except OSError:
        snapshots = sorted(repository.glob("snapshots/*"))
    return next((path for path in snapshots if _has_config(path)), None)


def _has_config(directory: Path) -> bool:
    return any((directory / name).exists() for name in CONFIGS)


def _why_incomplete(model: Mapping[str, Any]) -> str:
    """Explains what the ``path`` of a ``model:`` section lacks on nodes without a network, and how to fix it. Returns
    an empty string if it lacks nothing."""
    path, args = str(model.get("path") or ""), options_of(model)
    if model.get("engine") not in MODULES or not path:
        return ""
    directory = _directory(path)
    if directory is None:
        return (
            f"{path!r} is not a directory, and not in the Hugging Face cache {hub_cache()}; nodes load models without "
            f"a network: fetch it where there is one (hf download {path}), or give a directory"
        )
    if directory.is_file() or (directory / "adapter_config.json").exists():
        return ""
    if not _has_config(directory):
        return f"{path}: no config.json there; give the directory of a model as Hugging Face's libraries save it"
    if not {"tokenizer", "skip-tokenizer-init", "tokenizer-path"} & args.keys() and not _has_tokenizer(directory):
        return (
            f"{path}: no tokenizer there ({', '.join(TOKENIZERS[:3])}); copy it there, or name one in args: tokenizer"
        )
    if "load-format" not in args and not any(any(directory.glob(pattern)) for pattern in WEIGHTS):
        return f"{path}: no weights there (*.safetensors); copy them there, or say how to load it in args: load-format"
    return ""


def _weights_of(model: Mapping[str, Any]) -> Path | None:
    """Returns the directory with the safetensors files that the engine will load. Returns ``None`` if it is unknown."""
    path = str(model.get("path") or "")
    if model.get("engine") not in MODULES or not path or "load-format" in options_of(model):
        return None
    directory = _directory(path)
    return directory if directory is not None and directory.is_dir() else None


def _directory(path: str) -> Path | None:
    """Returns the file or directory of a ``path``, which may be a name in the cache. Returns ``None`` if it is
    missing."""
    if os.path.exists(path):
        return Path(path)
    return _snapshot(path) if "/" in path and not os.path.isabs(path) else None


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZERS) or any(directory.glob("*.tiktoken"))


def why_no_engine(model: Mapping[str, Any]) -> str:
    """Explains why the interpreter of a ``model:`` section cannot start its engine, and how to fix it. Returns an empty
    string if it can.

    Engines in images are not checked.
    """
    module = MODULES.get(str(model.get("engine")))
    if module is None or model.get("image"):
        return ""
    remedy = f"name a virtual environment that has {module}: model.python or MEGAFLOW_ENGINE_VENV"
    try:
        python = interpreter(model)
    except ConfigError as error:
        return f"{error}; {remedy}"
    code = f"import importlib.util as u; print(getattr(u.find_spec({module!r}), 'origin', None) is not None)"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:  # the file system may be slow
        return ""
    except OSError as error:
        return f"{python} cannot be run ({error.strerror}); {remedy}"
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} cannot be run ({message}); {remedy}"
    return "" if "True" in done.stdout else f"{python} has no {module}; {remedy}"
