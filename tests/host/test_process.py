"""Identity and state of this machine's processes."""

from __future__ import annotations

import subprocess
import sys
import time

from megaflow_hpc.host.process import argv, exiting

ALLOCATES = "import sys\nkept = b'x' * 400_000_000\nprint(flush=True)\nsys.stdin.read()"


def test_a_process_that_ends_is_known_for_it_before_it_has_lost_its_argv() -> None:
    """Freeing memory takes long. Meanwhile argv is empty, but the process is not yet a zombie."""
    seen = False
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        assert not exiting(child.pid)
        child.kill()
        end = time.monotonic() + 30
        while not seen and time.monotonic() < end:
            if not argv(child.pid):
                with open(f"/proc/{child.pid}/stat", "rb") as file:
                    state = file.read().rpartition(b")")[2].split()[0]
                assert exiting(child.pid)
                if state == b"Z":
                    break
                seen = True
        child.communicate()
        assert exiting(child.pid)
        if seen:
            break
    assert seen
