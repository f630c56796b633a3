"""Checks during planning whether an engine can load its model on nodes without network access.

Nothing is loaded. The checks look for the files of a model directory, or for a Hugging Face name in the cache. They
also look for the engine in its interpreter. The caller checks the contents of safetensors files. If ``args`` name
another tokenizer or load format, the checks do not cover it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.adapters import interpreter, options_of

MODULES = {"vllm": "vllm", "sglang": "sglang", "transformers": "transformers"}
"""Maps each engine that loads models itself to its Python module."""
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


def why_not_loaded(model: Mapping[str, Any]) -> str:
    """Explains why the ``path`` of a ``model:`` section cannot be loaded offline, and how to fix it. Returns an empty
    string if it can be loaded."""
    path, args = str(model.get("path") or ""), options_of(model)
    if model.get("engine") not in MODULES or not path:
        return ""
    directory = _directory(path)
    if directory is None:
        return (
            f"{path!r} is no directory, and not in the Hugging Face cache {hub_cache()}; nodes load models without "
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


def weights_of(model: Mapping[str, Any]) -> Path | None:
    """Returns the directory with the safetensors files that the engine will load, or ``None`` if it is unknown."""
    path = str(model.get("path") or "")
    if model.get("engine") not in MODULES or not path or "load-format" in options_of(model):
        return None
    directory = _directory(path)
    return directory if directory is not None and directory.is_dir() else None


def _directory(path: str) -> Path | None:
    """Resolves a ``path``, which may be a name in the cache, to a file or directory. Returns ``None`` if it is
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
    if module is None or model.get("image") or model.get("pool"):
        return ""
    remedy = f"name a virtual environment that has {module}: model.python or MEGAFLOW_ENGINE_VENV"
    try:
        python = interpreter(model)
    except ConfigError as error:
        return f"{error}; {remedy}"
    code = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
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
