"""Inputs that were faults once, by target: each is fed again in every run.

They are made here by code, so that one sees what they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from megaflow_hpc.trajectories.journal.frames import pack_record
from tests.security.fuzz.target import PART
from tests.support.harbor_tasks import TOML
from tests.support.journals import record
from tests.support.samples import trajectory


def _records() -> list[bytes]:
    """Values of other types, or beyond their column, in the fields of an otherwise valid record."""
    changes: dict[str, Sequence[Any]] = {
        "policy": (0.5, "p" * 70_000),
        "task_id": ([],),
        "node": ({},),
        "error": (None,),
        "status": ("fained", []),
        "rewards": (0.5, None, {"": "x"}, {"a": 2**64 - 1}, {"r" * 70_000: 1.0}, {str(n): 0.0 for n in range(2000)}),
        "reward": ({}, [], "1", True),
        "rank": (2**31, 1.5, "0"),
        "seed": (2**63,),
        "started_at": ([1],),
        "setup_s": ([],),
        "messages": ([1], {}, [{1: b"x", b"k": {}}], [{"a": _nested(300)}]),
        "turns": ([{"sequence": 2**63, "token_start": 0, "token_end": 0}], [[]], 5),
        "attempts": ([{"attempt": 2**40, "status": "x"}], [{"attempt": 0, "status": 0}]),
        "artifacts": ([{"name": 0, "data": b""}], [{"name": "x", "data": "text"}]),
        "id": (5, None),
    }
    found = [_changed(**{name: value}) for name, values in changes.items() for value in values]
    found += [_changed(status="failed"), pack_record({**record(0, 0, trajectory(1)), "block": float("inf")})]
    found += [
        _sequence(loss_mask=array("B", [2])),
        _sequence(logprobs=array("f", [0.0])),
        _sequence(tokens=array("i", [-1])),
    ]
    found += [_sequence(weight_versions=array("i", [-7])), _sequence(weight_versions=array("i", [-1, -1]))]
    found.append(b"\x91" * 900 + b"\xc0" + b"more")  # an error about it holds it
    return [*found, b"\x83\xa4kind\xaatrajectory\xa5epoch\x00\xa5block\xdd\x05\xf5\xe0\xff", b"\x81\x81\x01\x02\x03"]


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
    return _changed(turns=[], sequences=[{"policy": "p", **{k: v.tobytes() for k, v in (columns | changes).items()}}])


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def _lines() -> list[bytes]:
    """Tests, issues and a base that are no such thing; texts that cannot be written or given to a program."""
    start = b'{"org": "o", "repo": "r", "number": 1, "fix_patch": "p", "title": "t", '
    ends = (b'"f2p_tests": 7}', b'"base": "x", "f2p_tests": ["a"]}', b'"resolved_issues": 1, "f2p_tests": ["a"]}')
    one = b'{"instance_id": "a", "repo": "r", "problem_statement": "p", "FAIL_TO_PASS": ["t"], '
    unwritable = (
        b'"workdir": "/a\\u0000"}',
        b'"env": {"A": "\\u0000"}}',
        b'"test_patch": "\\ud800"}',
        b'"test_cmds": [1]}',
    )
    return [start + end for end in ends] + [one + end for end in unwritable]


def _dockerfiles() -> list[bytes]:
    """A word that is quoted whole by the error about it, each byte as six characters; what only JSON can spell."""
    spelled = [b'FROM x\nRUN ["a\\u0000"]\n', b'FROM x\nCOPY ["a\\u0000", "/"]\n', b'FROM x\nRUN ["\\ud800"]\n']
    return [b"FROM x:${" + b"\x91" * 20_000, *spelled]


def _directories() -> list[bytes]:
    """Asterisks in a ``.harborignore`` that may divide a name in very many ways; a range backwards; huge numbers."""
    rest = (b"Fix it.\n", b"", b"true\n")
    found = [
        PART.join((TOML.encode(), *rest, ignore))
        for ignore in (b"*" * 678, b"*t*" * 30 + b"x\n", b"**/" * 400, b"[5-2]")
    ]
    nines = b"9" * 5000
    sizes = (b'memory = "' + nines + b'G"\n', b"cpus = " + nines + b"\n", b"cpus = " + b"[" * 5000 + b"\n")
    found.append(PART.join((b'schema_version = "1.' + nines + b'"\n', *rest, b"")))
    return found + [PART.join((b'[environment]\ndocker_image = "x"\n' + size, *rest, b"")) for size in sizes]


FOUND: dict[str, Callable[[], Sequence[bytes]]] = {
    "dockerfile": _dockerfiles,
    "records": _records,
    "gathered": _records,
    "swebench": _lines,
    "harbor": _directories,
}
