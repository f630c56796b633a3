"""``run.json``: what is written is read again, and damaged files and other formats are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import (
    PolicyRecord,
    RunRecord,
    ServerGroup,
    ServerRecord,
    read_head,
    read_run,
    write_run,
)

RECORD = RunRecord(
    version="0.1.0",
    campaign={"name": "small", "tasks": ["tasks/*"], "agent": "oracle", "slurm": {"pods": {"mem_gb": 4}}},
    policies={"default": PolicyRecord([{"name": "oracle"}], {"engine": "scripted"}, samples=2)},
    servers=[
        ServerRecord("default", {"engine": "scripted"}),
        ServerRecord("default", {"engine": "scripted"}, held=True),
    ],
    server_groups=[ServerGroup(0, 1, 0), ServerGroup(1, 1, 0, held=True)],
    total=2,
)


@pytest.mark.parametrize("record", [RECORD, RunRecord(campaign={"name": "x"})])
def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: RunRecord) -> None:
    run = RunDir(tmp_path)
    write_run(run, record)
    assert read_run(run) == record


def test_keys_of_a_later_version_are_ignored_and_other_formats_are_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, RECORD)
    content = json.loads(run.run_json.read_text())
    content["later"] = content["campaign"]["later"] = content["campaign"]["slurm"]["pods"]["later"] = [1]
    content["servers"][0]["later"] = 1
    run.run_json.write_text(json.dumps(content))
    assert read_run(run).config.slurm.pods.extra == {"mem": "4000M"}
    assert read_head(run).campaign.name == "small"
    for version, remedy in ((4, "use a newer megaflow-hpc"), (2, "plan a new run")):
        run.run_json.write_text(json.dumps({**content, "format_version": version, "servers": "otherwise"}))
        with pytest.raises(ConfigError, match=rf"version {version}, expected megaflow-hpc/run version 3; {remedy}"):
            read_run(run)


@pytest.mark.parametrize("text", ['{"format": "megaflow-hpc/run", "format_version": 3, "total": "many"}', '{"format"'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read \(.*the run directory is damaged"):
        read_run(RunDir(tmp_path))
