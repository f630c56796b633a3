"""Whether an engine can load its model on a node, which has no network: looked at where a campaign is planned.

Nothing is loaded. Of a directory its files are looked at, of a Hugging Face name the cache, and of an engine's
environment whether its interpreter finds the engine. What is in safetensors files is the caller's to look at, who gets
their directory. ``args`` that name another tokenizer or another way to load are
believed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.adapters import interpreter

MODULES = {"vllm": "vllm", "sglang": "sglang", "transformers": "transformers"}
"""Engines that load a model themselves, and the module that each is."""
CONFIGS = ("config.json", "params.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json", "spiece.model")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
ASK_S = 30.0


def hub_cache() -> Path:
    """Returns the directory of Hugging Face's cache, by the variables that its libraries read."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def cached_models() -> list[str]:
    """Returns the Hugging Face names of the models that the cache has whole enough to be configured."""
    names = (entry.name.removeprefix("models--").replace("--", "/") for entry in hub_cache().glob("models--*"))
    return sorted(name for name in names if _snapshot(name) is not None)


def _snapshot(name: str) -> Path | None:
    """The directory of a name's latest revision in the cache."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
        found = [repository / "snapshots" / revision]
    except OSError:
        found = sorted(repository.glob("snapshots/*"))
    return next((path for path in found if any((path / config).exists() for config in CONFIGS)), None)


def why_not_loaded(model: Mapping[str, Any]) -> str:
    """Returns why the ``path`` of a ``model:`` section cannot be loaded offline, and what to do; empty if it can."""
    path, args = str(model.get("path") or ""), _options(model)
    if model.get("engine") not in MODULES or not path:
        return ""
    directory = _directory(path)
    if directory is None:
        return (
            f"{path!r} is no directory, and not in the Hugging Face cache {hub_cache()}; nodes load models without "
            f"a network: fetch it where there is one (hf download {path}), or give a directory"
        )
    if directory.is_file() or _is_adapter(directory):
        return ""
    if not any((directory / config).exists() for config in CONFIGS):
        return f"{path}: no config.json there; give the directory of a model as Hugging Face's libraries save it"
    if not {"tokenizer", "skip-tokenizer-init", "tokenizer-path"} & args and not _has_tokenizer(directory):
        return (
            f"{path}: no tokenizer there ({', '.join(TOKENIZERS[:3])}); copy it there, or name one in args: tokenizer"
        )
    if "load-format" not in args and not any(True for pattern in WEIGHTS for _ in directory.glob(pattern)):
        return f"{path}: no weights there (*.safetensors); copy them there, or say how to load it in args: load-format"
    return ""


def weights_of(model: Mapping[str, Any]) -> Path | None:
    """Returns the directory whose safetensors files the engine will load; ``None`` where nobody can tell."""
    path = str(model.get("path") or "")
    if model.get("engine") not in MODULES or not path or "load-format" in _options(model):
        return None
    directory = _directory(path)
    return directory if directory is not None and directory.is_dir() else None


def _directory(path: str) -> Path | None:
    """The file or directory of a ``path``, which may be a name in the cache; ``None`` where it is neither."""
    if os.path.exists(path):
        return Path(path)
    return _snapshot(path) if "/" in path and not os.path.isabs(path) else None


def _options(model: Mapping[str, Any]) -> set[str]:
    return {str(name).lstrip("-").replace("_", "-") for name in model.get("args") or ()}


def _is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").exists()


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZERS) or any(directory.glob("*.tiktoken"))


def why_no_engine(model: Mapping[str, Any]) -> str:
    """Returns why the interpreter of a ``model:`` section cannot start its engine, and what to do; empty if it can.

    An engine in an image is not looked at.
    """
    module = MODULES.get(str(model.get("engine")))
    if module is None or model.get("image") or model.get("pool"):
        return ""
    remedy = f"name a virtual environment that has {module}: model.python or MEGAFLOW_ENGINE_VENV"
    try:
        python = interpreter(model)
    except ConfigError as error:
        return f"{error}; {remedy}"
    code = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:  # a slow file system is no reason to refuse
        return ""
    except OSError as error:
        return f"{python} cannot be run ({error.strerror}); {remedy}"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} cannot be run ({said}); {remedy}"
    return "" if "True" in done.stdout else f"{python} has no {module}; {remedy}"
