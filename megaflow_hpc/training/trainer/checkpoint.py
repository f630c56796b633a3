"""Reads and writes training checkpoints, and writes the model directories that engines load.

::

    checkpoints/12/              complete or absent
      about.json                 step, optimizer steps, ranks, names and shapes of the trained parameters
      shard-00001-model-….safetensors     rank 0's share: master weights, moments, random state

torch's distributed checkpoint module writes and reads the tensors. Each rank handles its own share. If a different
number of ranks reads a checkpoint, the module redistributes the tensors. The files are safetensors, because reading
torch's own format (pickle) can execute code. A checkpoint is written from a copy in host memory while training
continues. It is written to a hidden directory, which is fsynced and then renamed. If a process dies before the rename,
the next :func:`prune` removes the hidden directory. With the same number of ranks, a resumed training is bit-for-bit
identical.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch  # type: ignore[import-not-found]
from torch.distributed.checkpoint.api import CheckpointException  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import file_mode, fsync, fsync_tree, make_directory, write_json
from megaflow_hpc.host.files import read_regular, remove_tree
from megaflow_hpc.rundir.safetensors import BITS, INDEX, Tensor, read_header
from megaflow_hpc.rundir.weights import Checksum, checksum
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup
from megaflow_hpc.training.trainer.optimizer import Optimizer

ABOUT_FILE = "about.json"
MAX_FILE_BYTES = 2**32
"""After this many bytes of tensors, counted over all ranks, each rank starts a new file. A rank holds its file in
memory twice."""
_LAYER = re.compile(r".*?\.\d+\.")
"""Matches a parameter's name up to and including the layer number."""
T = TypeVar("T")


warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single rank works without it


class Saving:
    """A checkpoint that this rank is writing in the background. Created by :func:`save`.

    Attributes:
        step: number of the step whose state the checkpoint holds.
        target: the checkpoint directory. It appears once it is complete and durable.
    """

    def __init__(self, step: int, target: Path, writing: Future[None] | None) -> None:
        self.step, self.target, self._writing = step, target, writing

    @property
    def done(self) -> bool:
        """True if this rank has finished, with or without success. Once rank 0 has succeeded, the checkpoint is
        durable."""
        return self._writing is None or self._writing.done()

    def finish(self) -> Path:
        """Waits until this rank has finished writing. Returns the checkpoint directory.

        Raises:
            SiteError: the checkpoint cannot be written, for example because the disk is full.
        """
        try:
            if self._writing is not None:
                self._writing.result()
        except (OSError, CheckpointException) as error:
            raise SiteError(f"{self.target}: the checkpoint cannot be written: {_first(error)}") from error
        return self.target


