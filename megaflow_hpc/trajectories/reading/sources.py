"""Reads rows and columns from a ``trajectories.h5`` or from the journals of a run.

A source identifies rows by number. Columns are read whole on first use and cached. Ragged data is read row by row, or
for many rows together with :meth:`Source.flat`. Opening a source reads nothing, so a campaign of a million rollouts
opens as fast as one of ten.

Journals yield the same rows as the file gathered from them. Since they have no columns, the first request for a column
decodes all rows once, and keeps the small columns of rows, sequences and turns. Tokens and messages are read again on
demand.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.rewards import given_rewards
from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.hdf5.columns import Array, Integers, offset_end, read, read_column, read_slices, text
from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.hdf5.schema import (
    COLUMNS,
    OFFSETS,
    STRING,
    TEXT,
    UNKNOWN_AS_NAN,
    escape,
    message_json,
    reward_name,
)
from megaflow_hpc.trajectories.hdf5.writer import ColumnLists
from megaflow_hpc.trajectories.journal.checks import check_images
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry
from megaflow_hpc.trajectory import Attempt, Image, ImageSpan, TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Artifact

RecordT = TypeVar("RecordT", Turn, Attempt)
TOKEN_COLUMNS = tuple(f"tokens/{name}" for name in ("id", "logprob", "loss_mask", "weight_version"))

_MAX_WHOLE_ENTRIES = 1 << 16
"""Maximum length of a column that is read whole when a single entry is needed. Longer columns are read in windows."""


@dataclass(frozen=True)
class SequenceView:
    """A token sequence as numpy arrays of shape (T,), with one entry per token."""

    policy: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probability of each token. NaN for tokens that were not sampled."""
    loss_mask: NDArray[np.uint8]
    weight_versions: NDArray[np.int32]
    """Weight version that sampled each token. -1 for tokens that were not sampled."""
    experts: Array | None = None
    """Routed experts, uint8 or uint16 of shape (T, layers, experts per token), if the engine reported them. If all
    bytes of a token are 255, its experts are unknown."""
    images: tuple[ImageSpan, ...] = ()
    """The placeholder tokens of each image, sorted by their start. :meth:`Source.images` returns the images
    themselves."""


def experts_of(sequence: TokenSequence) -> Array | None:
    """Returns the experts of a sequence in the form of :attr:`SequenceView.experts`."""
    if not sequence.experts:
        return None
    shape = len(sequence.tokens), sequence.expert_layers, sequence.experts_per_token
    wide = len(sequence.experts) > math.prod(shape)
    return np.frombuffer(sequence.experts, np.uint16 if wide else np.uint8).reshape(shape)


class Flat(NamedTuple):
    """The concatenated token sequences of several rows, in the requested order: S sequences with T tokens in total."""

    row: Integers
    """Row number of each sequence, shape (S,)."""
    policy: Array
    """Policy of each sequence, as an object array of ``str``, shape (S,)."""
    offsets: Integers
    """Offsets of the sequences in the token columns, shape (S+1,)."""
    tokens: NDArray[np.int32]
    """Token ids, shape (T,). The next three arrays have the same shape."""
    logprobs: NDArray[np.float32]
    """Log-probabilities, shape (T,). NaN for tokens that were not sampled."""
    loss_mask: NDArray[np.uint8]
    weight_versions: NDArray[np.int32]


