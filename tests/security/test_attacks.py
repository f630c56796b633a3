"""The table of attacks: each test that it names is there, and each test of attacks is named."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.support.places import ROOT

PAGE = ROOT / "docs" / "explanation" / "attacks.md"
TESTS = {
    name: path.relative_to(ROOT / "tests").as_posix()
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}
"""File by name of a test."""
FILES = {file.rpartition("/")[2].removesuffix(".py") for file in TESTS.values()}
_WORD = re.compile(r"(…|\.\.\.)?_?([a-z0-9]\w{5,})(…|\.\.\.)?")


def rows() -> list[list[str]]:
    """The rows of the page's tables: attack, what happens, mechanism, test."""
    lines = PAGE.read_text().splitlines()
    bodies = [line for before, line in pairwise(lines) if line.startswith("| ") and before.startswith("|")]
    found = [re.split(r"(?<!\\)\|", line.strip("|")) for line in bodies if not line.startswith(("| attack ", "| ---"))]
    return [[cell.strip() for cell in row] for row in found]


def missing(text: str) -> list[str]:
    """Names of tests in a text, whole or shortened by dots, that no test has."""
    wrong = []
    for left, name, right in _WORD.findall(text):
        if not (left or right or name.startswith("test_")) or name in FILES:
            continue
        found = any(
            (name in test) if left else test.startswith(name) if right else test == name or test.startswith(f"{name}[")
            for test in TESTS
        )
        if not found:
            wrong.append(left + name + right)
    return wrong


def test_every_row_of_the_table_names_tests_that_are_there() -> None:
    found = rows()
    assert len(found) > 110
    for row in found:
        assert len(row) == 4, row
        attack, happens, _, test = row
        assert not missing(test), attack
        told = re.search(r"test_|…|\.\.\.|same|poison lists|each target's|`", test)
        assert told or (test == "none" and "open" in happens), attack


def test_every_file_of_attacks_is_named() -> None:
    page = PAGE.read_text()
    files = {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")} - {"test_attacks.py"}
    assert sorted(name for name in files if name.removesuffix(".py") not in page) == []


def test_every_bullet_that_was_asked_for_has_its_row() -> None:
    """The holes that a review found, by a word of the row that closes each."""
    attacks = "\n".join(row[0] + row[1] for row in rows())
    holes = (
        *("/proc/1/root", "%setup", "host's network", "capability", "COPY --from=/home", "COPY link/file"),
        *("3,000+ nested directories", "rewards: NaN", "idle connections", "malformed requests", "echo", "image_url"),
        *("kv_transfer_params", "nested seven deep", "hard links 50 MB", "sparse headers", "flooded by a replaced"),
        *("self-linked link", "NUL", "memfds", "socket buffers", "tmpfs", "deleted files", "/logs/verifier"),
        *("empty files", "SIG_IGN", "io_uring", "30 MB of", ".jsonl.gz", "deep JSON", "YAML: deep"),
        *("external storage", "soft links", "virtual data sets", "host's keys", "500 processes", "3,000 sparse logs"),
        *("control sequences", "not UTF-8", "/dev/shm", "host paths in PID 1", 'docker_image = "/"'),
        *("predictable scratch name", "newer major version"),
        *("msgpack:", "records", "SWE-bench:", "alias bombs", "smuggling", "copy mode"),
    )
    assert [hole for hole in holes if hole not in attacks] == []