def save(folder: Path, step: int, optimizer: Optimizer, ranks: ProcessGroup) -> Saving:
    """Copies the trainer's state and starts to write it to ``folder/<step>``. All ranks must call it.

    An existing checkpoint is kept, because it was made from the same plan. Only one checkpoint can be written at a
    time.

    Raises:
        SiteError: the checkpoint cannot be written.
    """
    from torch.distributed import checkpoint as dcp  # type: ignore[import-not-found]

    target = folder / str(step)
    if ranks.broadcast((target / ABOUT_FILE).exists()):
        return Saving(step, target, None)
    staged = folder / ranks.broadcast(f".{step}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        if ranks.first:
            make_directory(folder)
            make_directory(staged)
    except OSError as error:
        raise SiteError(f"{target}: the checkpoint cannot be written: {error}") from error
    ranks.barrier()
    tensors = optimizer.tensors() | {f"random.{ranks.rank}.{n}": t for n, t in _random(ranks).items()}
    writer = dcp.HuggingFaceStorageWriter(str(staged), _files(tensors, ranks), save_distributed=True)
    copy = writer.stage(tensors)
    about = {"step": step, "updates": optimizer.updates, "ranks": _kind(ranks), "shapes": _shapes(optimizer)}

    def write() -> None:
        try:
            dcp.save(copy, storage_writer=writer, process_group=ranks.background, no_dist=ranks.count == 1)
            if ranks.first:  # on rank 0, save returns once all ranks have written
                write_json(staged / ABOUT_FILE, about)
                _settle(staged, target)
        finally:
            if ranks.first:
                remove_tree(staged, ignore_errors=True)

    executor = ThreadPoolExecutor(1, "checkpoint")
    writing = executor.submit(write)
    executor.shutdown(wait=False)
    return Saving(step, target, writing)


def restore(checkpoint: Path, optimizer: Optimizer, ranks: ProcessGroup) -> int:
    """Loads a checkpoint into the policy, the optimizer and the random generators. Returns the checkpoint's step.

    Args:
        checkpoint: the directory ``checkpoints/<step>``, written by any number of ranks. If this number has changed,
            random generators are seeded from the step. This package's own computations do not use them.
        optimizer: the optimizer and its policy.
        ranks: all ranks.

    Raises:
        ConfigError: the checkpoint is incomplete, or belongs to another model.
    """
    from torch.distributed import checkpoint as dcp

    try:
        about = json.loads(read_regular(checkpoint / ABOUT_FILE))
        step, shapes = int(about["step"]), about["shapes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{checkpoint}: the checkpoint is incomplete ({error}); remove it, and continue from the previous one"
        ) from None
    ours = _shapes(optimizer)
    names = sorted(ours.keys() | shapes.keys())
    different = [name for name in names if ours.get(name) != shapes.get(name)]
    if different:
        first = different[0]
        raise ConfigError(
            f"{checkpoint}: belongs to another model: {first} has the shape {shapes.get(first)} there and "
            f"{ours.get(first)} in {optimizer.policy.source} ({len(different)} differ); train it in a separate run"
        )
    tensors, random = optimizer.tensors(), _random(ranks)
    if about["ranks"] == _kind(ranks):
        tensors |= {f"random.{ranks.rank}.{name}": state for name, state in random.items()}
    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=ranks.count == 1)
    except (OSError, CheckpointException) as error:
        raise ConfigError(
            f"{checkpoint}: is damaged ({_first(error)}); remove it, and continue from the previous one"
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
    """Removes all checkpoints except the ``keep`` newest and ``needed``. Also removes files that dead trainers left."""
    steps = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal())
    old = [step for step in steps[:-keep] if needed is None or str(step) != needed.name]
    _remove(folder, old)
    return old


def discard(folder: Path, after: int) -> None:
    """Removes the checkpoints of steps after ``after``. These steps are not committed, so they may still change."""
    _remove(folder, [int(path.name) for path in folder.glob("[0-9]*") if int(path.name) > after])


def _remove(folder: Path, steps: list[int]) -> None:
    for step in steps:
        hidden = folder / f".{step}.removing.{secrets.token_hex(4)}"
        os.rename(folder / str(step), hidden)  # rename first, so that the removal is atomic
    for path in folder.glob(".[0-9]*"):
        remove_tree(path, ignore_errors=True)


def export(folder: Path, policy: PolicyModel, ranks: ProcessGroup) -> dict[str, Checksum]:
    """Writes the engine's files to the new directory ``folder``. All ranks must call it.

    Tensors have the base model's dtype, and the names and order that transformers uses. Each rank writes its share of
    the layers and holds only this share in host memory. ``config.json`` is copied from the base model, whose tokenizer
    is added on publishing. With LoRA, the result is peft's adapter directory, written by the first rank.

    Returns:
        Checksums of the files if several ranks wrote them, so that no rank has to read files written on another node.

    Raises:
        SiteError: a rank cannot write its files, for example because the disk is full.
    """
    source = dict(policy.trained()) if policy.adapter else policy.shares(policy.state_dict(keep_vars=True))
    named = [(name.removeprefix("causal."), parameter) for name, parameter in source.items()]
    writers = _writers(named, 1 if policy.adapter else ranks.count)
    kept: dict[int, Any] = {}
    tensors = {}
    for name, parameter in named:  # all ranks gather each tensor, and only its writer keeps it
        if id(parameter) not in kept:
            whole = parameter.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            mine = writers[id(parameter)] == ranks.rank
            kept[id(parameter)] = whole.to("cpu", policy.stored, copy=True) if mine else None
        if kept[id(parameter)] is not None:
            tensors[name] = kept[id(parameter)]
    part = folder / f".rank-{ranks.rank}"

    def write() -> dict[str, dict[str, Tensor]]:
        if not tensors:
            return {}
        make_directory(part)
        if policy.adapter:
            named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
            policy.adapter.save_pretrained(part, state_dict=named, save_embedding_layers=False)
        else:
            # By default, transformers writes only on rank 0, where it gathers all tensors.
            policy.causal.should_save_on_this_rank = lambda is_main_process: is_main_process
            policy.causal.save_pretrained(part, state_dict=tensors, max_shard_size="5GB")
        return {path.name: read_header(path) for path in sorted(part.glob("*.safetensors"))}

    def settle() -> dict[str, Checksum]:
        names = {key: f"model-{n:05d}-of-{len(shares):05d}.safetensors" for n, key in enumerate(shares, 1)}
        if len(shares) == 1:
            names = {key: key[1] for key in shares}
        own = [folder / name for (rank, _), name in names.items() if rank == ranks.rank]
        others = []
        for (rank, name), target in names.items():
            if rank == ranks.rank:
                os.rename(part / name, folder / target)
        if ranks.first and policy.adapter:
            others = [folder / "adapter_config.json"]
            os.rename(part / "adapter_config.json", others[0])
        elif ranks.first:
            others = [folder / "config.json"]
            shutil.copyfile(policy.source / "config.json", others[0])
            if len(shares) > 1:
                _write_index(folder, {names[key]: share for key, share in shares.items()})
        remove_tree(part)
        for path in [*own, *others]:
            path.chmod(file_mode(folder.parent))
        if ranks.count == 1 or policy.adapter:
            return {}
        for path in own:
            fsync(path)
        return {path.name: checksum(path) for path in own}

    if ranks.first:
        make_directory(folder)
    ranks.barrier()
    written = _on_all(ranks, folder, write)
    shares = {(rank, name): share for rank, files in enumerate(written) for name, share in files.items()}
    sums: dict[str, Checksum] = {}
    for part_sums in _on_all(ranks, folder, settle):
        sums |= part_sums
    return sums


