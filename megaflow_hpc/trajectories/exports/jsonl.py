"""JSON lines: one line with all data of a rollout. The format is lossless: ``import`` restores the same columns.

``messages`` is the main conversation. ``conversations`` lists all conversations, with the indices of their messages and
the calls that answered. If there is more than the main conversation, the indices refer to ``tree``.

Token columns are lists per sequence. Log-probabilities have nine significant digits, which restore the same float32.
``null`` marks tokens that were not sampled and missing rewards. Artifacts are base64.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaflow_hpc.trajectories.exports.files import writing
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.reading.sources import SequenceView
from megaflow_hpc.trajectory import Trajectory

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.row import Row

HELP = "JSON lines, one trajectory each, with everything; can be imported again"

_SUFFIX = {"none": ".jsonl", "gz": ".jsonl.gz", "zst": ".jsonl.zst"}
_RAGGED = ("rewards", "messages", "parents", "sequences", "turns", "attempts", "artifacts")


def write(job: ExportJob) -> list[Path]:
    """Writes ``trajectories.jsonl``, with the suffix of its compression."""
    path = job.directory / f"trajectories{_SUFFIX[job.compress]}"
    with published(path) as temporary, writing(temporary, job.compress) as file:
        for row in job.rows():
            file.write(line(row))
    return [path]


def line(row: Row) -> bytes:
    """Returns one trajectory as a line of strict JSON in UTF-8, newline included."""
    head: dict[str, Any] = {}
    for name in Trajectory.__dataclass_fields__:
        if name not in _RAGGED:
            value = getattr(row, name)
            head[name] = None if name in UNKNOWN_AS_NAN and math.isnan(value) else value
    head["rewards"] = row.rewards
    head |= row.conversation_record()
    head["turns"] = [asdict(turn) for turn in row.turns]
    head["attempts"] = [asdict(attempt) for attempt in row.attempts]
    head["artifacts"] = [
        {"name": artifact.name, "data": base64.b64encode(artifact.data).decode()} for artifact in row.artifacts
    ]
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    sequences = ",".join(_sequence(view) for view in row.sequences)
    return f'{text[:-1]},"sequences":[{sequences}]}}\n'.encode("utf-8", "backslashreplace")


def _sequence(view: SequenceView) -> str:
    def integers(values: Any) -> str:
        return ",".join(map(str, values.tolist()))

    return (
        f'{{"policy":{json.dumps(view.policy)},"tokens":[{integers(view.tokens)}],'
        f'"logprobs":[{_floats(view.logprobs)}],"loss_mask":[{integers(view.loss_mask)}],'
        f'"weight_versions":[{integers(view.weight_versions)}]}}'
    )


def _floats(values: Any) -> str:
    cells = np.full(len(values), "null", object)
    number = np.isfinite(values)
    finite = values[number].tolist()
    cells[number] = ("%.9g," * len(finite) % tuple(finite)).split(",")[:-1] if finite else []
    cells[number & (values == 0) & np.signbit(values)] = "-0.0"  # JSON's -0 would be read back as an integer
    return ",".join(cells)


def parse(data: Mapping[str, Any]) -> Trajectory:
    """Returns the trajectory of a parsed line.

    Raises:
        KeyError, TypeError, ValueError: The line is not a trajectory.
    """
    record = {**data, **data.get("tree", {})}
    record["sequences"] = [
        {
            "policy": s["policy"],
            "tokens": array("i", s["tokens"]).tobytes(),
            "logprobs": array("f", [math.nan if value is None else value for value in s["logprobs"]]).tobytes(),
            "loss_mask": array("B", s["loss_mask"]).tobytes(),
            "weight_versions": array("i", s["weight_versions"]).tobytes(),
        }
        for s in data.get("sequences", ())
    ]
    record["artifacts"] = [
        {"name": artifact["name"], "data": base64.b64decode(artifact["data"], validate=True)}
        for artifact in data.get("artifacts", ())
    ]
    return Trajectory.from_record(record)
