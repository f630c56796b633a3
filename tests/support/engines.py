"""Real engines for tests: the interpreter that has them, and one small model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.places import TINY_MODEL


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The Python of the virtual environment with vLLM and Transformers."""
    venv = os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not venv:
        pytest.fail("MEGAFLOW_ENGINE_VENV is not set; run the suite with launchers/test, which provides it")
    return str(Path(venv) / "bin" / "python")


@pytest.fixture(scope="session")
def tiny_model(interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights; making it takes an import of torch, so it is made once."""
    model = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([interpreter, TINY_MODEL, str(model)], check=True, timeout=300)
    return model
