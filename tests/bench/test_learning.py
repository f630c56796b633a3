"""A killed benchmark leaves no processes behind."""

from __future__ import annotations

import subprocess
import sys

from tests.support.dying_ranks import is_gone
from tests.support.places import ROOT
from tests.support.waiting import until

STARTS = """
import subprocess, time
from tests.support.processes import descendants_end_with_this
with descendants_end_with_this("TEST_OF_LEARNING"):
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_has_started_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        started = int(process.stdout.readline())
        process.kill()
    until(lambda: is_gone(started), "the end of its process", 120)