class Source(Protocol):
    """Interface of a source of trajectories. Rows are numbered 0 to ``len - 1``, in commit order."""

    def __len__(self) -> int: ...
    def column(self, path: str) -> Array:
        """Returns a column by its path. Text is returned as ``S`` bytes or objects. The caller must not modify the
        array.

        A column ``rewards/<name>`` has NaN for rows without that reward.
        """

    def reward_names(self) -> list[str]:
        """Returns the sorted names of all rewards that any row has."""

    def flat(self, rows: Integers) -> Flat:
        """Returns the concatenated token sequences of many rows, in the order of ``rows``."""

    def ids(self) -> list[str]:
        """Returns the rollout ids of all rows."""

    def scalar(self, name: str, row: int) -> Any:
        """Returns one value of ``/trajectories/<name>``, without reading the whole column if it is long."""

    def rewards(self, row: int) -> dict[str, float]:
        """Returns the rewards of a row by name."""

    def messages(self, row: int) -> list[dict[str, Any]]:
        """Returns all messages of a row, in OpenAI form. They form a tree; see
        :class:`~megaflow_hpc.trajectory.Trajectory`."""

    def parents(self, row: int) -> list[int]:
        """Returns the index of each message's predecessor in the row. -1 if the message starts a conversation."""

    def sequences(self, row: int) -> list[SequenceView]:
        """Returns the token sequences of one row."""

    def turns(self, row: int) -> list[Turn]:
        """Returns the model calls of one row in order. Their sequence numbers are relative to the row."""

    def attempts(self, row: int) -> list[Attempt]:
        """Returns all attempts at the rollout, including failed ones."""

    def artifacts(self, row: int) -> list[Artifact]:
        """Returns the artifacts of a rollout."""

    def images(self, row: int, with_data: bool = True) -> dict[str, Image]:
        """Returns the images of a row by their SHA-256. ``with_data=False`` may leave out their bytes."""

    def image_bytes(self) -> Integers:
        """Returns the approximate size in bytes of the images of each row. Reads no image."""

    def close(self) -> None:
        """Closes the source's files. No data can be read afterwards."""


class ClosedSource:
    """Replaces a source that was closed. Every use raises ConfigError."""

    path: Path

    def close(self) -> None:
        """Does nothing."""

    def _refuse(self, *_: object) -> Any:
        raise ConfigError(f"{self.path}: its store is closed; read rows and columns before that, in the with block")

    __len__ = __getattr__ = _refuse


def _become_closed(source: Any, path: Path) -> None:
    """Closes a source in place, so that rows that still refer to it raise an error."""
    source.__class__, source.__dict__ = ClosedSource, {"path": path}


def offsets_of(lengths: Sequence[int] | Array) -> Integers:
    """Returns the offsets of n contiguous items with the given lengths, shape (n+1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def items_of(offsets: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Returns the item indices of the given rows, row by row, and the number of items per row.

    Args:
        offsets: Shape (N+1,). Row i has the items ``[offsets[i], offsets[i+1])``.
        rows: Row numbers, shape (n,).
    """
    counts = offsets[rows + 1] - offsets[rows]
    position_in_row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(offsets[rows], counts) + position_in_row, counts


