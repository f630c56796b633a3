"""Environment variables through which the launchers provide the suite's requirements."""

from __future__ import annotations

import os

import pytest

REMEDY = "run the suite with launchers/test, which provides it"


def required(variable: str) -> str:
    """Return the value of an environment variable. The test fails with the remedy if it is not set."""
    value = os.environ.get(variable, "")
    if not value:
        pytest.fail(f"{variable} is not set; {REMEDY}")
    return value
