"""The site builds without warnings, and its generated pages match the code."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.blocks import ROOT


def test_the_site_builds_without_a_warning_and_asks_nobody(tmp_path):
    command = [sys.executable, ROOT / "launchers" / "docs.py", "site", tmp_path / "site"]
    built = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert 'src="http' not in text, page  # scripts, pictures, frames
        assert 'rel="stylesheet" href="http' not in text, page


def test_pages_made_from_code_are_as_the_code_is():
    command = [sys.executable, ROOT / "launchers" / "docs.py", "pages", "--check"]
    checked = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert checked.stdout == "", "stale; write them with: python launchers/docs.py pages"
    assert checked.returncode == 0, checked.stderr


def test_the_reference_names_every_key_once_with_its_meaning():
    from megaflow_hpc.config.campaign import CampaignConfig
    from megaflow_hpc.config.reference import tables

    found = {table.path: table for table in tables()}
    assert [key.name for key in found[""].keys] == list(CampaignConfig.model_fields)
    assert {"tasks[]", "agent[]", "model", "slurm.pods", "slurm.trainer", "training.policies.NAME"} <= found.keys()
    keys = [key for table in found.values() for key in table.keys]
    assert [key.name for key in keys if not key.text] == []
    assert {key.name: key.default for key in found["slurm.pods"].keys}["count"] == "1"
