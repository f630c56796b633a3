"""Run a program as another user of this machine: a subordinate uid in a user namespace on the same network.

For the kernel this user is a stranger: it owns none of our files and shares no group with us. It needs ``newuidmap``
(Debian's ``uidmap``) and a range in /etc/subuid, which ``useradd`` gives every user.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = ["unshare", "--user", "--map-root-user", "--map-auto", "setpriv", "--reuid=1000", "--regid=1000"]
PROBE = "import os; print(os.stat('/proc/self').st_uid)"


def as_second_user(program: str, told: Any, member: bool = False, python: str | None = None) -> Any:
    """Run a Python program that gets ``told`` on stdin and prints JSON.

    Args:
        member: the user is in our group.
        python: an interpreter that the user may run; by default the system's, without our libraries.
    """
    python = python or shutil.which("python3", path="/usr/bin:/bin") or pytest.fail("/usr/bin/python3 is missing")
    groups = "--groups=0" if member else "--clear-groups"  # uid 0 in the namespace is our own
    command = [*COMMAND, groups, "--inh-caps=-all", "--bounding-set=-all", python, "-c", program]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stderr}\n(needs newuidmap and a range in /etc/subuid)"
    return json.loads(done.stdout)


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory that other users may enter; pytest's own directories are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="megaflow-shared."))
    folder.chmod(0o711)
    yield folder
    subprocess.run(
        [*COMMAND[:4], "rm", "-rf", "--", str(folder)], check=True
    )  # includes files that the other user left there
