"""The trainer's loop in docs/how-to/training.md trains, and continues after a SIGKILL as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaflow_hpc.training.plan import TrainingFiles
from tests.docs.blocks import ROOT, blocks
from tests.support.training import Pods, meanwhile, training_run


@pytest.mark.slow
def test_the_loop_of_the_docs_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "training.md"
    (tmp_path / "my_trainer.py").write_text(
        next(block.source for block in blocks(page) if block.title == "my_trainer.py")
    )
    run = training_run(tmp_path / "run", {"staleness": 0, "batch": 2, "steps": 6}, tasks=3, samples=2)
    command = [sys.executable, "my_trainer.py", "run"]  # a relative path, as people type it
    with meanwhile(Pods(run).work):
        first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        files = TrainingFiles(run, "default")
        while (commit := files.committed()) is None or commit.step < 2:
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
        first.wait()
        kept = files.committed(with_checkpoint=True)
        assert kept is not None
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert second.returncode == 0, second.stderr
    lines = second.stdout.splitlines()
    if kept.step < 6:
        assert lines[0] == f"continues after step {kept.step}"
        assert lines[1].startswith(f"<Step {kept.step + 1}: 4 rollouts in 2 groups, ")
    final = files.committed()
    assert final is not None
    assert final.step == 6
    assert (run.path / str(final.checkpoint) / "logits.npy").is_file()
