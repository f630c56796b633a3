"""The verb ``doctor``: the form of its report on a host without any component."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.host import mounts


def test_every_finding_has_a_level_and_what_fails_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    failed = any(finding["level"] == "FAIL" for finding in report["findings"])
    assert (status, report["ok"]) == (3 if failed else 0, not failed)
    assert {"python", "apptainer"} <= {finding["check"] for finding in report["findings"]}
    for finding in report["findings"]:
        assert set(finding) == {"check", "level", "found", "remedy"}
        assert finding["level"] in ("ok", "warn", "FAIL")
        # Each error ends with its remedy after a semicolon.
        assert finding["level"] != "FAIL" or finding["remedy"] or "; " in finding["found"], finding
    assert main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert sum(not line.startswith(" ") for line in lines) == len(report["findings"])


def test_programs_of_slurm_without_a_cluster_come_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "sinfo", "squeue", "srun", "scontrol"):
        program = "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n"
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    assert main(["doctor", "--json"]) == 3
    (found,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["check"] == "slurm"]
    assert (found["level"], "configuration source" in found["found"]) == ("FAIL", True)
    assert found["remedy"] == "load the site's module, or set SLURM_CONF; without Slurm use --launcher local"


def test_apptainer_is_needed_by_tasks_with_an_image_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ((level, found, remedy),) = findings("apptainer", capsys)
    assert level == "warn"
    assert "apptainer: not on PATH" in found
    assert remedy == "without it, only tasks with image: none can run"


def test_an_agent_that_lacks_a_dependency_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package and its metadata exist, but a module that it imports is missing."""
    (tmp_path / "jinja2.py").write_text("raise ModuleNotFoundError(\"No module named 'jinja2'\", name='jinja2')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    main(["doctor", "--json"])
    (found,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["check"] == "agents"]
    assert found["level"] == "warn"
    assert "No module named 'jinja2'" in found["found"]
    assert "pip install" not in found["found"]
    assert found["remedy"] == 'pip install "megaflow-hpc[agents]"'


def findings(check: str, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, str]]:
    capsys.readouterr()
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    return [(one["level"], one["found"], one["remedy"]) for one in found if one["check"] == check]


def test_the_file_system_of_runs_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [(level, found, _)] = findings("run directory", capsys)
    assert (level, found.endswith(": hard links work")) == ("ok", True)
    options = ("rw", "nocto", "acregmax=600")
    monkeypatch.setattr(mounts, "mount_of", lambda path: mounts.MountInfo("/home", "nfs4", options))
    _, nocto, cached = findings("run directory", capsys)
    assert nocto[:2] == ("warn", "/home is mounted with nocto")
    assert cached[:2] == ("warn", "/home caches attributes for up to 600 s, so changes are seen late")
    monkeypatch.setattr(mounts, "why_no_links", lambda path: "Operation not supported")
    level, found, remedy = findings("run directory", capsys)[0]
    assert (level, found) == (
        "FAIL",
        f"{tmp_path} on nfs4: no hard links, which pods need to claim work (Operation not supported)",
    )
    assert remedy.startswith("set run_dir to a directory on Lustre")
    assert list(tmp_path.glob(".link*")) == []