class Hdf5Source:
    """Reads a ``trajectories.h5``. Published files never change.

    Raises:
        ConfigError: ``path`` is not a campaign file.
    """

    def __init__(self, path: Path) -> None:
        self.file = open_file(path)
        self.path = path
        self._columns: dict[str, Array] = {}
        self._windows: dict[str, tuple[int, Array]] = {}
        self._datasets: dict[str, h5py.Dataset] = {}
        self._length: int | None = None

    def close(self) -> None:
        self.file.close()
        _become_closed(self, self.path)

    def __len__(self) -> int:
        if self._length is None:  # needed for every row, and each lookup takes hundreds of microseconds
            self._length = len(self.file["trajectories/id"])
        return self._length

    # --- columns ---

    def column(self, path: str) -> Array:
        if path not in self._columns:
            self._columns[path] = self._read(path, 0, None)
        return self._columns[path]

    def reward_names(self) -> list[str]:
        return sorted(self.file.get("rewards", ()))

    def ids(self) -> list[str]:
        return list(text(self.column("trajectories/id")))

    def scalar(self, name: str, row: int) -> Any:
        value = self._slice(f"trajectories/{name}", row, row + 1)[0]
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return value if isinstance(value, str) else value.item()

    def rewards(self, row: int) -> dict[str, float]:
        rewards = {}
        for name in self.reward_names():
            value = float(self._slice(f"rewards/{name}", row, row + 1)[0])
            if not math.isnan(value):
                rewards[name] = value
        return rewards

    def _read(self, path: str, start: int, end: int | None) -> Array:
        if path.startswith("rewards/"):
            return read(self._dataset(path), start, end)
        values = read_column(self.file, path, start, end)
        if path in OFFSETS or path == "sequences/trajectory":
            self._require_order(path, values)
        return values

    def _dataset(self, path: str) -> h5py.Dataset:
        """Returns a dataset. Caches it, because opening a dataset takes as long as reading a short slice of it."""
        if path not in self._datasets:
            self._datasets[path] = self.file[path]
        return self._datasets[path]

    def _require_order(self, path: str, values: Array) -> None:
        """Checks that offsets ascend within the length of their target, so that no entry is read twice.

        Raises:
            ConfigError: The offsets are invalid.
        """
        if not len(values):
            return
        is_offset = path in OFFSETS
        end = offset_end(path, len(self._dataset(OFFSETS[path]))) if is_offset else len(self) - 1
        if values[0] < 0 or values[-1] > end or (np.diff(values) < 0).any():
            raise ConfigError(f"{self.path}: /{path}: leads out of its column; run: megaflow-hpc validate {self.path}")

    def _slice(self, path: str, start: int, end: int) -> Array:
        """Returns a slice of a column.

        Short columns are read whole. For a long column, the last window read is cached, because rows are mostly read in
        order and HDF5 inflates whole chunks.
        """
        if path in self._columns:
            return self._columns[path][start:end]
        first, window = self._windows.get(path, (0, np.empty(0)))
        if not first <= start <= end <= first + len(window):
            if len(self._dataset(path)) <= _MAX_WHOLE_ENTRIES:
                return self.column(path)[start:end]
            first = start - start % 1024
            window = self._read(path, first, max(end, first + 4096))
            self._windows[path] = first, window
        return window[start - first : end - first]

    def _span(self, path: str, item: int) -> tuple[int, int]:
        start, end = self._slice(path, item, item + 2).tolist()
        return start, end

    # --- ragged data ---

    def flat(self, rows: Integers) -> Flat:
        sequences, counts = items_of(self.column("trajectories/sequence_offset"), rows)
        bounds = self.column("sequences/token_offset")
        starts, ends = bounds[sequences], bounds[sequences + 1]
        columns = [read_slices(self._dataset(path), starts, ends) for path in TOKEN_COLUMNS]
        policies = text(self.column("sequences/policy")[sequences])
        return Flat(np.repeat(rows, counts), policies, offsets_of(ends - starts), *columns)

    def sequences(self, row: int) -> list[SequenceView]:
        start, end = self._span("trajectories/sequence_offset", row)
        if start == end:
            return []
        offsets = self._slice("sequences/token_offset", start, end + 1)
        policies = text(self._slice("sequences/policy", start, end))
        columns = [read(self._dataset(path), offsets[0], offsets[-1]) for path in TOKEN_COLUMNS]
        views = []
        for number, (first, last) in enumerate(pairwise((offsets - offsets[0]).tolist())):
            own: list[Any] = [column[first:last] for column in columns]
            own.append(self._experts(start + number, last - first))
            own.append(self._spans(row, start + number, int(offsets[number]), int(offsets[number + 1])))
            views.append(SequenceView(policies[number], *own))
        return views

    def _spans(self, row: int, sequence: int, first_token: int, last_token: int) -> tuple[ImageSpan, ...]:
        start, end = self._span("sequences/image_offset", sequence)
        if start == end:
            return ()
        columns = [self._slice(f"image_spans/{name}", start, end).tolist() for name in ("start", "length", "image")]
        uses = set(self._slice("image_uses/image", *self._span("trajectories/image_offset", row)).tolist())
        spans, before = [], first_token
        for first, length, image in zip(*columns, strict=True):
            if image not in uses:
                raise self._invalid(row, f"a sequence shows image {image}, which is not one of its trajectory's")
            if not before <= first < first + length <= last_token:
                raise self._invalid(row, f"an image at tokens {first} to {first + length}, outside its sequence")
            spans.append(ImageSpan(first - first_token, length, self._digest(row, image)))
            before = first + length
        return tuple(spans)

    def images(self, row: int, with_data: bool = True) -> dict[str, Image]:
        images = {}
        for number in self._slice("image_uses/image", *self._span("trajectories/image_offset", row)).tolist():
            digest = self._digest(row, number)
            media_type = str(text(self._slice("images/media_type", number, number + 1))[0])
            sizes = (self._slice(f"images/{name}", number, number + 1)[0] for name in ("width", "height"))
            width, height = map(int, sizes)
            bounds = self._span("images/offset", number) if with_data else (0, 0)
            data = read(self._dataset("images/bytes"), *bounds).tobytes()
            images[digest] = Image(digest, media_type, width, height, data)
        try:
            check_images(images, with_data)
        except ValueError as error:
            raise self._invalid(row, str(error)) from None
        return images

    def image_bytes(self) -> Integers:
        used, sizes = self.column("image_uses/image"), np.diff(self.column("images/offset"))
        if ((used < 0) | (used >= len(sizes))).any():
            raise ConfigError(f"{self.path}: /image_uses/image: an image that the file lacks; the file is damaged")
        return np.diff(offsets_of(sizes[used])[self.column("trajectories/image_offset")])

    def _digest(self, row: int, image: int) -> str:
        if not 0 <= image < len(self._dataset("images/sha256")):
            raise self._invalid(row, f"image {image}, which the file lacks")
        digest = str(text(self._slice("images/sha256", image, image + 1))[0])
        if not re.fullmatch("[0-9a-f]{64}", digest):  # readers use the digest as a file name
            raise self._invalid(row, f"image {image} is named {digest[:80]!r}, expected a SHA-256")
        return digest

    def _experts(self, sequence: int, tokens: int) -> Array | None:
        start, end = self._span("sequences/expert_offset", sequence)
        if start == end:
            return None
        layers, per_token = (
            int(self._slice(f"sequences/{name}", sequence, sequence + 1)[0])
            for name in ("expert_layers", "experts_per_token")
        )
        values = read(self._dataset("experts/bytes"), start, end)
        entries = tokens * layers * per_token
        if len(values) not in (entries, 2 * entries):
            fault = f"sequence {sequence} has {len(values)} bytes of experts, expected {entries} or twice as many"
            raise ConfigError(f"{self.path}: {fault}; the file is damaged")
        return values.view(np.uint16 if len(values) > entries else np.uint8).reshape(tokens, layers, per_token)

    def messages(self, row: int) -> list[dict[str, Any]]:
        start, end = self._span("trajectories/message_offset", row)
        if end == start:
            return []
        offsets = self._slice("messages/offset", start, end + 1).tolist()
        base = offsets[0]
        data = read(self._dataset("messages/json"), base, offsets[-1]).tobytes()
        try:
            return [parse_object(data[first - base : last - base]) for first, last in pairwise(offsets)]
        except ValueError as error:
            raise ConfigError(f"{self.path}: row {row}: a message is {error}; the file is damaged") from None

    def parents(self, row: int) -> list[int]:
        start, end = self._span("trajectories/message_offset", row)
        parents: list[int] = self._slice("messages/parent", start, end).tolist()
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise self._invalid(row, "a message follows one that comes later")
        return parents

    def turns(self, row: int) -> list[Turn]:
        start, end = self._span("trajectories/turn_offset", row)
        first_sequence, last_sequence = self._span("trajectories/sequence_offset", row)
        first_message, last_message = self._span("trajectories/message_offset", row)
        token_starts = self._slice("sequences/token_offset", first_sequence, last_sequence).tolist()
        turns = [Turn(**values) for values in self._records("turns", start, end)]
        answers: set[int] = set()
        for number, turn in enumerate(turns):
            is_new = turn.message == -1 or turn.message not in answers
            answers.add(turn.message)
            if not (is_new and -1 <= turn.message < last_message - first_message and -1 <= turn.started_by < number):
                links = f"message {turn.message} and call {turn.started_by}"
                raise self._invalid(row, f"call {number} names {links}, which are out of range")
            if turn.sequence < 0:
                continue
            if not first_sequence <= turn.sequence < last_sequence:
                expected = f"expected {first_sequence} to {last_sequence - 1}"
                raise self._invalid(row, f"a call in sequence {turn.sequence}, {expected}")
            turn.sequence -= first_sequence
            turn.token_start -= token_starts[turn.sequence]
            turn.token_end -= token_starts[turn.sequence]
        return turns

    def attempts(self, row: int) -> list[Attempt]:
        start, end = self._span("trajectories/attempt_offset", row)
        return [Attempt(**values) for values in self._records("attempts", start, end)]

    def artifacts(self, row: int) -> list[Artifact]:
        start, end = np.searchsorted(self.column("artifacts/trajectory"), [row, row + 1]).tolist()
        if start == end:
            return []
        offsets = self._slice("artifacts/offset", start, end + 1).tolist()
        names = text(self._slice("artifacts/name", start, end))
        dataset = self._dataset("artifacts/bytes")
        artifacts = []
        for name, (first, last) in zip(names, pairwise(offsets), strict=True):
            artifacts.append(Artifact(name, read(dataset, first, last).tobytes()))
        return artifacts

    def _records(self, group: str, start: int, end: int) -> list[dict[str, Any]]:
        """Returns items ``[start, end)`` of a group as dicts of Python values."""
        if start == end:
            return []
        columns: dict[str, list[Any]] = {}
        for column in COLUMNS.values():
            if column.group == group:
                values = self._slice(column.path, start, end)
                columns[column.name] = (text(values) if values.dtype.kind in "SO" else values).tolist()
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _invalid(self, row: int, fault: str) -> ConfigError:
        return ConfigError(f"{self.path}: row {row}: {fault}; run: megaflow-hpc validate {self.path}")


