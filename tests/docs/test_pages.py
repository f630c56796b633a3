"""Every command in the docs is run, or the page says why not."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT, blocks, pages
from tests.docs.session import Session, matches, sessions

FATES = {page: {block.fate for block in blocks(page)} for page in pages()}
RUN = [page for page, fates in FATES.items() if "run" in fates and "lab" not in fates]
"""Pages without commands for Slurm; tests/lab/test_docs.py runs the others."""


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in RUN])
def test_a_page_runs_as_it_stands(page, session: Session):
    for block in blocks(page):
        if block.fate == "run":
            session.run(block)


def test_every_block_that_is_not_run_says_why():
    known = {"", "text", "yaml", "python", "bash", "console", "sql"}
    for page in pages():
        for block in blocks(page):
            assert block.language in known, f"{block}: {block.language}: nothing runs it; mark it as text"
            assert block.mark not in ("not run", "form") or block.value, f"{block}: {block.mark}: say why, or what"


def test_output_is_compared_but_for_numbers_and_gaps():
    assert sessions("$ one\nout\nput\n$ two \\\n  more\n") == [("one", "out\nput\n"), ("two \\\n  more", "")]
    assert matches("id   reward\n---  ------\none     0.5\n…\nall", "id  reward\n--  --\none  1.25\ntwo 3\nall 9\n")
    assert not matches("id  reward", "id  status")
