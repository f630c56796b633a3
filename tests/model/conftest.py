"""Keeps what engines report in every test of models, to compare it with what is recorded."""

from __future__ import annotations

import pytest

from tests.support.reported import keep_reported


@pytest.fixture(autouse=True)
def keep_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_reported(monkeypatch)
