"""Exports to AReaL: Parquet with one row per token sequence and the keys that AReaL's rollout workflows return.

``input_ids`` int32, ``loss_mask`` int32, ``logprobs`` float32 (0.0 if not sampled), ``versions`` int32 (-1 if not
sampled), ``attention_mask`` bool and ``rewards`` float32 have the names of AReaL's tensors. :func:`tensors` pads rows
into the batch that AReaL's ``concat_padded_tensors`` would produce. ``images`` lists the sequence's images in the order
of their placeholders, each as ``{"start": …, "length": …, "bytes": …}``. A processor can compute AReaL's
``multi_modal_input`` from them. ``trajectory`` and ``group`` identify the row. In a team, select the sequences of one
role by ``role``, and read its reward from ``named_rewards``, which contains all rewards by name. (AReaL 1.0:
``areal/workflow/rlvr.py``, ``areal/infra/workflow_executor.py``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaflow_hpc.trajectories.exports.parquet import images_in, images_type, pyarrow
from megaflow_hpc.trajectories.hdf5.columns import Array
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.reading.batch import padded_lines

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "Parquet, one row per token sequence, with the keys of AReaL's rollout workflows"

COLUMNS: dict[str, tuple[Any, Any]] = {
    "input_ids": (np.int32, 0),
    "loss_mask": (np.int32, 0),
    "logprobs": (np.float32, 0.0),
    "versions": (np.int32, -1),
    "attention_mask": (np.bool_, False),
}
"""Dtype and padding value of each token column, by name."""


def write(job: ExportJob) -> list[Path]:
    """Writes ``areal.parquet``."""
    pa = pyarrow()
    path = job.directory / "areal.parquet"
    fields = {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, (dtype, _) in COLUMNS.items()}
    fields["rewards"] = pa.float32()
    fields |= dict.fromkeys(("trajectory", "group", "policy", "role"), pa.string())
    fields["images"] = images_type(pa)
    if names := job.store.reward_names:
        fields["named_rewards"] = pa.struct(dict.fromkeys(names, pa.float32()))
    schema = pa.schema(fields)
    with published(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for numbers in job.groups():
            flat = job.store.flat(numbers)
            offsets = pa.array(flat.offsets, pa.int32())
            tokens = {
                "input_ids": flat.tokens,
                "loss_mask": flat.loss_mask.astype(np.int32),
                "logprobs": np.nan_to_num(flat.logprobs, nan=0.0),
                "versions": flat.weight_versions,
                "attention_mask": np.ones(len(flat.tokens), np.bool_),
            }
            columns = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in tokens.items()}
            columns["rewards"] = job.store.column("reward")[flat.row]
            columns["trajectory"] = job.store.column("id")[flat.row]
            columns["group"] = job.store.column("group")[flat.row]
            columns["policy"] = flat.policy
            columns["role"] = [role for row in job.store.rows(numbers) for role in row.sequence_roles]
            columns["images"] = [images for row in job.store.rows(numbers) for images in _images(row)]
            if names:
                named = [pa.array(job.store.column(f"rewards/{name}")[flat.row], pa.float32()) for name in names]
                columns["named_rewards"] = pa.StructArray.from_arrays(named, list(names))
            writer.write_table(pa.Table.from_pydict(columns, schema=schema))
    return [path]


def _images(row: Row) -> list[list[dict[str, Any]]]:
    """Returns the images of each sequence of a row."""
    images = row.images
    return [images_in(sequence, images) for sequence in row.sequences]


def tensors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Right-pads rows of this format. Returns arrays of shape (rows, longest), and ``rewards`` of shape (rows,)."""
    padded: dict[str, Array] = {}
    for name, (dtype, fill) in COLUMNS.items():
        padded[name] = padded_lines([row[name] for row in rows], dtype, fill)
    padded["rewards"] = np.array([row["rewards"] for row in rows], np.float32)
    return padded
