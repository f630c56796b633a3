"""Checks weights before they are published. An engine must be able to load them for the policy's model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir, read_json, try_read_json
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.safetensors import read_directory, why_not_of
from megaflow_hpc.types import ENDPOINTS

TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER = "adapter_config.json"
"""File whose presence marks a directory as a LoRA adapter in PEFT's format."""
DELTA = "delta.json"
"""File whose presence marks a directory as a delta to another version (:mod:`megaflow_hpc.rundir.weight_delta`)."""
LORA_RANK = 16
"""Default of vLLM's ``max-lora-rank``."""
MATCHING_KEYS = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")
"""Keys of ``config.json`` that must be the same in the trained and the served model."""
MAX_COPIED_BYTES = 64 * 2**20
"""Maximum size in bytes of a file, such as a tokenizer, that is copied from the campaign's model into a version."""


class Adapter(msgspec.Struct):
    """The fields of an adapter's configuration that determine whether an engine can load it."""

    r: int
    """Rank of the adapter."""


class DeltaFile(msgspec.Struct):
    """A tensor file stored as a delta."""

    size: int
    """Size of the full file in bytes."""
    word: int
    """Word size in bytes."""
    sha256: str
    """SHA-256 of the full file."""


class Delta(msgspec.Struct):
    """Content of ``delta.json``."""

    base: int
    """Number of the version from which the delta was computed."""
    files: dict[str, DeltaFile]


def policy_of(run: RunDir, policy: str | None) -> tuple[str, Mapping[str, Any]]:
    """Returns the policy for which to publish weights, and its ``model`` section.

    Args:
        policy: Name of the policy. ``None`` selects the only policy with a model.

    Raises:
        ConfigError: The policy is unknown, ambiguous, or uses an external endpoint.
    """
    models = {name: entry.model for name, entry in read_run(run).policies.items() if entry.model}
    if policy is None and len(models) == 1:
        (policy,) = models
    if policy not in models:
        unnamed = "several policies have models; name one with --policy" if models else "no policy has a model"
        problem = f"no policy {policy!r} with a model" if policy else unnamed
        raise ConfigError(f"{run}: {problem}; there are: {', '.join(sorted(models)) or 'none'}")
    if models[policy].get("engine") in ENDPOINTS:
        raise ConfigError(f"{run}: policy {policy!r} is an external endpoint, whose weights cannot be changed")
    return policy, models[policy]


def check(source: Path, model: Mapping[str, Any]) -> None:
    """Checks that a directory contains weights that the engine of a ``model`` section can load.

    Raises:
        ConfigError: The weights are missing or cannot be loaded. The message says why.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: not a directory; give the model directory that the trainer wrote")
    names = [path.name for path in source.iterdir()]
    if model.get("engine") == "scripted":
        if "script.yaml" not in names:
            raise ConfigError(f"{source}: has no script.yaml, which a scripted engine uses as weights")
    elif DELTA not in names and not any(name.endswith(TENSORS) for name in names):
        raise ConfigError(
            f"{source}: has no weights ({', '.join('*' + t for t in TENSORS)}); is it the right directory?"
        )
    if ADAPTER in names:
        _check_adapter(source, model)
    if model.get("engine") != "scripted" and any(name.endswith(".safetensors") for name in names):
        _check_tensors(source, model, whole=ADAPTER not in names)


def why_not_served(base: Path, served: Path) -> str:
    """Returns the reason why a model trained from ``base`` cannot replace ``served``. Returns an empty string if no
    reason is found."""
    if base == served:
        return ""
    ours, theirs = (_read(folder / "config.json") for folder in (base, served))
    others = "which the engines serve; train the model that is served (training.policies.*.base)"
    for key in MATCHING_KEYS if ours and theirs else ():
        if ours.get(key) != theirs.get(key):
            return f"{base}: {key} is {ours.get(key)!r}, and {theirs.get(key)!r} in {served}, {others}"
    words = [_read(folder / "tokenizer.json").get("model") for folder in (base, served)]
    vocabularies = [model["vocab"] for model in words if isinstance(model, dict) and "vocab" in model]
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        return f"{base}: its tokenizer maps words to other ids than the tokenizer of {served}, {others}"
    return ""


def _read(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a model directory. Returns an empty dict if the file is missing or unreadable."""
    return try_read_json(path, dict[str, Any]) or {}


def _check_tensors(source: Path, model: Mapping[str, Any], whole: bool) -> None:
    """Checks the tensor headers, because a load failure in the engine would make the policy unavailable for minutes."""
    tensors = read_directory(source)
    base = Path(str(model.get("path") or ""))
    if not whole or not base.is_dir():
        return
    try:
        served = read_directory(base)
    except ConfigError:
        return  # the engine has already loaded these weights
    if why := why_not_of(tensors, served):
        raise ConfigError(f"{source}: {why} ({base}); publish weights of the policy's own model")


def _check_adapter(source: Path, model: Mapping[str, Any]) -> None:
    options = {str(k).replace("_", "-"): v for k, v in (model.get("args") or {}).items()}
    if model.get("engine") != "vllm" or not options.get("enable-lora"):
        raise ConfigError(
            f"{source}: is a LoRA adapter, but the campaign's engine was not started for adapters: it needs engine "
            "vllm with args: {enable-lora: true, max-lora-rank: …}; or merge it into the model and publish that"
        )
    try:
        rank = read_json(source / ADAPTER, Adapter).r
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / ADAPTER}: the rank 'r' is missing or invalid: {error}") from None
    most = int(options.get("max-lora-rank") or LORA_RANK)
    if rank > most:
        raise ConfigError(
            f"{source}: has rank {rank}, but the engine takes at most {most} (args: {{max-lora-rank: …}})"
        )


def base_of(folder: Path) -> int | None:
    """Returns the version number of a delta's base. Returns ``None`` for a full version.

    Raises:
        ConfigError: The delta's description cannot be read.
    """
    try:
        return read_json(folder / DELTA, Delta).base
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / DELTA}: cannot be read ({error}); publish the version again as a whole") from None


def complete(staged: Path, model: Mapping[str, Any]) -> None:
    """Copies missing files, such as the tokenizer, from the campaign's model. An engine can then start from the
    version."""
    base = Path(str(model.get("path") or ""))
    if model.get("engine") == "scripted" or not model.get("path") or not base.is_dir() or (staged / ADAPTER).exists():
        return
    for path in base.iterdir():
        tensors = path.name.endswith((*TENSORS, ".index.json"))
        if (
            path.is_file()
            and not tensors
            and path.stat().st_size <= MAX_COPIED_BYTES
            and not (staged / path.name).exists()
        ):
            shutil.copyfile(path, staged / path.name)
