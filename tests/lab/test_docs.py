"""Pages with commands for Slurm, run on the lab as they stand."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT, blocks, pages
from tests.docs.session import Session

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

LAB = [page for page in pages() if any(block.fate == "lab" for block in blocks(page))]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in LAB])
def test_a_page_runs_on_slurm_as_it_stands(page, session: Session):
    for block in blocks(page):
        if block.fate in ("run", "lab"):
            session.run(block)
