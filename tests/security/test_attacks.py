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


def test_every_bullet_that_was_asked_for_has_its_row() -> None:
    """The holes that a review found, by a word of the row that closes each."""
    attacks = "\n".join(row[0] + row[1] for row in rows())
    holes = (
        *("reaches the host's files", "%setup", "host's network", "capability", "COPY --from=/home", "COPY link/file"),
        *("3,000+ nested directories", "rewards: NaN", "idle connections", "malformed requests", "echo", "image_url"),
        *(
            "kv_transfer_params",
            "led out by nested links",
            "hard links 50 MB",
            "sparse headers",
            "flooded by a replaced",
        ),
        *("replaced `tar`", "NUL", "memfds", "socket buffers", "tmpfs", "deleted files", "/logs/verifier"),
        *(
            "empty files",
            "children that nobody waits for",
            "io_uring",
            "30 MB of",
            "a line of 600 MB",
            "deep JSON",
            "TOML: deep",
        ),
        *(
            "external storage",
            "links, virtual data sets",
            "virtual data sets",
            "host's keys",
            "500 processes",
            "3,000 sparse logs",
        ),
        *("control sequences", "not UTF-8", "/dev/shm", "host paths in PID 1", 'docker_image = "/"'),
        *("predictable scratch name", "another file, or a build that runs code"),
        *("four billion entries", "records", "SWE-bench:", "alias bombs", "smuggling", "links to the host for"),
    )
    assert [hole for hole in holes if hole not in attacks] == []
