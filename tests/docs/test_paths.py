"""Every file of this repository that a page names exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "capabilities.md"])
FOLDERS = ("docs", "launchers", "megaflow_hpc", "sbatch", "containers", "tests", "share")
FILES = [
    str(path.relative_to(ROOT))
    for folder in (*FOLDERS, ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]
OF_TASKS = {
    "tests/test.sh", "tests/Dockerfile", "solution/solve.sh", "tests/test_filesize.py", "tests/test_number.py",
}  # fmt: skip
"""Files of task directories and of packages that become tasks, not of this repository."""
INSTALLED = {"megaflow_hpc/carried/launchers/site", "megaflow_hpc/carried/sbatch", "config/mini_textbased.yaml"}
"""Files of wheels: ours and that of mini-swe-agent."""


def exists(name: str) -> bool:
    """Return whether ``name`` ends the path of a file or directory here. ``*`` matches any text."""
    pattern = re.escape(name.rstrip("/")).replace(r"\*", "[^/]*")
    return any(re.search(rf"(?:^|/){pattern}(?:$|/)", file) for file in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]+)", text))
    named |= set(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|c|sh|md|yaml|txt))`", text))
    named |= set(re.findall(r"(?:\w+/)*test_\w+\.py", text))
    modules = re.findall(r"python -m (tests(?:\.\w+)+|megaflow_hpc(?:\.\w+)+)", text)
    named |= {module.replace(".", "/") for module in modules if not module.endswith(".NAME")}
    missing = sorted(
        name
        for name in named - OF_TASKS - INSTALLED
        if "NAME" not in name and not exists(name) and not exists(f"{name}.py")
    )
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert sorted(link for link in set(links) if not (page.parent / link).exists()) == []
