"""The probe of a node, and each kind of node. Real kernels refuse features in a namespace of the test."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox import probe
from megaflow_hpc.environments.sandbox.scratch import file_system, kind_of, scratch_base
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from tests.support.namespaces import restricted
from tests.support.sandboxes import host_pid

MOUNTS = """\
21 1 259:1 / / rw,relatime - ext4 /dev/sda1 rw
30 21 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 21 0:41 / /scratch rw,relatime - lustre mds@tcp:/scratch rw
32 31 0:42 / /scratch/local rw,relatime - xfs /dev/nvme0n1 rw
33 21 0:43 / /gpfs/my\\040data rw - gpfs data rw
34 21 0:44 / /ram rw - tmpfs tmpfs rw
35 21 0:45 / /remote rw - fuse.sshfs other: rw
36 35 0:46 / /remote rw - ext4 /dev/sdb rw
"""


# --- scratch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "type_", "kind"),
    [
        ("/tmp/x", "ext4", "disk"),
        ("/home/me", "nfs4", "network"),
        ("/homestead", "ext4", "disk"),
        ("/scratch/me", "lustre", "network"),
        ("/scratch/local/me", "xfs", "disk"),
        ("/gpfs/my data/x", "gpfs", "network"),
        ("/ram", "tmpfs", "memory"),
        ("/remote/x", "ext4", "disk"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_last_mount_above_it(path: str, type_: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == type_
    assert kind_of(type_) == kind
    assert kind_of("fuse.sshfs") == "network"


def test_scratch_on_a_network_file_system_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    local.mkdir()
    mounts = f"1 0 1:1 / / rw - ext4 x rw\n2 1 0:2 / {remote} rw - nfs4 s:/ rw\n"
    environ = {"MEGAFLOW_SCRATCH": str(remote), "TMPDIR": str(local)}
    base, warning = scratch_base(environ, mounts)
    assert base == str(local)
    assert f"MEGAFLOW_SCRATCH={remote} is on nfs4" in warning
    assert scratch_base({"TMPDIR": str(local)}, mounts) == (str(local), "")
    base, warning = scratch_base({"MEGAFLOW_SCRATCH": str(local)}, "1 0 1:1 / / rw - nfs4 root:/ rw\n")
    assert base == str(local)
    assert f"MEGAFLOW_SCRATCH={local} is on nfs4" in warning
    assert "copies" in warning
    base, warning = scratch_base({"MEGAFLOW_SCRATCH": "/proc/none", "TMPDIR": str(local)}, mounts)
    assert (base, warning) == (str(local), f"MEGAFLOW_SCRATCH=/proc/none is not a directory; {local} is used instead")


def test_a_diskless_node_falls_back_on_memory() -> None:
    mounts = "1 0 1:1 / / rw - nfs4 root:/ rw\n2 1 0:2 / /dev/shm rw - tmpfs x rw\n"
    assert scratch_base({"TMPDIR": "/tmp"}, mounts)[0] == "/dev/shm"


@pytest.fixture
def memory_scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="megaflow-test-", dir="/dev/shm"))
    yield path
    remove_tree(path)


async def test_what_a_sandbox_writes_on_scratch_in_memory_counts_as_its_memory(
    rootfs: str, memory_scratch: Path
) -> None:
    async with ApptainerProvider(memory_scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs, memory_mb=60, disk_mb=500)) as sandbox:
            small = await sandbox.exec("head -c 5000000 /dev/zero > /var/small; sleep 1; echo kept")
            fill = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /var/f$i || exit; done"
            filled = await sandbox.exec(fill, timeout_s=60)
    assert (small.stdout, small.breach) == ("kept\n", "")
    assert filled.breach.startswith("memory limit: ")


async def test_sandboxes_on_scratch_in_memory_are_clones(busybox_rootfs: str, memory_scratch: Path) -> None:
    image = str(memory_scratch / "image")
    shutil.copytree(busybox_rootfs, image, symlinks=True)
    async with ApptainerProvider(memory_scratch) as provider:
        for is_clone in (False, True):
            async with await provider.start(SandboxSpec(image)) as sandbox:
                assert (await sandbox.exec("ls /dev/shm; echo here")).stdout == "here\n"
                assert (host_pid(sandbox) == sandbox.pid) == is_clone


# --- what the node can do -------------------------------------------------------------------------------------------


NO_NETWORKS = "echo 0 > /proc/sys/user/max_net_namespaces"
PROBE = (
    "import json, sys; from dataclasses import asdict; from megaflow_hpc.environments.sandbox import probe;"
    "print(json.dumps(asdict(probe.probe(sys.argv[1]))))"
)


def test_a_node_is_asked_once_and_again_when_apptainer_changed(tmp_path: Path) -> None:
    found = probe.cached(tmp_path)
    place = tmp_path / "site.json"
    kept = json.loads(place.read_text())
    kept["site"]["kernel"] = "as it was kept"
    place.write_text(json.dumps(kept))
    assert probe.cached(tmp_path) == replace(found, kernel="as it was kept")
    kept["stamp"][3] += 1  # apptainer's time of change
    place.write_text(json.dumps(kept))
    assert probe.cached(tmp_path) == found
    place.write_text("{half a fi")
    assert probe.cached(tmp_path) == found


def test_a_node_whose_fault_was_mended_is_not_refused_until_it_reboots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the site lifts AppArmor's restriction, which it was told to do."""
    found = probe.cached(tmp_path)
    (tmp_path / "site.json").unlink()
    monkeypatch.setattr(probe, "probe", lambda *_: replace(found, container="AppArmor restricts it"))
    with pytest.raises(SiteError, match="AppArmor restricts it"):
        probe.require(["none"], tmp_path)
    monkeypatch.setattr(probe, "probe", lambda *_: found)
    probe.require(["none"], tmp_path)
    assert probe.cached(tmp_path) == found


