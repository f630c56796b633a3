"""The table of capabilities (tests/capabilities.md) is complete, and its tests exist."""

from __future__ import annotations

import ast
import re

from megaflow_hpc.cli import GROUPS
from megaflow_hpc.config.campaign import CampaignConfig
from tests.support.places import ROOT

TABLE = (ROOT / "tests" / "capabilities.md").read_text()


def test_every_capability_has_a_test_that_exists() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "| --- |" not in line]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    headings = sum(1 for line in rows if line.endswith("| test |"))
    assert len(named) == len(rows) - headings
    missing = []
    for file, test in named:
        path = ROOT / file
        functions = {getattr(node, "name", "") for node in ast.parse(path.read_text()).body} if path.exists() else set()
        if test not in functions:
            missing.append(f"{file}::{test}")
    assert missing == []


def test_every_verb_and_section_has_a_row() -> None:
    promised = " ".join(re.findall(r"^\|[^|]+\|([^|]+)\|", TABLE, re.MULTILINE))
    words = set(re.findall(r"\w+", promised))
    verbs = {verb for group in GROUPS.values() for verb in group} - {"help", "completion"}
    assert sorted(verbs - words) == []
    sections = set(CampaignConfig.model_fields) - {"name", "seed", "run_dir"}
    assert sorted(sections - words) == []
