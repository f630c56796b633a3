"""A model directory with its own Python code: the trainer loads it without running the code and without a prompt."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.torch_ranks import run_ranks

LOAD = """
import io, json, os, pty, sys
from contextlib import redirect_stdout
from megaflow_hpc.training.trainer.model import load
from tests.support.trainer_scripts import refusal

ours, theirs = pty.openpty()
os.write(ours, b"y\\n" * 5)  # a user could answer yes to a prompt among many lines
os.dup2(theirs, 0)
sys.stdin, said = os.fdopen(theirs), io.StringIO()
with redirect_stdout(said):
    refused = refusal(lambda: load(sys.argv[1]))
print(json.dumps([refused, said.getvalue()]))
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
    refused, said = run_ranks(LOAD, tmp_path, model)
    assert not mark.exists()
    assert "its own Python code" in refused
    assert "[y/N]" not in said


def test_every_model_that_is_loaded_is_loaded_without_code_of_its_own() -> None:
    found = []
    for path in [*(ROOT / "megaflow_hpc").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")]:
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "from_pretrained" in text else ():
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained":
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                found.append((path.name, given.get("trust_remote_code")))
    assert found
    assert {value for _, value in found} == {"False"}, found
