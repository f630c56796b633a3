"""Checkpoints of a training, and the model directories that engines read.

::

    checkpoints/12/              whole or not there
      about.json                 step, optimizer steps, ranks, names and shapes of what is trained
      shard-00001-model-….safetensors     what rank 0 held of it: masters, moments, random state

torch's distributed checkpoint writes and reads the tensors, each rank its own share, and shares them anew where another
number of ranks reads them. They are safetensors, which run nothing on being read, as its own format (pickle) would.
A checkpoint is written beside its place, made durable, and moved there by one rename: whoever dies in between leaves a
hidden directory, which the next :func:`prune` removes. Read by as many ranks as wrote it, it continues bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from torch.distributed.checkpoint.api import CheckpointException  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import file_mode, fsync, fsync_tree, make_directory, write_json
from megaflow_hpc.host.files import read_regular, remove_tree
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup
from megaflow_hpc.training.trainer.optimizer import Optimizer

ABOUT = "about.json"
FILE = 2**32
"""Bytes of tensors, all ranks' shares together, after which each rank begins a file; one is held twice in memory."""


def save(folder: Path, step: int, optimizer: Optimizer, ranks: ProcessGroup) -> Path:
    """Writes the checkpoint of a step to ``folder/<step>``, durably; to be called by all ranks.

    One that is there already is left: it is of the same step's plan.

    Raises:
        SiteError: it cannot be written, as on a full disk.
    """
    from torch.distributed import checkpoint as dcp  # type: ignore[import-not-found]

    place = folder / str(step)
    if ranks.tell((place / ABOUT).exists()):
        return place
    staged = folder / ranks.tell(f".{step}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        if ranks.first:
            make_directory(folder)
            make_directory(staged)
        ranks.barrier()
        tensors = optimizer.tensors() | {f"random.{ranks.rank}.{n}": t for n, t in _random(ranks).items()}
        writer = dcp.HuggingFaceStorageWriter(str(staged), _files(tensors, ranks), save_distributed=True)
        with _quiet():
            dcp.save(tensors, storage_writer=writer, no_dist=ranks.count == 1)
        if ranks.first:
            shapes = {name: list(master.shape) for name, master in optimizer.masters.items()}
            about = {"step": step, "updates": optimizer.updates, "ranks": _kind(ranks), "shapes": shapes}
            write_json(staged / ABOUT, about)
            _settle(staged, place)
    except (OSError, CheckpointException) as error:
        raise SiteError(f"{place}: the checkpoint cannot be written: {_first(error)}") from error
    finally:
        if ranks.first:
            remove_tree(staged, ignore_errors=True)
    ranks.barrier()
    return place


def restore(place: Path, optimizer: Optimizer, ranks: ProcessGroup) -> int:
    """Reads a checkpoint into the policy, the optimizer and the random generators; returns its step.

    Args:
        place: the checkpoint, ``checkpoints/<step>``, of any number of ranks. On another number of them random
            generators start anew from the step; nothing that this package computes draws from them.

    Raises:
        ConfigError: it is not whole, or is of another model.
    """
    from torch.distributed import checkpoint as dcp

    try:
        about = json.loads(read_regular(place / ABOUT))
        step, shapes = int(about["step"]), about["shapes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: is no whole checkpoint ({error}); remove it, and train on from the one before"
        ) from None
    ours = {name: list(master.shape) for name, master in optimizer.masters.items()}
    if other := sorted(name for name in ours.keys() | shapes.keys() if ours.get(name) != shapes.get(name)):
        raise ConfigError(
            f"{place}: is of another model: {other[0]} has the shape {shapes.get(other[0])} there and "
            f"{ours.get(other[0])} in {optimizer.policy.source} ({len(other)} differ); train it in a run of its own"
        )
    tensors, random = optimizer.tensors(), _random(ranks)
    if about["ranks"] == _kind(ranks):
        tensors |= {f"random.{ranks.rank}.{name}": state for name, state in random.items()}
    reader = dcp.HuggingFaceStorageReader(str(place))
    try:
        with _quiet():
            dcp.load(tensors, storage_reader=reader, no_dist=ranks.count == 1)
    except (OSError, CheckpointException) as error:
        raise ConfigError(
            f"{place}: is damaged ({_first(error)}); remove it, and train on from the one before"
        ) from error
    optimizer.updates = int(about["updates"])
    optimizer.round()
    if about["ranks"] == _kind(ranks):
        torch.set_rng_state(random["cpu"])
        if "device" in random:
            torch.cuda.set_rng_state(random["device"], ranks.device)
    else:
        torch.manual_seed(step * 1_000_003 + ranks.rank)
    return step


def prune(folder: Path, keep: int, needed: Path | None = None) -> list[int]:
    """Removes all but the ``keep`` newest checkpoints and what dead trainers left; never ``needed``."""
    found = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal())
    old = [step for step in found[:-keep] if needed is None or str(step) != needed.name]
    for step in old:
        hidden = folder / f".{step}.removing.{secrets.token_hex(4)}"
        os.rename(folder / str(step), hidden)  # gone at once, however long the removal takes
    for path in folder.glob(".[0-9]*"):
        remove_tree(path, ignore_errors=True)
    return old


def export(folder: Path, policy: PolicyModel, ranks: ProcessGroup) -> Path:
    """Writes what the engine reads to the new directory ``folder``; to be called by all ranks.

    It has safetensors in the dtype of the base, by the names and in the order of transformers, and the base's own
    ``config.json``; publishing adds its tokenizer. With LoRA it is peft's adapter directory.
    """
    kept: dict[int, Any] = {}
    tensors = {}
    source = policy.trained() if policy.adapter else policy.state_dict(keep_vars=True).items()
    for name, parameter in source:  # one after the other: gathered on every rank, kept by the first
        if id(parameter) not in kept:
            whole = parameter.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            kept[id(parameter)] = whole.to("cpu", policy.stored, copy=True) if ranks.first else None
        tensors[name.removeprefix("causal.")] = kept[id(parameter)]
    if ranks.first:
        make_directory(folder)
    if ranks.first and policy.adapter:
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        policy.adapter.save_pretrained(folder, state_dict=named, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
    elif ranks.first:
        policy.causal.save_pretrained(folder, state_dict=tensors, max_shard_size="5GB")
        # As transformers sees it; publishing adds the base's.
        (folder / "generation_config.json").unlink(missing_ok=True)
        shutil.copyfile(policy.source / "config.json", folder / "config.json")
    if ranks.first:
        for path in folder.iterdir():
            path.chmod(file_mode(folder.parent))
    ranks.barrier()
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """That one rank is alone need not be said each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first(error: BaseException) -> BaseException:
    """What went wrong on the first rank where something did."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


def _kind(ranks: ProcessGroup) -> list[Any]:
    return [ranks.count, ranks.device.type]


def _random(ranks: ProcessGroup) -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _files(tensors: dict[str, Any], ranks: ProcessGroup) -> dict[str, int]:
    """Numbers of the files, from 1, that tensors go to; the same on every rank."""
    filled, found = 0, {}
    for name, tensor in tensors.items():
        if not name.startswith("random."):
            filled += tensor.numel() * tensor.element_size()
            found[name] = 1 + filled // FILE
    last = max(found.values())
    return found | {f"random.{rank}.{name}": last for rank in range(ranks.count) for name in ("cpu", "device")}


def _settle(staged: Path, place: Path) -> None:
    """Makes everything durable, then visible by one rename; of two that do so one wins, and both are right."""
    fsync_tree(staged)
    try:
        os.rename(staged, place)
    except OSError:
        if not (place / ABOUT).exists():
            raise
    fsync(place.parent)
