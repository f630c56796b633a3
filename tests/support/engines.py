"""Real engines for tests: the interpreter that has them, and one small model."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import engine_python, run_ranks

MAKE = """
import json, sys
from pathlib import Path
from launchers.tiny_model import make
print(json.dumps(make(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
"""


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The Python of the virtual environment with vLLM and Transformers."""
    return str(engine_python())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights. Creating it imports torch, so all workers share one."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "tiny.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tiny").exists():
            make_model(folder / "tiny")
    return folder / "tiny"


def make_model(folder: Path, **options: Any) -> Path:
    """Make a model directory as ``launchers/tiny_model.py`` does, with random weights."""
    run_ranks(MAKE, folder.parent, folder, json.dumps(options))
    return folder


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
