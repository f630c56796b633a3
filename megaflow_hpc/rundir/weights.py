"""Versions of a policy's weights in a run directory: a trainer publishes them, model servers notice and load them.

::

    RUN/weights/
      current.<policy>.json   {"version": 3, "path": "…/weights/3", "policy": …}: what shall be served now
      3/                      a whole model directory, as the engine reads it, and megaflow-weights.json
      4/                      or a LoRA adapter (adapter_config.json) on the campaign's own model

A version is complete before it can be seen: its files are written and fsynced beside it, one rename makes it number
``n``, another moves the pointer. Numbers are positive and grow, over all policies of a run together; version 0 is the
model of the campaign file. Publishers may run at the same time, on several nodes: a number is taken by the rename,
which only one can win, and the pointer ends at the highest number whoever writes last. A publisher that dies leaves a
hidden directory that nobody reads.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run

ABOUT = "megaflow-weights.json"
TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER = "adapter_config.json"
"""A directory with this file is a LoRA adapter, as PEFT writes it."""
LORA_RANK = 16
"""vLLM's default of ``max-lora-rank``."""
SMALL = 64 * 2**20
"""Bytes up to which a file of the campaign's model (configuration, tokenizer) is copied to a version without it."""


@dataclass(frozen=True)
class Version:
    """One set of weights. ``version`` 0 with an empty path is the campaign's own model."""

    version: int = 0
    path: str = ""
    policy: str = ""
    published_at: float = 0.0
    """Seconds UTC."""

    @property
    def adapter(self) -> bool:
        """Whether it is a LoRA adapter on the campaign's own model."""
        return bool(self.path) and (Path(self.path) / ADAPTER).is_file()


def current(run: RunDir, policy: str) -> Version:
    """Returns the version to serve now; one open and read, also where the file system caches attributes."""
    try:
        found = json.loads(_pointer(run, policy).read_text())
        # A run directory may have been moved since: the number says where the files are.
        return Version(int(found["version"]), str(run.weights / str(int(found["version"]))), policy)
    except (OSError, ValueError, KeyError, TypeError):
        return Version(policy=policy)


def versions(run: RunDir, policy: str | None = None) -> list[Version]:
    """Returns every published version, of one policy or of all, oldest first."""
    found = []
    for number in _numbers(run):
        try:
            about = json.loads((run.weights / str(number) / ABOUT).read_text())
        except (OSError, ValueError):
            continue  # being removed
        if policy in (None, about.get("policy")):
            path = str(run.weights / str(number))
            found.append(Version(number, path, str(about["policy"]), float(about.get("published_at", 0))))
    return found


def publish(
    run: RunDir,
    source: str | os.PathLike[str],
    policy: str | None = None,
    *,
    move: bool = False,
    keep: int | None = None,
) -> Version:
    """Publishes the model directory ``source`` as the policy's next version; its servers load it.

    Args:
        run: The campaign's run directory.
        source: Weights as the engine reads them (for most a Hugging Face directory with safetensors). What it lacks of
            the campaign's model beside tensors (configuration, tokenizer, chat template) is added to the copy. Or a
            LoRA adapter, where the engine was started for them (``args: {enable-lora: true}`` of vLLM).
        policy: Which model; may be left out where there is one.
        move: Rename the directory instead of copying it; it must be on the run directory's file system.
        keep: Remove all but this many of the policy's newest versions.

    Raises:
        ConfigError: No such policy, or ``source`` is no directory with weights.
    """
    source = Path(source)
    policy, model = _policy(run, policy)
    _check(source, model)
    make_directory(run.weights)
    staged = run.weights / f".publishing.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        if move:
            _move(source, staged)
        else:
            shutil.copytree(source, staged, symlinks=False)
        _complete(staged, model)
        published_at = time.time()
        write_json(staged / ABOUT, {"policy": policy, "published_at": published_at, "source": str(source.absolute())})
        _flush(staged)
        number = _take_number(run, staged)
    except BaseException:
        remove_tree(staged, ignore_errors=True)
        raise
    point(run, policy)
    if keep is not None:
        prune(run, policy, keep)
    return Version(number, str(run.weights / str(number)), policy, published_at)


def point(run: RunDir, policy: str) -> Version:
    """Moves the pointer to the policy's highest version; repeats until no higher one was published meanwhile."""
    written = None
    while written != (newest := (versions(run, policy) or [Version(policy=policy)])[-1]):
        write_json(_pointer(run, policy), asdict(newest))
        written = newest
    return newest


