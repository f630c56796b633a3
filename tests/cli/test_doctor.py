"""The verb ``doctor``: the form of its report on a host without any component."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaflow_hpc.cli import main


def test_every_finding_has_a_level_and_what_fails_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"python", "apptainer"} <= {finding["check"] for finding in report["findings"]}
    for finding in report["findings"]:
        assert set(finding) == {"check", "level", "found", "remedy"}
        assert finding["level"] in ("ok", "warn", "FAIL")
        # Each error ends with its remedy after a semicolon.
        assert finding["level"] != "FAIL" or finding["remedy"] or "; " in finding["found"], finding
    assert main(["doctor"]) == 3
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
    assert found["remedy"] == "pip install 'megaflow-hpc[agents]'"
