"""File systems: what mountinfo says of them, and whether they make hard links."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.mounts import mount_of, refusal_of_links, why_no_links
from megaflow_hpc.rundir.layout import RunDir

MOUNTS = """\
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
30 22 0:40 / /home rw,nosuid shared:9 - nfs4 server:/home rw,vers=4.2,nocto,acregmin=120,acregmax=300,acdirmax=90
31 22 0:41 / /work rw - nfs4 server:/work rw,vers=4.2
32 22 0:42 / /daos rw - fuse.daos dfuse rw,user_id=0
"""


def test_options_of_a_mount_and_of_its_file_system_are_read() -> None:
    home = mount_of("/home/me", MOUNTS)
    assert (home.point, home.type, home.device, home.cached_s()) == ("/home", "nfs4", "server:/home", 300)
    assert {"nosuid", "nocto"} <= set(home.options)
    assert mount_of("/work/x", MOUNTS).cached_s() == 60
    assert mount_of("/daos/x", MOUNTS).type == "fuse.daos"
    assert mount_of("/nowhere", "").type == ""


def test_a_file_system_with_hard_links_is_left_as_it_was(tmp_path: Path) -> None:
    assert why_no_links(tmp_path) == refusal_of_links(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_without_hard_links_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(source), None, str(target))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError) as refused:
        RunDir(tmp_path / "run").create()
    assert str(refused.value).startswith(
        f"run directory {tmp_path}/run: its file system ({mount_of(tmp_path).type} at "
    )
    assert "has no hard links (Operation not supported), which pods need to claim work; DAOS, SMB and sshfs" in str(
        refused.value
    )
    assert list((tmp_path / "run").iterdir()) == []
