"""What the launchers provide to the suite by environment variables."""

from __future__ import annotations

import os

import pytest

REMEDY = "run the suite with launchers/test, which provides it"


def required(variable: str) -> str:
    """The value of an environment variable; the test fails with the remedy where it is not set."""
    value = os.environ.get(variable, "")
    if not value:
        pytest.fail(f"{variable} is not set; {REMEDY}")
    return value
