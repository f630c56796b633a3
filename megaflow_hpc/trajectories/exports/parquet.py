"""Parquet: one row per trajectory, for pandas, Polars, DuckDB and Hugging Face datasets.

Scalar columns have the same names as in ``trajectories.h5``. ``rewards`` is a struct with one field per name.
``sequences``, ``turns``, ``attempts`` and ``artifacts`` are lists of structs, with token columns as nested lists.
``messages`` (the main conversation), ``conversations`` and ``tree`` are JSON text as in the JSON lines, because
messages have no common fields. NaN stays NaN.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, STRING, TEXT
from megaflow_hpc.trajectories.reading.sources import Flat

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.row import Row

HELP = "Parquet, one row per trajectory, for pandas, Polars, DuckDB and Hugging Face datasets"

_TOLD = ("messages", "conversations", "tree")
SCALARS = tuple(c for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n")


def pyarrow() -> Any:
    """Imports and returns pyarrow, with ``pyarrow.parquet``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("parquet: the package pyarrow is missing; pip install 'megaflow-hpc[export]'") from None
    return pyarrow


def write(job: ExportJob) -> list[Path]:
    """Writes ``trajectories.parquet``."""
    pa = pyarrow()
    path = job.directory / "trajectories.parquet"
    names = job.store.reward_names
    schema = _schema(pa, names)
    with published(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for numbers in job.groups():
            rows = list(job.store.rows(numbers))
            columns: dict[str, Any] = {c.name: job.store.column(c.name)[numbers] for c in SCALARS}
            if names:
                columns["rewards"] = pa.StructArray.from_arrays(
                    [pa.array(job.store.column(f"rewards/{name}")[numbers], pa.float32()) for name in names],
                    list(names),
                )
            told = [row.conversation_record() for row in rows]
            for name in _TOLD:
                columns[name] = [json.dumps(record.get(name)) for record in told]
            columns["sequences"] = sequences(pa, job.flat(numbers), numbers)
            for name in ("turn_list", "attempt_list", "artifacts"):
                columns[name] = [_records(row, name) for row in rows]
            arrays = [
                columns[field.name]
                if isinstance(columns[field.name], pa.Array)
                else pa.array(columns[field.name], field.type)
                for field in schema
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return [path]


def _records(row: Row, name: str) -> list[dict[str, Any]]:
    items: dict[str, list[Any]] = {"turn_list": row.turns, "attempt_list": row.attempts, "artifacts": row.artifacts}
    return [asdict(item) for item in items[name]]


def sequences(pa: Any, flat: Flat, numbers: Any) -> Any:
    """Returns the token sequences of rows as one list of structs per row, using the flat columns without a copy.

    Args:
        pa: The module pyarrow.
        flat: The sequences of the rows.
        numbers: (n), distinct row numbers in the order of ``flat``.
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
    # Rows are distinct and in the requested order, so the sequences of a row are adjacent.
    ends = np.searchsorted(np.searchsorted(numbers, flat.row), np.arange(len(numbers) + 1))
    items = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items)


def _schema(pa: Any, rewards: tuple[str, ...]) -> Any:
    def of(names: dict[str, Any]) -> Any:
        return pa.list_(pa.struct(list(names.items())))

    fields = [pa.field(c.name, pa.string() if c.dtype in (STRING, TEXT) else getattr(pa, c.dtype)()) for c in SCALARS]
    if rewards:
        fields.append(pa.field("rewards", pa.struct([(name, pa.float32()) for name in rewards])))
    fields += [pa.field(name, pa.string()) for name in _TOLD]
    integers, reals = pa.list_(pa.int32()), pa.list_(pa.float32())
    fields.append(
        pa.field(
            "sequences",
            of(
                {
                    "policy": pa.string(),
                    "tokens": integers,
                    "logprobs": reals,
                    "loss_mask": pa.list_(pa.uint8()),
                    "weight_versions": integers,
                }
            ),
        )
    )
    turn = {name: pa.int64() for name in ("sequence", "token_start", "token_end")}
    turn |= {"finish_reason": pa.string(), "policy": pa.string()}
    turn |= {name: pa.int64() for name in ("message", "started_by")}
    turn |= {name: pa.float32() for name in ("model_s", "sandbox_s", "agent_s", "wait_s")}
    fields.append(pa.field("turn_list", of({**turn, "server": pa.string()})))
    attempt = {"attempt": pa.int32()}
    attempt |= {name: pa.string() for name in ("status", "error_kind", "error", "node", "job_id")}
    attempt |= {name: pa.float64() for name in ("started_at", "finished_at")}
    fields.append(pa.field("attempt_list", of(attempt)))
    fields.append(pa.field("artifacts", of({"name": pa.string(), "data": pa.binary()})))
    return pa.schema(fields)
