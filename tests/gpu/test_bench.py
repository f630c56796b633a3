"""The benchmark for GPUs, with tiny sizes on a CPU: the same code, and what it does about parts that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import apart
from tests.support.torch_ranks import engine_python, run_ranks

BENCH = Path(__file__).with_name("bench.py")
WITHOUT_GPU = """
import contextlib, io, json
from tests.gpu import bench
with contextlib.redirect_stdout(io.StringIO()) as said:
    status = bench.main()
print(json.dumps([status, said.getvalue()]))
"""


def run(python: Path | str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run([python, BENCH, *arguments], capture_output=True, text=True, timeout=400, env=env)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_part_prints_its_result_at_once() -> None:
    status, lines = run(engine_python(), "--device", "cpu", "--small")
    found = {line["part"]: line for line in lines}
    assert status == 0, lines
    assert list(found)[:4] == ["machine", "product", "attention", "weights"]
    assert "error" in found["attention"]["varlen"]  # the kernel needs CUDA
    assert min(found["attention"]["loop"]["bits"].values()) > 6
    steps = [line for name, line in found.items() if name.startswith("step")]
    assert [step["tokens"] for step in steps] == [256, 256, 512, 256]
    for step in steps:
        assert step["mfu"] > 0
        assert step["tokens_per_s"] > 0
        assert "predicted_gb" in step


@pytest.mark.slow
def test_a_machine_without_a_gpu_or_torch_is_named(tmp_path: Path) -> None:
    status, said = run_ranks(WITHOUT_GPU, tmp_path)
    assert status == 2
    assert "finds no GPU; give --device cpu --small" in json.loads(said)["error"]
    status, (line,) = run(sys.executable)
    assert status == 2
    assert "No module named 'torch'" in line["error"]


FAILING = {
    "raises": (lambda: {}["x"], "KeyError: 'x'"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process ended: wait status 9"),
    "takes too long": (lambda: time.sleep(60), "took longer than 1 s"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_part_that_fails_prints_its_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    call, error = FAILING[name]
    apart(name, call, 1.0)  # type: ignore[arg-type]
    line = json.loads(capsys.readouterr().out)
    assert (line["part"], line["error"]) == (name, error)
