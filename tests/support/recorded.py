"""Journals of real campaigns, kept under tests/trajectories/recorded, and digests of the columns they gather into.

``python -m tests.support.recorded RUN NAME`` keeps the journals of a run. Letters of messages, artifacts and errors are
replaced by the letters ``a`` and ``A``: the texts of agents and packages belong to their authors. Ids, tokens,
log-probabilities, times and lengths stay. The digests are those of the code that recorded the run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, TEXT, text_offset
from megaflow_hpc.trajectories.journal.frames import read_journal
from megaflow_hpc.trajectories.journal.winners import journals
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.support.places import ROOT

RECORDED = ROOT / "tests" / "trajectories" / "recorded"
DIGESTS = RECORDED / "digests.json"


def masked(value: Any) -> Any:
    """Returns a JSON value with the words of its strings masked. Keys and the roles of messages stay."""
    if isinstance(value, dict):
        return {key: item if key in ("role", "type") else masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    if isinstance(value, str):
        return re.sub("[A-Z]", "A", re.sub("[^\\W\\d_A-Z]", "a", value))
    return value


def _masked_json(line: str) -> str:
    return json.dumps(masked(json.loads(line)), ensure_ascii=False) if line.strip() else line


def _masked_record(record: dict[str, Any]) -> dict[str, Any]:
    trajectory = record["trajectory"]
    trajectory["messages"] = [masked(message) for message in trajectory["messages"]]
    trajectory["error"] = masked(trajectory["error"])
    for attempt in trajectory["attempts"]:
        attempt["error"] = masked(attempt["error"])
    for artifact in trajectory["artifacts"]:
        text = artifact["data"].decode("utf-8", "replace")
        is_json_lines = artifact["name"].endswith(".jsonl")
        text = "\n".join(map(_masked_json, text.split("\n"))) if is_json_lines else masked(text)
        artifact["data"] = text.encode()
    return record


def keep(run: RunDir, name: str) -> None:
    """Keeps the masked journals of a run as ``NAME.tar.xz``, and the digests of its columns."""
    with tempfile.TemporaryDirectory() as directory:
        copy = RunDir(Path(directory) / name)
        copy.journal.mkdir(parents=True)
        for path in journals(run):
            with JournalWriter(copy.journal / path.name) as journal:
                for _, record in read_journal(path):
                    if record["kind"] == "trajectory":
                        journal.append(_masked_record(record))
                        journal.commit()
        RECORDED.mkdir(exist_ok=True)
        with tarfile.open(RECORDED / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(copy.path, name)
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        known[name] = digests(gather(unpack(name, Path(directory))))
    DIGESTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def unpack(name: str, directory: Path) -> RunDir:
    """Returns a run directory with the recorded journals."""
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(directory)
    return RunDir(directory / name)


def digests(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of the values of every column: of texts without padding, of numbers as they are stored."""
    values: dict[str, bytes] = {}

    def collect(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        is_text = item.dtype.kind == "S" or h5py.check_string_dtype(item.dtype) is not None
        if name in COLUMNS and COLUMNS[name].dtype == TEXT and text_offset(name) in item.file:
            bounds, data = item.file[text_offset(name)][:].tolist(), item[:].tobytes()
            values[name] = b"\0".join(data[first:last] for first, last in pairwise(bounds))
        else:
            values[name] = b"\0".join(item[:].tolist()) if is_text else item[:].tobytes()

    with h5py.File(path) as file:
        file.visititems(collect)
    return {name: hashlib.sha256(value).hexdigest() for name, value in values.items()}


if __name__ == "__main__":
    keep(RunDir(sys.argv[1]), sys.argv[2])
