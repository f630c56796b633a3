"""The batch scripts learn how a child process ended, whatever signals arrive meanwhile."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.places import ROOT

STATUSES = (0, 7, 127, 140)
"""Own statuses of children: 127 is also what ``wait`` returns for an unknown child, and 140 after SIGUSR2."""
CHILDREN = 120
SCRIPT = """\
set -u
sleep() { command sleep 0.005; }  # children end at once
trapped=0 child=$$
trap 'trapped=$((trapped + 1)); kill -TERM "$child" 2>/dev/null' USR2
trap : TERM
for ((n = 0; n < $1; n++)); do
    for expected in $2; do
        (trap '' TERM; for _ in 1 2 3 4 5; do kill -USR2 $$; done; exit "$expected") &
        child=$!
        outcome "$child"
        status=$?
        [ "$status" -eq "$expected" ] || echo "$status instead of $expected"
    done
done
[ "$trapped" -ge "$1" ] || echo "only $trapped traps"
(kill -TERM $BASHPID) &
outcome $!
echo "killed: $?"
"""


@pytest.mark.parametrize("variables", [{}, {"POSIXLY_CORRECT": "1"}])
def test_a_child_that_ends_during_a_trap_keeps_its_own_status(variables: dict[str, str]) -> None:
    text = (ROOT / "megaflow_hpc" / "slurm" / "requeue.sh").read_text().replace("@REQUEUES@", "requeues=yes")
    done = subprocess.run(
        ["bash", "-c", text + SCRIPT, "test", str(CHILDREN // len(STATUSES)), " ".join(map(str, STATUSES))],
        env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "killed: 143\n", done.stderr