@pytest.mark.slow
def test_a_campaign_that_demands_what_the_site_cannot_give_is_refused(tmp_path: Path, rootfs: str) -> None:
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (task / "instruction.md").write_text("Do nothing.\n")
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "org/base:1"\n')
    (tmp_path / "scratch").mkdir()
    campaign = tmp_path / "campaign.yaml"

    def plan(network: str, slurm: str = "{}") -> subprocess.CompletedProcess[str]:
        campaign.write_text(
            f"name: c\ntasks: {task}\nagent: nop\nslurm: {slurm}\n"
            f"environment: {{network: {network}, images: {{'org/base:1': {rootfs}}}}}\n"
        )
        scratch = str(tmp_path / "scratch")
        return restricted(NO_NETWORKS, "-m", "megaflow_hpc", "plan", str(campaign), MEGAFLOW_SCRATCH=scratch)

    refused = plan("gateway")
    assert refused.returncode == 3
    assert "network 'gateway' of a sandbox is unavailable" in refused.stderr
    assert "use environment.network host" in refused.stderr
    assert not (tmp_path / "runs").exists()
    assert plan("host").returncode == 0
    lifted = plan("gateway", "{check: false}")
    assert lifted.returncode == 0
    assert "network 'gateway' of a sandbox is unavailable" in lifted.stderr


def test_an_apptainer_without_its_setuid_starter_is_not_setuid(tmp_path: Path) -> None:
    starter = tmp_path / "apptainer" / "bin" / "starter-suid"
    starter.parent.mkdir(parents=True)
    starter.touch()
    starter.chmod(0o4755)  # it has the bit, but root does not own it
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho PREFIX=/usr\necho LIBEXECDIR={tmp_path}\n")
    program.chmod(0o755)
    assert not probe.is_setuid(str(program))
    assert not probe.is_setuid(find_apptainer())


def test_scratch_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="nowhere: not writable"):
        probe.probe(tmp_path / "nowhere")
