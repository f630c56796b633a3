"""Thousands of nested directories do not break the host's work on a sandbox's files."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity
from tests.support.places import ROOT
from tests.support.sandboxes import Start
from tests.support.trees import nest

DEPTH = 1200
"""Deeper than Python recurses. With names of four letters, the path is longer than the kernel takes."""
NEST = (
    "import os\nfor place in ('/tmp', '/app', '/usr'):\n  os.makedirs(place, exist_ok=True); os.chdir(place)\n"
    f"  for i in range({DEPTH}): os.mkdir('deep'); os.chdir('deep')"
)


def gone() -> str:
    """Returns the directory name of an owner whose process has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = Identity.of(process.pid)
        process.kill()
    return str(identity)


@pytest.mark.slow
async def test_a_sandbox_with_deep_trees_is_kept_read_reset_and_removed(start: Start, tmp_path: Path) -> None:
    nest(tmp_path / "deep", DEPTH, "deep")
    sandbox = await start(disk_mb=1000)
    made = await sandbox.exec(["python3", "-c", NEST], timeout_s=300)
    assert made.exit_code == 0, made.stderr
    with pytest.raises(SandboxError):
        await sandbox.download("/tmp", str(tmp_path / "in"))
    with pytest.raises(SandboxError):
        await sandbox.upload(str(tmp_path / "deep"), "/srv/deep")
    with suppress(SandboxError):
        await sandbox.snapshot(tmp_path / "kept")
    await sandbox.restart(change=lambda paths: None)
    assert (await sandbox.exec("cd /app/deep/deep && echo there")).stdout == "there\n"
    await sandbox.reset()
    assert (await sandbox.exec("ls -d /app /usr/deep 2>/dev/null | wc -l")).stdout == "0\n"
    await sandbox.exec(["python3", "-c", NEST], timeout_s=300)
    await sandbox.stop()
    assert not os.path.exists(sandbox.directory)
    assert set(os.listdir(tmp_path)) <= {"in", "deep", "kept"}
    for name in os.listdir(tmp_path):
        remove_tree(tmp_path / name)


def test_what_a_dead_owner_left_is_swept_however_deep(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    (scratch / "owners").mkdir(mode=0o700)
    owner = scratch / "owners" / gone()
    owner.mkdir()
    nest(owner / "s1", DEPTH, "deep")
    (owner / "s1" / "owner").write_bytes(b"\xff\xfe no identity\n")
    assert sweep(scratch)["left"] == 0
    assert os.listdir(scratch / "owners") == []


HELD = """
import os, subprocess, sys
from pathlib import Path
from megaflow_hpc.environments.sandbox.scratch import sweep
scratch = Path(sys.argv[1])
for owner in sys.argv[2:]:
    for name in ("m/held", *map(str, range(50))):
        (scratch / "owners" / owner / "s1" / name).mkdir(parents=True)
        (scratch / "owners" / owner / "s1" / name / "file").touch()
held = scratch / "owners" / sys.argv[2] / "s1" / "m" / "held"
subprocess.run(["mount", "-t", "tmpfs", "none", held], check=True)
counts = sweep(scratch)
left = sorted(str(path.relative_to(scratch / "owners")) for path in scratch.glob("owners/**/*"))
print(counts["owners"], counts["left"], *left)
"""


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    """A mount point cannot be removed."""
    if not unshare():
        pytest.skip("no user namespaces, in which an ordinary user may mount")
    scratch = tmp_path / "scratch"
    (scratch / "owners").mkdir(parents=True)
    for path in (scratch, scratch / "owners"):
        path.chmod(0o700)
    first, second = gone(), gone()
    argv = [*unshare(), "--mount", sys.executable, "-c", HELD, str(scratch), first, second]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert done.stdout.split() == ["2", "1", first, f"{first}/s1", f"{first}/s1/m", f"{first}/s1/m/held"], done.stderr
