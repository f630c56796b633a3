"""Computes *columns*: extra values for each token of a step, computed by user functions before the first update.

Examples are the log-probabilities under a frozen reference model, under an average of earlier weights, or under a
teacher. A loss reads them as ``batch.columns[NAME]``. The columns of a step are stored next to its plan
(:meth:`~megaflow_hpc.training.plan.TrainingFiles.claim_columns`). A repeated step reads the stored columns, so it needs
neither the earlier weights nor the teacher.

A function is called on every rank as ``function(sequences, models, **args)``. ``sequences`` is the rank's share of the
step's sequences (:class:`ColumnSequence`), in which the rollouts of a group are never divided among ranks. ``models``
(:class:`FrozenModels`) loads earlier weights. The function returns one float array (L) per sequence. Values for tokens
that were not sampled are ignored.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found]
from numpy.typing import NDArray

from megaflow_hpc.config.sections import Method
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.atomic import fsync_tree, make_directory
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.weight_source import base_of
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.methods import call, numbers, out_of_memory, wrong
from megaflow_hpc.training.microbatch import (
    ShownImage,
    images_of_sequence,
    ordinals_of,
    rows_in_order,
    token_advantages,
)
from megaflow_hpc.training.plan import BySequence, Columns
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup, load, row_of
from megaflow_hpc.training.trainer.vision import BadImage

KEPT_AVERAGES = 3
"""Number of recent weight averages to keep. The next average is computed from the newest one."""


@dataclass(frozen=True)
class ColumnSequence:
    """A sequence of L tokens from the rollouts of a step."""

    rollout: int
    """Index of the rollout in the step."""
    group: int
    """Index of the rollout's group in the step."""
    sequence: int
    """Index of the sequence among the policy's sequences in the rollout."""
    tokens: NDArray[np.int32]
    """Token ids, shape (L)."""
    mask: NDArray[np.uint8]
    """1 for tokens to train on, otherwise 0. Shape (L)."""
    logprobs: NDArray[np.float32]
    """The engine's log-probability of each token, shape (L). 0 where the mask is 0."""
    versions: NDArray[np.int32]
    """Index among the policy's versions of the weights that sampled each token, shape (L). -1 where the mask is 0."""
    advantages: NDArray[np.float32]
    """Advantage of each token, shape (L). 0 where the mask is 0."""
    images: Sequence[ShownImage] = ()
    """Images in the sequence, each with the span of its placeholder tokens."""


class UnusableRollout(MegaflowError):
    """Raised if rollouts cannot be trained on. They contain an image that cannot be decoded, or tokens of a version
    that is no longer stored. ``rollouts`` is the list of their indices in the step."""

    def __init__(self, rollouts: Iterable[int], cause: object) -> None:
        super().__init__(cause)
        self.rollouts = tuple(rollouts)


class OutOfMemory(MegaflowError):
    """Raised if a row of tokens does not fit into memory.

    Attributes:
        sequences: for each sequence in the row, the index of its rollout in the step.
        tokens: number of tokens in the row.
    """

    def __init__(self, sequences: list[int], tokens: int, cause: BaseException) -> None:
        super().__init__(str(cause).partition("\n")[0])
        self.sequences, self.tokens = sequences, tokens