def _writers(named: list[tuple[str, Any]], ranks: int) -> dict[int, int]:
    """Assigns each parameter, by its id, to the rank that writes it.

    Each rank gets whole layers, because transformers may join or split a layer's tensors. The ranks' shares differ by
    at most one layer.
    """
    layers: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for name, parameter in named:
        if id(parameter) not in layers:
            layer = _LAYER.match(name)
            key = layers[id(parameter)] = layer[0] if layer else name
            sizes[key] = sizes.get(key, 0) + parameter.numel()
    total, filled = sum(sizes.values()), 0
    ranks_of: dict[str, int] = {}
    for key, size in sizes.items():
        ranks_of[key] = (2 * filled + size) * ranks // (2 * total)  # where the middle of the layer falls
        filled += size
    return {parameter: ranks_of[key] for parameter, key in layers.items()}


def _write_index(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Writes the index file, which names the file of each tensor."""
    tensors = [tensor for share in files.values() for tensor in share.values()]
    size = sum(math.prod(tensor.shape) * BITS[tensor.dtype] // 8 for tensor in tensors)
    names = {name: file for file, share in files.items() for name in share}
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": names})


def _on_all(ranks: ProcessGroup, folder: Path, work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on this rank and returns the results of all ranks. If one rank cannot write, all ranks raise
    SiteError."""
    from safetensors import SafetensorError  # type: ignore[import-not-found]

    result, error = None, ""
    try:
        result = work()
    except (OSError, SafetensorError) as failure:
        error = f"rank {ranks.rank}: {failure}"
    results = ranks.gather((result, error))
    if failed := [error for _, error in results if error]:
        raise SiteError(f"{folder}: the weights cannot be written: {failed[0]}")
    return [result for result, _ in results]


def _shapes(optimizer: Optimizer) -> dict[str, list[int]]:
    """Returns the unsharded shapes of the trained parameters by name."""
    return {name: list(share.shape) for name, share in optimizer.policy.shares(optimizer.masters).items()}


def _first(error: BaseException) -> BaseException:
    """Returns the first failed rank's error from an error of torch's distributed checkpoint module. Returns other
    errors unchanged."""
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
    """Assigns each tensor a file number, from 1. The result is the same on every rank."""
    filled, numbers = 0, {}
    for name, tensor in tensors.items():
        if not name.startswith("random."):
            filled += tensor.numel() * tensor.element_size()
            numbers[name] = 1 + filled // MAX_FILE_BYTES
    last = max(numbers.values())
    return numbers | {f"random.{rank}.{name}": last for rank in range(ranks.count) for name in ("cpu", "device")}


def _settle(staged: Path, target: Path) -> None:
    """Fsyncs the files and publishes them with one rename. If two processes race, either may win, because both write
    the same state."""
    fsync_tree(staged)
    try:
        os.rename(staged, target)
    except OSError:
        if not (target / ABOUT_FILE).exists():
            raise
    fsync(target.parent)
