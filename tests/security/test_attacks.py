"""The tables of attacks: the test files that they name are there, and each file of attacks is named."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.support.places import ROOT

PAGE = ROOT / "docs" / "explanation" / "attacks.md"
FILES = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}


def rows() -> list[list[str]]:
    """The rows of the page's tables: attack, result."""
    lines = PAGE.read_text().splitlines()
    bodies = [line for before, line in pairwise(lines) if line.startswith("| ") and before.startswith("|")]
    found = [re.split(r"(?<!\\)\|", line.strip("|")) for line in bodies if not line.startswith(("| attack ", "| ---"))]
    return [[cell.strip() for cell in row] for row in found]


def test_every_row_has_a_result() -> None:
    found = rows()
    assert len(found) > 110
    for row in found:
        assert all(row), row
        assert len(row) == 2, row


def test_every_section_with_a_table_names_test_files_that_are_there() -> None:
    sections = [section for section in PAGE.read_text().split("\n## ")[1:] if "\n| --- |" in section]
    assert len(sections) > 10
    for section in sections:
        named = re.search(r"^Tests?: .*?\n\n", section, re.MULTILINE | re.DOTALL)
        assert named, section[:60]
        for name in re.findall(r"[\w/]*test_\w+\.py", named[0]):
            assert any(file == name or file.endswith(f"/{name}") for file in FILES), name


def test_every_file_of_attacks_is_named() -> None:
    page = PAGE.read_text()
    files = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")} - {"test_attacks.py"}
    assert sorted(name for name in files if name.removesuffix(".py") not in page) == []