class FrozenModels:
    """Loads earlier weights of a policy for column functions.

    The models are sharded, so all ranks must call each method the same number of times. A version is given by its index
    among the policy's versions.

    Attributes:
        base: model directory from which training started.
        newest: the version at the beginning of the step.
        versions: all versions that sampled tokens of the step, including tokens on other ranks.
    """

    def __init__(
        self, flow: Dataflow, policy: PolicyModel, ranks: ProcessGroup, step: Step, sampled: Mapping[int, set[int]]
    ) -> None:
        """Prepares the models for a step.

        Args:
            sampled: maps each version to the indices of this rank's rollouts in which it sampled a token.
        """
        self._flow, self._policy, self._ranks = flow, policy, ranks
        self.base, self.newest = policy.source, step.plan.version
        self._sampled: dict[int, set[int]] = {}
        for part in ranks.gather(sampled):
            for version, rollouts in part.items():
                self._sampled.setdefault(version, set()).update(rollouts)
        self.versions = tuple(sorted(self._sampled))

    def folder(self, version: int) -> Path:
        """Returns the model directory of a version. Version 0 is the base model.

        Raises:
            UnusableRollout: the version was removed, but it sampled tokens of the step.
            ConfigError: the version was removed, or consists of an adapter or a delta.
        """
        if version == 0:
            return self.base
        kept = {v.ordinal: v for v in versions(self._flow.run, self._flow.policy)}
        if version not in kept:
            cause = (
                f"{self._flow.run}: version {version} of {self._flow.policy} is no longer stored (there are "
                f"{', '.join(map(str, kept)) or 'none'})"
            )
            if rollouts := self._sampled.get(version):
                raise UnusableRollout(sorted(rollouts), cause)
            raise ConfigError(cause)
        folder = Path(kept[version].path)
        if kept[version].adapter or base_of(folder) is not None:
            raise ConfigError(f"{folder}: columns need whole versions; leave lora and publish_delta out")
        return folder

    def logprobs(self, folder: Path | None, sequences: Sequence[ColumnSequence]) -> list[NDArray[np.float32]]:
        """Returns the log-probability of each sampled token under a model, and 0 for other tokens.

        Args:
            folder: a model directory. ``None`` selects the policy before the step.
            sequences: sequences of this rank.

        Raises:
            OutOfMemory: a row does not fit into memory.
            UnusableRollout: a sequence contains an image that cannot be decoded.
        """
        settings = self._flow.settings
        model = (
            self._policy
            if folder is None
            else load(folder, settings.dtype, self._ranks, parallel=settings.parallel.model_dump())
        )
        model.temperature = self._flow.temperature
        if model.vision is not None and self._policy.vision is not None:
            model.vision.options = self._policy.vision.options
        rows = list(rows_in_order((len(s.tokens) for s in sequences), settings.microbatch))
        rounds = max(self._ranks.gather(len(rows)))
        logprobs_of: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for row in [*rows, *[[]] * (rounds - len(rows))]:
                chosen = [sequences[number] for number in row]
                try:
                    inputs = row_of([(s.tokens, s.mask.nonzero()[0], s.images) for s in chosen], model)
                except BadImage as error:
                    raise UnusableRollout([chosen[error.sequence].rollout], error) from None
                try:
                    values = model(*inputs)[0].float().cpu().numpy()
                except (MemoryError, RuntimeError) as error:
                    if out_of_memory(error):
                        tokens = sum(len(s.tokens) for s in chosen)
                        raise OutOfMemory([s.rollout for s in chosen], tokens, error) from None
                    raise
                cuts = np.cumsum([len(s.tokens) for s in chosen])[:-1]
                logprobs_of |= dict(zip(row, np.split(values, cuts), strict=False))
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [logprobs_of[number] for number in range(len(sequences))]

    def average(self, decay: float) -> Path:
        """Returns a model directory with the exponential moving average of all versions, in float32.

        The average after version n is ``decay`` × (the average after version n − 1) + (1 − ``decay``) × version n. The
        average after version 0 is the base model.
        """
        if self._ranks.first and self.newest:
            self._write_averages(decay)
        self._ranks.barrier()
        return self._average_folder(decay, self.newest) if self.newest else self.base

    def _average_folder(self, decay: float, version: int) -> Path:
        return self._flow.files.path / "averages" / f"{decay:g}-{version}"

    def _write_averages(self, decay: float) -> None:
        """Writes the missing averages up to the newest version. Starts from the last stored average."""
        folder = self._average_folder(decay, self.newest).parent
        make_directory(folder)
        for left in folder.glob(".[0-9]*"):
            remove_tree(left, ignore_errors=True)
        stored = {int(path.name.rpartition("-")[2]): path for path in folder.glob(f"{decay:g}-[0-9]*")}
        before = max((version for version in stored if version <= self.newest), default=0)
        mean = stored.get(before, self.base)
        for version in range(before + 1, self.newest + 1):
            staged = folder / f".{version}-{secrets.token_hex(4)}"
            _average(mean, self.folder(version), decay, staged)
            mean = self._average_folder(decay, version)
            staged.rename(mean)
            stored[version] = mean
        for version in sorted(stored)[:-KEPT_AVERAGES]:
            remove_tree(stored[version], ignore_errors=True)


