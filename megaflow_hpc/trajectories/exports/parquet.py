"""Exports to Parquet, with one row per trajectory, for pandas, Polars, DuckDB and Hugging Face datasets.

Scalar columns have the same names as in ``trajectories.h5``. ``rewards`` is a struct with one field per reward.
``sequences``, ``turns``, ``attempts`` and ``artifacts`` are lists of structs, with token columns as nested lists.
``messages`` (the main conversation), ``conversations`` and ``tree`` are JSON strings as in the JSON Lines export,
because messages have no fixed schema. ``images`` contains each image of a rollout once, as the bytes of its file.
Messages refer to it by ``sha256:<hex>``. ``image_spans`` lists the placeholder tokens of each image: the number of the
sequence, ``start``, ``length`` and ``image``. NaN is preserved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaflow_hpc.resources import imported
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, ROW_COLUMNS, STRING, TEXT
from megaflow_hpc.trajectories.reading.sources import Flat, SequenceView
from megaflow_hpc.trajectory import Image

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "Parquet, one row per trajectory, for pandas, Polars, DuckDB and Hugging Face datasets"

_JSON = ("messages", "conversations", "tree")


def pyarrow() -> Any:
    """Imports and returns pyarrow, with ``pyarrow.parquet`` loaded.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    imported("pyarrow.parquet")
    return imported("pyarrow")


def images_type(pa: Any) -> Any:
    """Returns the Arrow type of the column that :func:`images_in` fills."""
    return pa.list_(pa.struct({"start": pa.int64(), "length": pa.int64(), "bytes": pa.binary()}))


def images_in(sequence: SequenceView, images: Mapping[str, Image]) -> list[dict[str, Any]]:
    """Returns the images of a sequence in the order of their placeholders, each with the span of its placeholders.

    Args:
        images: The images of the rollout, by their SHA-256.
    """
    return [{"start": one.start, "length": one.length, "bytes": images[one.image].data} for one in sequence.images]


def write(job: ExportJob) -> list[Path]:
    """Writes ``trajectories.parquet``."""
    pa = pyarrow()
    path = job.directory / "trajectories.parquet"
    names = job.store.reward_names
    schema = _schema(pa, names)
    with published(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for numbers in job.groups():
            rows = list(job.store.rows(numbers))
            columns: dict[str, Any] = {}
            for column in ROW_COLUMNS:
                columns[column.name] = job.store.column(column.name)[numbers]
            if names:
                rewards = [pa.array(job.store.column(f"rewards/{name}")[numbers], pa.float32()) for name in names]
                columns["rewards"] = pa.StructArray.from_arrays(rewards, list(names))
            records = [row.conversation_record() for row in rows]
            for name in _JSON:
                columns[name] = [json.dumps(record.get(name)) for record in records]
            columns["sequences"] = sequences(pa, job.store.flat(numbers), numbers)
            columns["turn_list"] = [[asdict(turn) for turn in row.turns] for row in rows]
            columns["attempt_list"] = [[asdict(attempt) for attempt in row.attempts] for row in rows]
            columns["artifacts"] = [[asdict(artifact) for artifact in row.artifacts] for row in rows]
            columns["images"] = [[dict(vars(image)) for image in row.images.values()] for row in rows]
            columns["image_spans"] = [_spans(row) for row in rows]
            writer.write_table(pa.Table.from_pydict(columns, schema=schema))
    return [path]


def _spans(row: Row) -> list[dict[str, Any]]:
    numbered = enumerate(row.sequences)
    return [{"sequence": number, **span._asdict()} for number, one in numbered for span in one.images]


def sequences(pa: Any, flat: Flat, numbers: Any) -> Any:
    """Converts token sequences to a list of structs per row, without copying the flat columns.

    Args:
        pa: The ``pyarrow`` module.
        flat: The sequences of the rows.
        numbers: Unique row numbers of shape (n,), in the order of ``flat``.
    """
    token_offsets = pa.array(flat.offsets, pa.int32())

    def tokens(values: Any) -> Any:
        return pa.ListArray.from_arrays(token_offsets, pa.array(values))

    fields = {
        "policy": pa.array(flat.policy, pa.string()),
        "tokens": tokens(flat.tokens),
        "logprobs": tokens(flat.logprobs),
        "loss_mask": tokens(flat.loss_mask),
        "weight_versions": tokens(flat.weight_versions),
    }
    # Rows are unique and in the requested order, so the sequences of a row are adjacent.
    bounds = np.searchsorted(np.searchsorted(numbers, flat.row), np.arange(len(numbers) + 1))
    items = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), items)


def _schema(pa: Any, rewards: tuple[str, ...]) -> Any:
    text, integers, reals = pa.string(), pa.list_(pa.int32()), pa.list_(pa.float32())

    def columns(group: str) -> dict[str, Any]:
        named = {column.name: column.dtype for column in COLUMNS.values() if column.group == group}
        return {name: text if dtype in (STRING, TEXT) else getattr(pa, dtype)() for name, dtype in named.items()}

    sequence = {"policy": text, "tokens": integers, "logprobs": reals}
    sequence |= {"loss_mask": pa.list_(pa.uint8()), "weight_versions": integers}
    artifact = {"name": text, "data": pa.binary()}
    rows = columns("trajectories")
    fields = {column.name: rows[column.name] for column in ROW_COLUMNS}
    if rewards:
        fields["rewards"] = pa.struct(dict.fromkeys(rewards, pa.float32()))
    fields |= dict.fromkeys(_JSON, text)
    records = {
        "sequences": sequence,
        "turn_list": columns("turns"),
        "attempt_list": columns("attempts"),
        "artifacts": artifact,
    }
    size = {"width": pa.int32(), "height": pa.int32()}
    records["images"] = {"sha256": text, "media_type": text, **size, "data": pa.binary()}
    records["image_spans"] = {**dict.fromkeys(("sequence", "start", "length"), pa.int64()), "image": text}
    for name, record in records.items():
        fields[name] = pa.list_(pa.struct(record))
    return pa.schema(fields)
