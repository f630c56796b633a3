"""Damaged JSON files of a run directory are read as missing, or refused with the names of file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import overrides, weights
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir, read_json
from megaflow_hpc.rundir.marks import Marks
from tests.support.samples import run_dir

DAMAGED = {
    "empty": b"",
    "cut": b'{"version": 3, "conso',
    "a list": b"[]",
    "a number": b"7",
    "NaN": b"NaN",
    "deep": b"[" * 20_000,
    "not text": b"\xff\xfe",
    "wrong types": b'{"version": [], "consumers": [{}], "core_hours": "x", "pods": 3, "policies": 4, "url": 5}',
}


def test_an_error_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "p.0.json"
    path.write_text(json.dumps({"server": "p.0", "policy": "p", "url": "http://x", "refused": {"version": "x"}}))
    with pytest.raises(ValueError, match=r"p\.0\.json: Expected `int`, got `str` - at `\$\.refused\.version`"):
        read_json(path, Endpoint)


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("weights/current.p.json", lambda run: weights.current(run, "p").version, 0),
        ("ledger/cancelled", lambda run: Marks(run).closed, []),
        ("ledger/limits.json", lambda run: CampaignBudget(run, {"core_hours": 2}).limits()["core_hours"], 2),
        ("endpoints/p.0.json", lambda run: EndpointFiles(run).serving(), []),
    ],
)
def test_a_damaged_file_is_read_as_missing(
    tmp_path: Path, data: bytes, name: str, read: Callable[[RunDir], Any], expected: object
) -> None:
    run = run_dir(tmp_path / "run")
    (run.path / name).write_bytes(data)
    assert read(run) == expected


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize(
    ("name", "read", "message"),
    [
        ("ledger/slurm.json", overrides._read, r"slurm\.json: .*remove the file"),
        ("pool/about.json", lambda run: EnginePool(run.path).about(), "it is damaged"),
    ],
)
def test_a_damaged_file_that_decides_something_is_refused(
    tmp_path: Path, data: bytes, name: str, read: Callable[[RunDir], Any], message: str
) -> None:
    run = run_dir(tmp_path / "run")
    (run.path / name).parent.mkdir(mode=0o700, exist_ok=True)
    (run.path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(run)
