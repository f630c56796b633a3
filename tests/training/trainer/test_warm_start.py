"""Training on demonstrations before any rollout exists: the command, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.torch_ranks import engine_python, run_ranks

pytestmark = pytest.mark.slow  # each waits for torch

MAKE = """
import json
from pathlib import Path
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.warm_start import answers

make(Path("tiny"), layers=1)
found = answers(Path("tiny"), Path("demonstrations.jsonl"))
errors = []
for name in ("empty", "bad"):
    try:
        answers(Path("tiny"), Path(f"{name}.jsonl"))
    except ConfigError as error:
        errors.append(str(error))
print(json.dumps([[len(tokens) > first > 0 for tokens, first in found], [tokens for tokens, _ in found], errors]))
"""


def warm_start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [engine_python(), "-m", "megaflow_hpc.training.trainer.warm_start", "tiny", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def test_a_model_learns_demonstrations(tmp_path: Path) -> None:
    turns = [("user", "add 1 2"), ("assistant", "3"), ("user", "add 2 2"), ("assistant", "4")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "demonstrations.jsonl").write_text(f"{line}\n" * 4)
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    are_answers, tokens, (empty, bad) = run_ranks(MAKE, tmp_path)
    assert are_answers == [True] * 8, "each message of the assistant is one"
    assert tokens[1][: len(tokens[0])] == tokens[0], "the second extends the first"
    assert "empty.jsonl: has no message of an assistant" in empty
    assert "bad.jsonl:1: KeyError('messages'); expected" in bad
    done = warm_start(
        tmp_path, "demonstrations.jsonl", "out", "--epochs=4", "--batch=4", "--lr=3e-3", "--dtype=float32",
        "--microbatch=100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert [path.name for path in tmp_path.glob(".out*")] == []
    assert "out: exists already" in warm_start(tmp_path, "demonstrations.jsonl", "out").stderr
