"""The free space that file system and quotas leave. Scripts stand in for the quota programs."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.disk_quota import QUOTA_TIMEOUT_S, disk_quota, quotas
from megaflow_hpc.host.mounts import mount_of


def test_the_narrowest_limit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    found = os.statvfs(tmp_path)
    free = disk_quota(tmp_path / "not" / "there")
    assert free.path == str(tmp_path)
    assert free.bytes_by == "the file system"
    assert free.free_bytes == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)

    def prints(name: str, text: str, status: int = 0) -> None:
        (programs / name).write_text(f"#!/bin/sh\nprintf %s {shlex.quote(text)}\nexit {status}\n")
        (programs / name).chmod(0o755)

    device = mount_of(tmp_path).device
    head = "Disk quotas for user x (uid 1):\n Filesystem blocks quota limit grace files quota limit grace\n"
    prints("quota", f"{head}/dev/other 1 2 3 0 1 2 3 0\n{device} 1000 1500 2000 0 90 0 100 0\n")
    limited = disk_quota(tmp_path)
    assert (limited.free_bytes, limited.bytes_by) == (1000 * 1024, "quota")
    assert (limited.free_inodes, limited.inodes_by) == (10, "quota")
    prints("quota", f"{head}{device} 3000* 1500 2000 6days 90 0 0 0\n", status=1)
    over = disk_quota(tmp_path)
    assert (over.free_bytes, over.inodes_by) == (0, "the file system")
    prints("quota", "quota: nonsense\n", status=2)
    assert disk_quota(tmp_path).bytes_by == "the file system"
    assert QUOTA_TIMEOUT_S < 10


def test_lustre_is_asked_by_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lfs").write_text(
        "#!/bin/sh\n[ \"$1 $2 $3\" = 'quota -q -u' ] || exit 1\n"
        "printf '  /lustre/a/very/long/name\\n          512  0  1024  -  7  0  0  -\\n'\n"
    )
    (tmp_path / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list(quotas(tmp_path, "10.0.0.1@tcp:/lustre", "lustre")) == [("lfs quota", 512 * 1024, math.inf)]
