"""Real engines for tests: the interpreter that has them, and one small model."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from array import array
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
    """A model directory with random weights. Creating it imports torch, so all workers share one."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "tiny.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tiny").exists():
            subprocess.run([interpreter, TINY_MODEL, str(folder / "tiny")], check=True, timeout=300)
    return folder / "tiny"


@pytest.fixture(scope="session")
def other_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with the numbers of every tensor in reverse order."""
    return reversed_weights(tiny_model, tmp_path_factory.mktemp("other") / "tiny")


def reversed_weights(original: Path, model: Path) -> Path:
    """Copy a model to the new directory ``model``, with the numbers of every tensor in reverse order."""
    shutil.copytree(original, model)
    for file in model.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for name, tensor in json.loads(content[8:start]).items():
            if name != "__metadata__":
                assert tensor["dtype"] == "F32"
                part = slice(*(start + offset for offset in tensor["data_offsets"]))
                content[part] = array("f", bytes(content[part]))[::-1].tobytes()
        file.write_bytes(content)
    return model
