"""Fuzz the readers of journals, of the file that is gathered from them, and of JSON lines that are imported."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.jsonl import import_jsonl
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE, frame_head, header, pack_record, read_journal
from megaflow_hpc.trajectories.maintenance.validate import validate
from megaflow_hpc.trajectories.reading.store import TrajectoryStore
from tests.fuzz.contract import Target, reader, scratch
from tests.support.journals import record
from tests.support.samples import commit, run_dir, trajectory

_SALT = b"saltsalt"
_PARTS = ("rewards", "messages", "sequences", "turns", "attempts", "artifacts")
_SCALARS = sorted(c.name for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n")
_TOKENS = ("tokens", "logprobs", "loss_mask", "weight_versions")


def everything(store: TrajectoryStore) -> dict[str, str]:
    """Read all that a store contains. Equal stores have equal texts, by name."""
    found: dict[str, str] = {}
    for row in store:
        for name in (*_PARTS, *_SCALARS):
            found[f"row {row.index} {name}"] = _text(getattr(row, name))
    for name in (*_SCALARS, *(f"rewards/{name}" for name in store.reward_names)):
        found[name] = _text(store.column(name).tolist())
    found["lengths"] = _text(store.lengths().tolist())
    for name, values in store.batch(range(len(store))).items():
        found[f"batch {name}"] = _text(values.tolist())
    found["chosen"] = _text(store.select("reward >= 0 or status == 'failed'").tolist())
    found["versions"] = _text(sorted(store.versions))
    return found


def _text(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "logprobs"):
        return repr([(v.policy, *(getattr(v, name).tolist() for name in _TOKENS)) for v in value])
    return repr(value)


@reader
def frames(data: bytes) -> None:
    """Read any bytes as a journal."""
    with scratch() as folder:
        file = folder / "0.journal"
        file.write_bytes(data)
        ends = [end for end, _ in read_journal(file, tolerant=True)]
        assert ends == sorted(set(ends))
        assert not ends or HEADER_SIZE < ends[0] <= ends[-1] <= len(data)
        list(read_journal(file))


@reader
def records(data: bytes) -> None:
    """Read any bytes as a record behind a valid frame."""
    with scratch() as folder:
        run = _run_with_record(folder, data)
        with open_trajectories(run.path) as store:
            everything(store)


@reader
def gathered(data: bytes) -> None:
    """Gather such a record. The file is valid, and reads as the journal does."""
    with scratch() as folder:
        run = _run_with_record(folder, data)
        with open_trajectories(run.path) as store:
            before = {"ids": repr(store.ids), **everything(store)}
        path = gather(run, seals={})
        assert validate(path) == []
        with open_trajectories(path) as store:
            assert {"ids": repr(store.ids), **everything(store)} == before


@reader
def imported(data: bytes) -> None:
    """Import lines. The file is valid, and its export is imported to the same."""
    with scratch() as folder:
        source, target, again = folder / "lines.jsonl", folder / "trajectories.h5", folder / "again.h5"
        source.write_bytes(data)
        count = import_jsonl(source, target)
        assert validate(target) == []
        if not count or zlib.crc32(data) % 4:  # the second half takes as long as the first
            return
        with open_trajectories(target) as store:
            export(store, ["jsonl"], folder / "out")
            before = everything(store)
        import_jsonl(folder / "out" / "trajectories.jsonl", again)
        with open_trajectories(again) as store:
            assert everything(store) == before


def _run_with_record(folder: Path, payload: bytes) -> RunDir:
    """Make a run whose journal has this record and a valid one."""
    run = run_dir(folder / "run")
    other = pack_record(record(9, 0, trajectory(8, task="other")))
    run.journal_file("pod", "0").write_bytes(_journal([payload, other]))
    return run


def _journal(payloads: list[bytes]) -> bytes:
    made = header(_SALT)
    for number, payload in enumerate(payloads):
        made += frame_head(payload, _SALT, len(made), 10 + number) + payload
    return made


def _payloads() -> list[bytes]:
    failed = trajectory(3, status="failed", error="a\udc80b\0", error_kind="agent")
    records = [record(0, 0, trajectory(n)) for n in (1, 2, 5)]
    return [pack_record(one) for one in (*records, record(1, 1, failed), {"kind": "part", "number": 1, "base": 10})]


def _journals() -> list[bytes]:
    payloads = _payloads()
    return [_journal(payloads), _journal(payloads[:1]) + b"\0" * 100, _journal([]), header(_SALT)[:10]]


def _lines() -> list[bytes]:
    with scratch() as folder:
        run = run_dir(folder / "run")
        commit(run, "pod", *[(0, 0, trajectory(n)) for n in (1, 2, 5)])
        with open_trajectories(run.path) as store:
            export(store, ["jsonl"], folder)
        data = (folder / "trajectories.jsonl").read_bytes()
    return [data, data.splitlines()[0], gzip.compress(data, mtime=0)]


def _compressed_line_ends() -> list[bytes]:
    return [gzip.compress(b"\n" * (1 << 22), mtime=0)]


def _records_found() -> list[bytes]:
    """Put values of other types, or out of range, into the fields of an otherwise valid record."""
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    changes: dict[str, Sequence[Any]] = {
        "policy": (0.5, "p" * 70_000),
        "task_id": ([],),
        "node": ({},),
        "error": (None,),
        "status": ("fained", [], "failed"),
        "rewards": (0.5, None, {"": "x"}, {"a": 2**64 - 1}, {"r" * 70_000: 1.0}, {str(n): 0.0 for n in range(2000)}),
        "reward": ({}, [], "1", True),
        "rank": (2**31, 1.5, "0"),
        "seed": (2**63,),
        "started_at": ([1],),
        "setup_s": ([],),
        "messages": ([1], {}, [{1: b"x", b"k": {}}], [{"a": deep}]),
        "turns": ([{"sequence": 2**63, "token_start": 0, "token_end": 0}], [[]], 5),
        "attempts": ([{"attempt": 2**40, "status": "x"}], [{"attempt": 0, "status": 0}]),
        "artifacts": ([{"name": 0, "data": b""}], [{"name": "x", "data": "text"}]),
        "id": (5, None),
    }
    found = [_changed(**{name: value}) for name, values in changes.items() for value in values]
    found += [
        _sequence(loss_mask=array("B", [2])),
        _sequence(logprobs=array("f", [0.0])),
        _sequence(tokens=array("i", [-1])),
        _sequence(weight_versions=array("i", [-7])),
        _sequence(weight_versions=array("i", [-1, -1])),
        pack_record({**record(0, 0, trajectory(1)), "block": float("inf")}),
        b"\x91" * 900 + b"\xc0" + b"more",  # its error quotes it
        b"\x83\xa4kind\xaatrajectory\xa5epoch\x00\xa5block\xdd\x05\xf5\xe0\xff",
        b"\x81\x81\x01\x02\x03",
    ]
    return found


def _changed(**changes: Any) -> bytes:
    whole = record(0, 0, trajectory(1))
    return pack_record({**whole, "trajectory": {**whole["trajectory"], **changes}})


def _sequence(**changes: Any) -> bytes:
    columns = {
        "tokens": array("i", [5]),
        "logprobs": array("f", [float("nan")]),
        "loss_mask": array("B", [0]),
        "weight_versions": array("i", [-1]),
    }
    packed = {name: values.tobytes() for name, values in (columns | changes).items()}
    return _changed(turns=[], sequences=[{"policy": "p", **packed}])


TARGETS = {
    "journal": Target(frames, _journals, words=(b"\xf5\xc1MJ", b"MFHPCJNL")),
    "records": Target(records, _payloads, _records_found, form="msgpack"),
    "gathered": Target(gathered, _payloads, _records_found, form="msgpack", examples=20),
    "import": Target(imported, _lines, _compressed_line_ends, form="json", examples=40),
}
