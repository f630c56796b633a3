"""Predicted memory compared with torch's count of the real trainer's tensors, in the engine's environment."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.places import ROOT
from tests.support.torch_ranks import engine_python

pytestmark = pytest.mark.slow


def test_predicted_memory_is_within_a_tenth_of_what_torch_counts() -> None:
    """``python -m tests.bench.memory`` compares whole models; here they have two layers and short rows."""
    models = ["--model", "Qwen3-0.6B", "Qwen3-30B-A3B"]
    sizes = ["--layers", "2", "--tokens", "2048", "--gpus", "1", "8"]
    result = subprocess.run(
        [engine_python(), "-m", "tests.bench.memory", "--json", *models, *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    cases = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(cases) == 7
    off = {json.dumps(case): case["predicted"] / case["tracked"] - 1 for case in cases}
    assert {case: error for case, error in off.items() if abs(error) > 0.1} == {}
