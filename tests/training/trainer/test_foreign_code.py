"""A model directory with its own Python code: the trainer loads it without running the code and without a prompt."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.torch_ranks import engine_python

LOAD = """
import sys
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.model import load
try:
    load(sys.argv[1])
except ConfigError as error:
    sys.exit(f"refused: {error}")
"""
CODE = """
import pathlib
pathlib.Path("{mark}").write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.engine
def test_no_code_of_a_model_is_run_whatever_is_typed(tmp_path: Path) -> None:
    model, mark = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "own.py").write_text(CODE.format(mark=mark))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["Own"], "auto_map": names}))
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 5)  # a user could answer yes to a prompt among many lines
    try:
        done = subprocess.run(
            [engine_python(), "-c", LOAD, model],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")},
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert not mark.exists()
    assert "refused: " in done.stderr, done.stderr
    assert "its own Python code" in done.stderr
    assert "[y/N]" not in done.stdout


def test_every_model_that_is_loaded_is_loaded_without_code_of_its_own() -> None:
    found = []
    for path in [*(ROOT / "megaflow_hpc").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained":
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                found.append((path.name, given.get("trust_remote_code")))
    assert found
    assert {value for _, value in found} == {"False"}, found
