"""Splits a step into minibatches and micro-batches, and assigns the micro-batches to ranks.

A *minibatch* is the input of one optimizer step. A *micro-batch* is the input of one forward pass on one rank.
Sequences are concatenated and never split. All ranks compute the same packing from the plan, and each rank reads only
its own part. Every rank gets the same number of micro-batches, because with sharded parameters each pass is a
collective operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.training.plan import Columns, PlannedRollout
from megaflow_hpc.trajectories.reading.sources import experts_of
from megaflow_hpc.trajectory import Image, ImageSpan, TokenSequence

ShownImage = tuple[ImageSpan, Image]
"""An image in a sequence, with the span of placeholder tokens that it replaces in the model's input."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass: S concatenated sequences with T tokens in total. Tokens see only earlier tokens of
    their own sequence."""

    tokens: NDArray[np.int32]
    """Token ids, shape (T)."""
    positions: NDArray[np.int32]
    """Position of each token in its sequence, from 0, shape (T)."""
    offsets: NDArray[np.int64]
    """Start of each sequence, followed by T, shape (S+1)."""
    mask: NDArray[np.uint8]
    """1 for tokens to train on, 0 for the others, shape (T)."""
    logprobs: NDArray[np.float32]
    """The engine's log-probability of each token, shape (T). 0 where the mask is 0."""
    versions: NDArray[np.int32]
    """Index among the policy's versions of the weights that sampled each token, shape (T). -1 if not sampled."""
    advantages: NDArray[np.float32]
    """Advantage of each token, shape (T). 0 where the mask is 0."""
    weights: NDArray[np.float32]
    """Loss factor of each token, shape (T). 0 where the mask is 0."""
    sample: NDArray[np.int32]
    """Index of each sequence's rollout in the step, shape (S)."""
    sequence: NDArray[np.int32]
    """Index of each sequence among the policy's sequences of the same rollout, shape (S)."""
    group: NDArray[np.int32]
    """Index of each sequence's group in the step, shape (S)."""
    rollout_tokens: NDArray[np.int64]
    """Number of tokens to train on in the whole rollout of each sequence, shape (S)."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Extra values for each token by column name, of shape (T) each. See
    :mod:`megaflow_hpc.training.trainer.columns`."""
    experts: NDArray[np.int16] | None = None
    """Experts to which the engine routed each token, shape (T, layers, experts per token). -1 if unknown. ``None`` if
    no sequence has any."""
    images: tuple[tuple[ShownImage, ...], ...] = ()
    """Images in each of the S sequences, sorted by position. Empty if no sequence has any."""

    def __repr__(self) -> str:
        sequences = len(self.offsets) - 1
        return f"<MicroBatch: {len(self.tokens)} tokens in {sequences} sequences, {self.sampled} to train on>"

    @property
    def sampled(self) -> int:
        """Number of tokens to train on."""
        return int(self.mask.sum())

    def sequence_keys(self) -> list[tuple[int, int]]:
        """Returns (rollout, sequence) for each sequence, as a key that stays the same in every minibatch of the step.
        Tokens cannot serve as keys, because sequences with equal tokens may contain different images."""
        return list(zip(self.sample.tolist(), self.sequence.tolist(), strict=True))


class SequencePart(NamedTuple):
    """Identifies a sequence of a planned rollout."""

    rollout: int
    """Index of the rollout in the plan."""
    sequence: int
    """Index of the sequence among the policy's sequences of the rollout."""
    length: int


EQUAL_LENGTH = 12 * 4096
"""Sequence length at which causal attention costs as much as the rest of a layer. It is about 12 × the hidden size,
here for a model with 8 billion parameters. It only affects packing."""

Load = Callable[[int], list[TokenSequence]]
"""Function that takes a rollout's index in the plan and returns the policy's sequences."""
LoadImages = Callable[[int], Mapping[str, Image]]
"""Function that takes a rollout's index in the plan and returns its images by SHA-256."""
Ordinal = Callable[[int], int]
"""Function that converts a campaign-wide weight version to its index among the policy's versions."""


