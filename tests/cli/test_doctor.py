"""The verb ``doctor``: the shape of its report on a host that lacks everything."""

from __future__ import annotations

import json

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
        # An error of a check ends with its remedy, after a semicolon.
        assert finding["level"] != "FAIL" or finding["remedy"] or "; " in finding["found"], finding
    assert main(["doctor"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert sum(not line.startswith(" ") for line in lines) == len(report["findings"])
