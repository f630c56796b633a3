"""Exports to JSON Lines, with all data of a rollout on one line. The format is lossless: importing restores the same
columns.

``messages`` is the main conversation. ``conversations`` lists all conversations, with the indices of their messages and
the calls that produced the answers. The indices refer to ``messages``, or to ``tree`` if there are several
conversations.

Token columns are lists, one per sequence. Log-probabilities have enough digits to restore the exact float32. ``null``
marks tokens that were not sampled and missing rewards. Artifacts and images are base64-encoded. Each image is stored
once per line, and messages refer to it by ``sha256:<hex>``. The ``images`` of a sequence list the placeholder tokens of
each image as ``[start, length, sha256]``.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.exports.files import lines, writing
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.checks import checked
from megaflow_hpc.trajectories.reading.sources import SequenceView
from megaflow_hpc.trajectory import Trajectory, image_records

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "JSON lines, one trajectory each, with everything; can be imported again"

_SUFFIX = {"none": ".jsonl", "gz": ".jsonl.gz", "zst": ".jsonl.zst"}
_TOKENS = ("tokens", "logprobs", "loss_mask", "weight_versions")
_RAGGED = ("rewards", "messages", "parents", "sequences", "turns", "attempts", "artifacts", "images")


def write(job: ExportJob) -> list[Path]:
    """Writes ``trajectories.jsonl``, with an additional suffix if it is compressed."""
    path = job.directory / f"trajectories{_SUFFIX[job.compress]}"
    with published(path) as temporary, writing(temporary, job.compress) as file:
        for row in job.rows():
            file.write(line(row))
    return [path]


def line(row: Row) -> bytes:
    """Encodes one trajectory as a line of strict UTF-8 JSON, including the newline."""
    record: dict[str, Any] = {}
    for name in Trajectory.__dataclass_fields__:
        if name not in _RAGGED:
            value = getattr(row, name)
            record[name] = None if name in UNKNOWN_AS_NAN and math.isnan(value) else value
    record["rewards"] = row.rewards
    record |= row.conversation_record()
    record["turns"] = [asdict(turn) for turn in row.turns]
    record["attempts"] = [asdict(attempt) for attempt in row.attempts]
    record["artifacts"] = [
        {"name": artifact.name, "data": base64.b64encode(artifact.data).decode()} for artifact in row.artifacts
    ]
    if images := row.images:
        records = image_records(images)
        record["images"] = [{**one, "data": base64.b64encode(one["data"]).decode()} for one in records]
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # orjson writes numpy arrays, and float32 as the shortest number from which it can be restored; NaN becomes null.
    sequences = orjson.dumps(list(map(_sequence, row.sequences)), option=orjson.OPT_SERIALIZE_NUMPY)
    return text[:-1].encode("utf-8", "backslashreplace") + b',"sequences":' + sequences + b"}\n"


def _sequence(view: SequenceView) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(view, name) for name in ("policy", *_TOKENS)}
    if view.experts is not None:
        _, record["expert_layers"], record["experts_per_token"] = view.experts.shape
        record["experts"] = base64.b64encode(view.experts.tobytes()).decode()
    if view.images:
        record["images"] = list(map(list, view.images))
    return record


def _experts(sequence: Mapping[str, Any]) -> dict[str, Any]:
    if "experts" not in sequence:
        return {}
    shape = {name: sequence[name] for name in ("expert_layers", "experts_per_token")}
    return {"experts": base64.b64decode(sequence["experts"], validate=True), **shape}


def parse(data: Mapping[str, Any]) -> Trajectory:
    """Builds a trajectory from a parsed line.

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
            **_experts(s),
            "images": s.get("images", ()),
        }
        for s in data.get("sequences", ())
    ]
    record["artifacts"] = [
        {"name": artifact["name"], "data": base64.b64decode(artifact["data"], validate=True)}
        for artifact in data.get("artifacts", ())
    ]
    record["images"] = [{**one, "data": base64.b64decode(one["data"], validate=True)} for one in data.get("images", ())]
    return Trajectory.from_record(record)


def import_jsonl(
    source: Path,
    target: Path,
    campaign: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Imports a JSON Lines file, plain or compressed with gzip or Zstandard, into a ``trajectories.h5``.

    Args:
        source: The JSON Lines file.
        target: The file to write. Its directory is created if missing. An existing file is replaced once the import has
            succeeded.
        campaign: Name of the campaign. Default: the name of ``source`` up to its first dot.
        progress: Called with the number of finished trajectories.

    Returns:
        The number of trajectories.

    Raises:
        ConfigError: The file is empty, a line is invalid, or an id is duplicated. The message names the line.
            ``target`` is unchanged.
    """
    if not source.is_file():
        raise ConfigError(f"{source}: cannot be read; expected JSON lines of megaflow-hpc export")
    ids: set[str] = set()
    with published(target) as temporary:
        name = campaign or source.name.split(".")[0]
        with TrajectoryWriter(temporary, name) as writer:
            for number, line in lines(source):
                if not line.strip():
                    continue
                try:
                    trajectory = checked(parse(parse_object(line)))
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    raise ConfigError(
                        f"{source}:{number}: not a trajectory of megaflow-hpc ({_fault(error)}); expected JSON lines "
                        "of megaflow-hpc export"
                    ) from None
                if trajectory.id in ids:
                    raise ConfigError(f"{source}:{number}: {trajectory.id} occurs twice; ids must be unique")
                ids.add(trajectory.id)
                writer.append(trajectory)
                if progress is not None:
                    progress(len(ids))
        if not ids:
            raise ConfigError(f"{source}: contains no trajectory; expected JSON lines of megaflow-hpc export")
    return len(ids)


def _fault(error: Exception) -> str:
    if isinstance(error, TypeError):  # Trajectory() missing 2 required positional arguments: …
        names = str(error).partition("missing ")[2].partition(": ")[2]
        if names:
            return f"it lacks {names}"
    return f"{error!r:.300}"
