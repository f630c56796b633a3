"""What a whole campaign is said to take, its own and a peer's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.campaign_peers import LeftOut, run_measured

WORK_S = 0.3
ORPHAN = f"""
import os, subprocess, sys, time
if sys.argv[1:]:
    while time.process_time() < {WORK_S}:
        pass
    print("done", flush=True)
else:
    subprocess.Popen([sys.executable, __file__, "again"], start_new_session=True)
    os._exit(0)
"""


def test_the_processor_time_of_processes_whose_parents_have_gone_counts(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    printed, wall_s, cpu_s = run_measured([sys.executable, "orphan.py"], tmp_path, {})
    assert printed == "done\n"
    assert wall_s > 0
    assert cpu_s >= WORK_S


def test_a_command_that_fails_is_left_out_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match="ended with 3: why it cannot run here"):
        run_measured(["sh", "-c", "echo why it cannot run here >&2; exit 3"], tmp_path, {})