def _average(mean: Path, version: Path, decay: float, target: Path) -> None:
    """Writes ``decay`` × ``mean`` + (1 − ``decay``) × ``version`` to ``target``, file by file."""
    from safetensors import safe_open  # type: ignore[import-not-found]
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

    make_directory(target)
    homes: dict[str, Path] = {}
    for path in sorted(mean.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            homes |= dict.fromkeys(file.keys(), path)
    for path in sorted(version.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            with safe_open(homes[name], "pt") as file:
                tensors[name] = file.get_tensor(name).float().mul(decay).add(tensor.float(), alpha=1 - decay)
        save_file(tensors, target / path.name, {"format": "pt"})
    for path in version.glob("*.json"):
        shutil.copyfile(path, target / path.name)
    fsync_tree(target)


def columns_of(
    flow: Dataflow, step: Step, methods: dict[str, Method], policy: PolicyModel, ranks: ProcessGroup
) -> Columns:
    """Returns the columns of a step: by name, the values for each sequence of each rollout. Computes them unless they
    are stored.

    If one rank raises an error, other ranks may be waiting for it. The failed rank must then end them with
    :meth:`ProcessGroup.end`.

    Raises:
        ConfigError: a function failed on this rank, or returned an invalid result.
        OutOfMemory: a row of this rank does not fit into memory.
        UnusableRollout: rollouts cannot be trained on.
    """
    if not methods:
        return {}
    if not ranks.broadcast(flow.files.columns_file(step.number).exists()):
        mine = list(sequences_of(flow, step))
        sampled: dict[int, set[int]] = {}
        for s in mine:
            for version in np.unique(s.versions[s.mask == 1]).tolist():
                sampled.setdefault(version, set()).add(s.rollout)
        models = FrozenModels(flow, policy, ranks, step, sampled)
        computed: dict[str, BySequence] = {}
        for name, method in methods.items():
            everywhere = ranks.gather(_call(method, mine, models))
            computed[name] = {key: value for part in everywhere for key, value in part.items()}
        if ranks.first:
            flow.files.claim_columns(step.plan, computed)
        ranks.barrier()
    stored = flow.files.columns(step.plan)
    if stored.keys() != methods.keys():
        raise ConfigError(
            f"{flow.files.columns_file(step.number)}: has the columns {', '.join(stored)}, expected "
            f"{', '.join(methods)}; remove the file, and they are computed again"
        )
    return stored


def sequences_of(flow: Dataflow, step: Step) -> Iterator[ColumnSequence]:
    """Yields this rank's sequences that have tokens to train on. Ranks that share rows get the same sequences."""
    copies = flow.settings.parallel.copies
    for index, rollout in enumerate(step.plan.rollouts):
        if not rollout.weight or step.groups[index] % max(flow.ranks // copies, 1) != flow.rank // copies:
            continue
        for number, sequence in enumerate(step.sequences(index)):
            mask = np.frombuffer(sequence.loss_mask, np.uint8)
            if not mask.any():
                continue
            versions = ordinals_of(np.frombuffer(sequence.weight_versions, np.int32), flow.ordinal)
            advantages = token_advantages(rollout, number, len(mask))
            yield ColumnSequence(
                rollout=index,
                group=step.groups[index],
                sequence=number,
                tokens=np.frombuffer(sequence.tokens, np.int32),
                mask=mask,
                logprobs=np.where(mask == 1, np.frombuffer(sequence.logprobs, np.float32), np.float32(0)),
                versions=np.where(mask == 1, versions, np.int32(-1)),
                advantages=np.where(mask == 1, advantages, np.float32(0)),
                images=images_of_sequence(sequence, step.images(index)),
            )


def _call(method: Method, sequences: Sequence[ColumnSequence], models: FrozenModels) -> BySequence:
    returned = call(method, sequences, models)
    if not isinstance(returned, list | tuple) or len(returned) != len(sequences):
        count = f" of {len(returned)}" if isinstance(returned, list | tuple) else ""
        raise wrong(method, f"returned {type(returned).__name__}{count}", f"a list of {len(sequences)} arrays")
    values = {}
    for s, value in zip(sequences, returned, strict=True):
        array = value
        with contextlib.suppress(Exception):  # if numpy cannot convert it, ``numbers`` reports the error
            array = np.asarray(value)
            if array.shape == s.mask.shape and array.dtype.kind == "f":
                array = np.where(s.mask == 1, array, array.dtype.type(0))
        what = f"the column of sequence {s.sequence} of rollout {s.rollout}"
        values[s.rollout, s.sequence] = numbers(method, array, [s.mask.shape], what)
    return values