# --- journals ---------------------------------------------------------------------------------------------------------

_CACHED = 8
"""Number of decoded trajectories to cache. The parts of a row are usually read together."""
_JOURNAL_COLUMNS = (
    *(column.path for column in COLUMNS.values() if column.group in ("trajectories", "sequences", "turns")),
    *(f"attempts/{name}" for name in ("job_id", "started_at", "finished_at")),
)
"""Columns that a :class:`JournalSource` provides, in addition to the rewards."""


class JournalSource:
    """Reads the winning records of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._cache: OrderedDict[RecordEntry, Trajectory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index.winners)

    def close(self) -> None:
        _become_closed(self, self._index.root)

    def ids(self) -> list[str]:
        return [escape(entry.id) for entry in self._index.winners]

    def scalar(self, name: str, row: int) -> Any:
        value = getattr(self._load(row), name)
        if name in UNKNOWN_AS_NAN:
            return float("nan") if value is None else float(np.float32(value))
        return escape(value) if isinstance(value, str) else value

    def rewards(self, row: int) -> dict[str, float]:
        rewards = {}
        for name, value in self._load(row).rewards.items():
            if not math.isnan(value):
                rewards[reward_name(name)] = float(np.float32(value))
        return dict(sorted(rewards.items()))

    def messages(self, row: int) -> list[dict[str, Any]]:
        return [json.loads(message_json(message)) for message in self._load(row).messages]

    def parents(self, row: int) -> list[int]:
        return list(self._load(row).parents)

    def sequences(self, row: int) -> list[SequenceView]:
        views = []
        for s in self._load(row).sequences:
            columns: list[Any] = [*map(np.array, (s.tokens, s.logprobs, s.loss_mask, s.weight_versions))]
            columns += [experts_of(s), tuple(s.images)]
            views.append(SequenceView(escape(s.policy), *columns))
        return views

    def turns(self, row: int) -> list[Turn]:
        turns = [_as_stored(turn, "turns") for turn in self._load(row).turns]
        for turn in turns:
            if turn.sequence < 0:
                turn.sequence, turn.token_start, turn.token_end = -1, 0, 0
        return turns

    def attempts(self, row: int) -> list[Attempt]:
        return [_as_stored(attempt, "attempts") for attempt in self._load(row).attempts]

    def artifacts(self, row: int) -> list[Artifact]:
        return [Artifact(escape(artifact.name), artifact.data) for artifact in self._load(row).artifacts]

    def images(self, row: int, with_data: bool = True) -> dict[str, Image]:
        return dict(self._load(row).images)

    def image_bytes(self) -> Integers:  # if a record has images, they make up most of it
        counts = np.diff(self.column("trajectories/image_offset"))
        return np.where(counts > 0, [entry.size for entry in self._index.winners], 0).astype(np.int64)

    def column(self, path: str) -> Array:
        if path not in self._columns:
            raise KeyError(f"{path}: no column of rows")
        return self._columns[path]

    def reward_names(self) -> list[str]:
        return sorted(path.partition("/")[2] for path in self._columns if path.startswith("rewards/"))

    def flat(self, rows: Integers) -> Flat:
        owners: list[int] = []
        views: list[SequenceView] = []
        for row in rows.tolist():
            own = self.sequences(row)
            owners += [row] * len(own)
            views += own

        def joined(name: str, dtype: Any) -> Array:
            return np.concatenate([np.empty(0, dtype), *(getattr(view, name) for view in views)])

        return Flat(
            np.array(owners, np.int64),
            np.array([view.policy for view in views], object),
            offsets_of([len(view.tokens) for view in views]),
            joined("tokens", np.int32),
            joined("logprobs", np.float32),
            joined("loss_mask", np.uint8),
            joined("weight_versions", np.int32),
        )

    def _load(self, row: int) -> Trajectory:
        entry = self._index.winners[row]
        if entry not in self._cache:
            self._keep(entry, self._index.load(entry))
        return self._cache[entry]

    def _keep(self, entry: RecordEntry, trajectory: Trajectory) -> None:
        self._cache[entry] = trajectory
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)

    @cached_property
    def _columns(self) -> dict[str, Array]:
        lists = ColumnLists(_JOURNAL_COLUMNS)
        columns: dict[str, Array] = {}
        for row, trajectory in enumerate(self._index.trajectories()):
            self._keep(self._index.winners[row], trajectory)
            lists.add(trajectory)
            for name, reward in self.rewards(row).items():
                column = columns.setdefault(f"rewards/{name}", np.full(len(self), np.nan, np.float32))
                column[row] = reward
        for path, values in lists.values.items():
            first = [0] if COLUMNS[path].is_offset else []
            columns[path] = _array(COLUMNS[path].dtype, [*first, *values])
        return columns


def _as_stored(record: RecordT, group: str) -> RecordT:
    """Returns a copy of a turn or attempt with the values that a file stores."""
    values: dict[str, Any] = {}
    for column in COLUMNS.values():
        if column.group == group:
            value = getattr(record, column.name)
            if column.dtype == "float32":
                value = float(np.float32(value))
            values[column.name] = escape(value) if column.dtype in (STRING, TEXT) else value
    return replace(record, **values)


def _array(dtype: str, values: list[Any]) -> Array:
    if dtype not in (STRING, TEXT):
        return np.array(values, dtype)
    column = np.empty(len(values), object)
    column[:] = [escape(value) for value in values]
    return column


class WithGiven:
    """Adds the rewards in ``RUN/rewards`` to the rows of a source, as ``NAME`` and ``NAME.PART``.

    Reads them when a reward is first requested.

    Args:
        source: Source of the run's rows.
    """

    def __init__(self, source: Source, run: RunDir) -> None:
        self._source, self._run = source, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def rewards(self, row: int) -> dict[str, float]:
        """See :meth:`Source.rewards`."""
        given = self._given.get(str(self._source.scalar("id", row)), {})
        return {**given, **self._source.rewards(row)}

    def reward_names(self) -> list[str]:
        """See :meth:`Source.reward_names`."""
        return sorted({*self._source.reward_names(), *(name for own in self._given.values() for name in own)})

    def column(self, path: str) -> Array:
        """See :meth:`Source.column`."""
        name = path.removeprefix("rewards/")
        if name == path or name in self._source.reward_names():
            return self._source.column(path)
        ids = self._source.ids()
        return np.array([self._given.get(one, {}).get(name, np.nan) for one in ids], np.float32)

    @cached_property
    def _given(self) -> dict[str, dict[str, float]]:
        """Returns the added rewards by rollout id and name."""
        rewards: dict[str, dict[str, float]] = {}
        for name, lines in given_rewards(self._run).items():
            for rollout, given in lines.items():
                named = {reward_name(one): float(np.float32(value)) for one, value in given.named(name).items()}
                rewards.setdefault(rollout, {}).update(named)
        return rewards