def prune(run: RunDir, policy: str, keep: int) -> list[int]:
    """Removes all but the ``keep`` newest versions of a policy, and never the current one; returns their numbers."""
    now = current(run, policy).version
    old = [v for v in versions(run, policy)[: -max(1, keep)] if v.version != now]
    for version in old:
        hidden = run.weights / f".removing.{version.version}.{secrets.token_hex(4)}"
        os.rename(version.path, hidden)  # gone at once for everybody, however long the removal takes
        remove_tree(hidden, ignore_errors=True)
    return [version.version for version in old]


def _pointer(run: RunDir, policy: str) -> Path:
    return run.weights / f"current.{policy}.json"


def _numbers(run: RunDir) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(run.weights) if re.fullmatch(r"[1-9]\d*", name))
    except FileNotFoundError:
        return []


def _policy(run: RunDir, policy: str | None) -> tuple[str, Mapping[str, Any]]:
    models = {name: entry.model for name, entry in read_run(run).policies.items() if entry.model}
    if policy is None and len(models) == 1:
        (policy,) = models
    if policy not in models:
        unnamed = "several policies have models; name one with --policy" if models else "no policy has a model"
        said = f"no policy {policy!r} with a model" if policy else unnamed
        raise ConfigError(f"{run}: {said}; there are: {', '.join(sorted(models)) or 'none'}")
    if models[policy].get("engine") == "external":
        raise ConfigError(f"{run}: policy {policy!r} is an external endpoint; its weights are not ours to change")
    return policy, models[policy]


def _check(source: Path, model: Mapping[str, Any]) -> None:
    if not source.is_dir():
        raise ConfigError(f"{source}: is no directory; give the model directory that the trainer wrote")
    names = [path.name for path in source.iterdir()]
    if model.get("engine") == "scripted":
        if "script.yaml" not in names:
            raise ConfigError(f"{source}: has no script.yaml, which is what a scripted engine's weights are")
    elif not any(name.endswith(TENSORS) for name in names):
        raise ConfigError(
            f"{source}: has no weights ({', '.join('*' + t for t in TENSORS)}); is it the right directory?"
        )
    if ADAPTER in names:
        _check_adapter(source, model)


def _check_adapter(source: Path, model: Mapping[str, Any]) -> None:
    options = {str(k).replace("_", "-"): v for k, v in (model.get("args") or {}).items()}
    if model.get("engine") != "vllm" or not options.get("enable-lora"):
        raise ConfigError(
            f"{source}: is a LoRA adapter, and the campaign's engine was not started for them: it needs engine vllm "
            "with args: {enable-lora: true, max-lora-rank: …}; or merge it into the model and publish that"
        )
    try:
        rank = int(json.loads((source / ADAPTER).read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source / ADAPTER}: tells no rank 'r': {error}") from None
    if rank > (most := int(options.get("max-lora-rank") or LORA_RANK)):
        raise ConfigError(f"{source}: is of rank {rank}, and the engine takes {most} (args: {{max-lora-rank: …}})")


def _move(source: Path, staged: Path) -> None:
    try:
        os.rename(source, staged)
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot be moved to {staged.parent}: {error.strerror}; publish a copy (without --move) "
            "or write it on the run directory's file system"
        ) from None


def _complete(staged: Path, model: Mapping[str, Any]) -> None:
    """Adds what beside tensors the campaign's model has and this version lacks; engines start from a version too."""
    base = Path(str(model.get("path") or ""))
    if model.get("engine") == "scripted" or not model.get("path") or not base.is_dir() or (staged / ADAPTER).exists():
        return
    for path in base.iterdir():
        tensors = path.name.endswith((*TENSORS, ".index.json"))
        if path.is_file() and not tensors and path.stat().st_size <= SMALL and not (staged / path.name).exists():
            shutil.copyfile(path, staged / path.name)


def _flush(staged: Path) -> None:
    """Every file durable, and readable by whom the run directory lets in."""
    for folder, _, names in os.walk(staged):
        for name in [*names, "."]:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _take_number(run: RunDir, staged: Path) -> int:
    """Renames to the first free number: onto a directory that has files a rename fails, so each number is won once."""
    number = (_numbers(run) or [0])[-1] + 1
    while True:
        try:
            os.rename(staged, run.weights / str(number))
            return number
        except OSError:
            if not (run.weights / str(number)).exists():
                raise
            number += 1
