"""Fixtures of tests on a lab."""

from __future__ import annotations

import pytest

from megaflow_hpc.campaign import live_jobs


@pytest.fixture
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refill the budget of a run's queries of Slurm soon, for tests that look at its status all the time."""
    monkeypatch.setattr(live_jobs, "REFILL_S", 5.0)