class Minibatch:
    """The input of one optimizer step on all ranks.

    Attributes:
        rollouts: indices of the rollouts in the plan.
        tokens: number of tokens to train on.
        samples: number of rollouts with tokens to train on.
        sequences: number of sequences with tokens to train on.
    """

    def __init__(
        self,
        planned: Sequence[PlannedRollout],
        rollouts: Sequence[int],
        groups: Sequence[int],
        load: Load,
        ordinal: Ordinal,
        rank: int = 0,
        ranks: int = 1,
        columns: Columns | None = None,
        images: LoadImages | None = None,
    ) -> None:
        self._columns, self._images = columns or {}, images
        self.rollouts = tuple(rollouts)
        self._planned, self._groups, self._load, self._ordinal = planned, groups, load, ordinal
        self._rank, self._ranks = rank, ranks
        chosen = [planned[index] for index in rollouts]
        counted = [sum(rollout.sampled) if rollout.weight else 0 for rollout in chosen]
        self.tokens, self.samples = sum(counted), sum(map(bool, counted))
        self.sequences = sum(sum(map(bool, rollout.sampled)) for rollout in chosen if rollout.weight)

    def __repr__(self) -> str:
        return f"<Minibatch: {len(self.rollouts)} rollouts, {self.tokens} tokens to train on>"

    def microbatches(self, tokens: int, skip_zero: bool = False) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches. Every rank gets the same number, so some may be empty.

        Args:
            tokens: maximum number of tokens in a micro-batch. A longer sequence gets a micro-batch of its own.
            skip_zero: omit sequences whose advantages are all 0. The minibatch's counts still include them.
        """
        bins = self._bins(tokens, skip_zero)
        rounds = -(-len(bins) // self._ranks)
        for number in range(rounds):
            mine = number * self._ranks + self._rank
            yield self._pack(bins[mine] if mine < len(bins) else [])

    def _bins(self, tokens: int, skip_zero: bool) -> list[list[SequencePart]]:
        """Packs sequences into micro-batches. Skips sequences without tokens to train on."""
        parts = [
            SequencePart(index, number, length)
            for index in self.rollouts
            if self._planned[index].weight
            for number, length in enumerate(self._planned[index].lengths)
            if self._planned[index].sampled[number] and (not skip_zero or _has_advantage(self._planned[index], number))
        ]
        parts.sort(key=lambda part: (-part.length, part.rollout, part.sequence))
        return _balanced(parts, tokens, self._ranks)

    def _pack(self, parts: Sequence[SequencePart]) -> MicroBatch:
        loaded = {index: self._load(index) for index in dict.fromkeys(part.rollout for part in parts)}
        sequences = [loaded[part.rollout][part.sequence] for part in parts]
        lengths = np.array([part.length for part in parts], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

        def column(name: str, dtype: type[np.generic]) -> NDArray:
            return _joined([np.frombuffer(getattr(sequence, name), dtype) for sequence in sequences], dtype)

        mask = column("loss_mask", np.uint8)
        weights = np.repeat(np.array([self._planned[p.rollout].weight for p in parts], np.float32), lengths)
        advantages = _joined(
            [token_advantages(self._planned[part.rollout], part.sequence, part.length) for part in parts], np.float32
        )
        return MicroBatch(
            tokens=column("tokens", np.int32),
            positions=(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)).astype(np.int32),
            offsets=offsets,
            mask=mask,
            logprobs=np.where(mask == 1, column("logprobs", np.float32), np.float32(0)),
            versions=ordinals_of(column("weight_versions", np.int32), self._ordinal),
            advantages=np.where(mask == 1, advantages, np.float32(0)),
            weights=np.where(mask == 1, weights, np.float32(0)),
            sample=np.array([part.rollout for part in parts], np.int32),
            sequence=np.array([part.sequence for part in parts], np.int32),
            group=np.array([self._groups[part.rollout] for part in parts], np.int32),
            rollout_tokens=np.array([sum(self._planned[part.rollout].sampled) for part in parts], np.int64),
            columns={
                name: _joined([values[part.rollout][part.sequence] for part in parts], np.float32)
                for name, values in self._columns.items()
            },
            experts=_experts(sequences),
            images=self._shown(parts, sequences),
        )

    def _shown(self, parts: Sequence[SequencePart], sequences: Sequence[TokenSequence]) -> tuple[Any, ...]:
        if self._images is None or not any(sequence.images for sequence in sequences):
            return ()
        return tuple(images_of_sequence(s, self._images(p.rollout)) for p, s in zip(parts, sequences, strict=True))


def images_of_sequence(sequence: TokenSequence, images: Mapping[str, Image]) -> tuple[ShownImage, ...]:
    """Returns the images in a sequence, each with the span of its placeholder tokens."""
    return tuple((span, images[span.image]) for span in sequence.images)


def ordinals_of(versions: NDArray[np.int32], ordinal: Ordinal) -> NDArray[np.int32]:
    """Converts campaign-wide weight versions (T) to indices among the policy's versions. Keeps -1 for tokens without a
    version."""
    distinct, inverse = np.unique(versions, return_inverse=True)
    converted = [ordinal(version) if version >= 0 else -1 for version in distinct.tolist()]
    return np.array(converted, np.int32)[inverse]


def _experts(sequences: Sequence[TokenSequence]) -> NDArray[np.int16] | None:
    parts = [experts_of(sequence) for sequence in sequences]
    shape = next((part.shape[1:] for part in parts if part is not None), None)
    if shape is None:
        return None
    joined = []
    for sequence, part in zip(sequences, parts, strict=True):
        known = np.full((len(sequence.tokens), *shape), -1, np.int16)
        if part is not None:
            known[:] = part
            known[(part == np.iinfo(part.dtype).max).all((1, 2))] = -1
        joined.append(known)
    return np.concatenate(joined)


def _has_advantage(rollout: PlannedRollout, sequence: int) -> bool:
    """Returns whether any token of a sequence has a non-zero advantage."""
    if rollout.turns:
        return any(a for turn, a in zip(rollout.turns, rollout.advantages, strict=True) if turn[0] == sequence)
    return bool(rollout.advantages[sequence] if rollout.advantages else rollout.advantage)


def token_advantages(rollout: PlannedRollout, sequence: int, length: int) -> NDArray[np.float32]:
    """Returns the advantage of each token of a sequence with ``length`` tokens.

    If turns have their own advantages, tokens outside all turns get 0.
    """
    if not rollout.advantages:
        return np.full(length, rollout.advantage, np.float32)
    if not rollout.turns:
        return np.full(length, rollout.advantages[sequence], np.float32)
    values = np.zeros(length, np.float32)
    for (number, start, end), advantage in zip(rollout.turns, rollout.advantages, strict=True):
        if number == sequence:
            values[start:end] = advantage
    return values


def _balanced(parts: Sequence[SequencePart], tokens: int, ranks: int) -> list[list[SequencePart]]:
    """Packs sequences, longest first, into bins of similar cost. Uses as few rounds of ``ranks`` bins as possible.

    All ranks compute a round together, so its duration depends on the most expensive bin. Each sequence is added to the
    cheapest bin with enough space. The result is sorted by decreasing cost, so that the bins of a round have similar
    costs.
    """
    count = len(_first_fit(parts, tokens))
    while True:
        count += -count % ranks
        bins: list[list[SequencePart]] = [[] for _ in range(count)]
        room, costs = [tokens] * count, [0] * count
        for part in parts:
            fits = (n for n in range(count) if room[n] >= part.length or not bins[n])
            chosen = min(fits, key=costs.__getitem__, default=None)
            if chosen is None:  # first-fit packs more tightly
                break
            bins[chosen].append(part)
            room[chosen] -= part.length
            costs[chosen] += part.length * (part.length + EQUAL_LENGTH)
        else:
            by_cost = sorted(range(count), key=lambda n: -costs[n])  # stable
            return [bins[n] for n in by_cost if bins[n]]
        count += 1


def rows_in_order(lengths: Iterable[int], tokens: int) -> Iterator[list[int]]:
    """Splits consecutive sequences into groups of at most ``tokens`` tokens for one forward pass. Yields the indices of
    each group."""
    row: list[int] = []
    room = tokens
    for index, length in enumerate(lengths):
        if row and length > room:
            yield row
            row, room = [], tokens
        row.append(index)
        room -= length
    if row:
        yield row


def _first_fit(parts: Sequence[SequencePart], tokens: int) -> list[int]:
    """Returns the number of free tokens in each bin after first-fit packing."""
    room: list[int] = []
    for part in parts:
        chosen = next((n for n, left in enumerate(room) if left >= part.length), None)
        if chosen is None:
            room.append(tokens - part.length)
        else:
            room[chosen] -= part.length
    return room


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray:
    """Concatenates arrays. Always returns a copy, so that the caller may modify it."""
    return np.concatenate([np.empty(0, dtype), *parts])


def split(groups: Sequence[int], size: int, random: np.random.Generator | None = None) -> list[list[int]]:
    """Splits the rollouts of a step into minibatches. Keeps the rollouts of a group together.

    Args:
        groups: index of each rollout's group.
        size: number of groups in a minibatch.
        random: random generator that shuffles the groups. If ``None``, groups keep the plan's order.

    Returns:
        The rollout indices of each minibatch.
    """
    by_group: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        by_group.setdefault(group, []).append(index)
    members = list(by_group.values())
    if random is not None:
        members = [members[n] for n in random.permutation(len(members))]
    minibatches = []
    for first in range(0, len(members), size):
        chosen = members[first : first + size]
        minibatches.append([index for group in chosen for index in group])
    return minibatches
