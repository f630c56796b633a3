"""Journals: their frames as bytes, their records behind valid frames, and the file that is gathered of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE, frame_head, header, pack_record, read_journal
from megaflow_hpc.trajectories.maintenance.validate import validate
from tests.security.fuzz.reading import everything
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.journals import record
from tests.support.samples import run_dir, trajectory

_SALT = b"saltsalt"


def _records() -> list[dict[str, Any]]:
    failed = trajectory(3, status="failed", error="a\udc80b\0", error_kind="agent")
    return [record(0, 0, trajectory(n)) for n in (1, 2, 5)] + [
        record(1, 1, failed),
        {"kind": "part", "number": 1, "base": 10},
    ]


def _journal(payloads: list[bytes]) -> bytes:
    made = header(_SALT)
    for number, payload in enumerate(payloads):
        made += frame_head(payload, _SALT, len(made), 10 + number) + payload
    return made


def framed_seeds() -> list[bytes]:
    """Whole journals."""
    payloads = [pack_record(one) for one in _records()]
    return [_journal(payloads), _journal(payloads[:1]) + b"\0" * 100, _journal([]), header(_SALT)[:10]]


@contextlib.contextmanager
def _frames(folder: Path) -> Iterator[Feed]:
    run = run_dir(folder / "run")
    file = run.journal_file("pod", "0")
    file.parent.mkdir(parents=True, exist_ok=True)

    def feed(data: bytes) -> None:
        file.write_bytes(data)
        found = list(read_journal(file, tolerant=True))
        ends = [end for end, _ in found]
        if ends != sorted(set(ends)) or (ends and not HEADER_SIZE < ends[0] <= ends[-1] <= len(data)):
            raise Broken("records that end nowhere", f"{ends} of {len(data)}")
        list(read_journal(file))

    yield feed


@contextlib.contextmanager
def _read(folder: Path) -> Iterator[Feed]:
    """Records behind valid frames."""
    run = run_dir(folder / "run")

    def feed(data: bytes) -> None:
        _write(run, data)
        with open_trajectories(run.path, seals={}) as store:
            everything(store)

    yield feed


@contextlib.contextmanager
def _gathered(folder: Path) -> Iterator[Feed]:
    """The same, and the file that is gathered of them: it is valid, and says the same."""

    def feed(data: bytes) -> None:
        run = run_dir(folder / "run")
        try:
            _write(run, data)
            with open_trajectories(run.path, seals={}) as store:
                before = {"ids": repr(store.ids), **everything(store)}
            path = gather(run, seals={})
            if problems := validate(path):
                raise Broken(f"gathered, and yet {re.sub('[0-9]+', '', problems[0])[:60]}", problems)
            with open_trajectories(path) as store:
                after = {"ids": repr(store.ids), **everything(store)}
            if before != after:
                wrong = next(name for name in before if before[name] != after.get(name))
                raise Broken(f"{wrong.split()[-1]} differs between journal and file", f"{before}\n{after}")
        finally:
            remove_tree(folder / "run")

    yield feed


def _write(run: RunDir, payload: bytes) -> None:
    """A journal of a record, and of one that is valid."""
    run.journal_file("pod", "0").write_bytes(
        _journal([payload, pack_record(record(9, 0, trajectory(8, task="other")))])
    )


def targets() -> list[Target]:
    """Journals as bytes, as records, and as a gathered file."""

    def packed() -> list[bytes]:
        return [pack_record(one) for one in _records()]

    return [
        Target("journal", _frames, framed_seeds, words=(b"\xf5\xc1MJ", b"MFHPCJNL")),
        Target("records", _read, packed, form="msgpack"),
        Target("gathered", _gathered, packed, form="msgpack", count=40),
    ]
