"""What a node can do is found out, and each kind of node is used in its own way; real kernels refuse where they are
told to, in a namespace of the test's own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.images.cache.shelf import Room
from megaflow_hpc.environments.sandbox import probe
from megaflow_hpc.environments.sandbox.rootfs.access import choose
from megaflow_hpc.environments.sandbox.rootfs.mounts import mount, sweep_mounts
from megaflow_hpc.environments.sandbox.scratch import file_system, kind_of, scratch_base
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, descendants
from megaflow_hpc.types import ExecResult
from tests.support.namespaces import fuse_overlay, restricted

GB = 10**9
IMAGE = Room(GB // 2, 15_000)
PLENTY = Room(100 * GB, 10_000_000)

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


# --- which form an image is used in ---------------------------------------------------------------------------------


def test_an_image_that_is_used_often_is_unpacked_and_one_that_is_used_once_is_mounted() -> None:
    often, _ = choose(IMAGE, PLENTY, 1000, can_mount=True, can_direct=True)
    once, why = choose(IMAGE, PLENTY, 1, can_mount=True, can_direct=True)
    assert (often, once) == ("tree", "mount")
    assert "unpacking would take" in why


def test_the_form_changes_exactly_once_as_more_starts_are_expected() -> None:
    forms = [choose(IMAGE, PLENTY, n, can_mount=True, can_direct=True)[0] for n in range(200)]
    assert forms == sorted(forms)  # "mount" before "tree"
    assert set(forms) == {"mount", "tree"}


@pytest.mark.parametrize("room", [Room(GB // 4, 10_000_000), Room(100 * GB, 10_000)], ids=["bytes", "inodes"])
def test_an_image_that_does_not_fit_is_not_unpacked_however_often_it_is_used(room: Room) -> None:
    assert choose(IMAGE, room, 10**6, can_mount=True, can_direct=True)[0] == "mount"
    assert choose(IMAGE, room, 10**6, can_mount=False, can_direct=True)[0] == "direct"


def test_without_a_way_to_mount_images_are_unpacked() -> None:
    assert choose(IMAGE, Room(1, 1), 1, can_mount=False, can_direct=False)[0] == "tree"


def test_scratch_in_memory_gives_images_a_quarter_of_its_room() -> None:
    room = Room(GB, 10_000_000)
    assert choose(IMAGE, room, 10**6, can_mount=True, can_direct=True)[0] == "tree"
    form, why = choose(IMAGE, room, 10**6, scratch="memory", can_mount=True, can_direct=True)
    assert form == "mount"
    assert "memory" in why


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


def test_an_unknown_fuse_file_system_counts_as_remote() -> None:
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


def test_a_diskless_node_falls_back_on_memory(tmp_path: Path) -> None:
    mounts = "1 0 1:1 / / rw - nfs4 root:/ rw\n2 1 0:2 / /dev/shm rw - tmpfs x rw\n"
    assert scratch_base({"TMPDIR": str(tmp_path)}, mounts)[0] == "/dev/shm"


@pytest.fixture
def memory_scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="megaflow-test-", dir="/dev/shm"))
    yield path
    remove_tree(path)


def test_what_a_sandbox_writes_on_scratch_in_memory_counts_as_its_memory(rootfs: str, memory_scratch: Path) -> None:
    async def main() -> tuple[ExecResult, ExecResult]:
        async with ApptainerProvider(memory_scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs, memory_mb=60, disk_mb=500)) as sandbox:
                small = await sandbox.exec("head -c 5000000 /dev/zero > /var/small; sleep 1; echo kept")
                fill = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /var/f$i || exit; done"
                return small, await sandbox.exec(fill, timeout_s=60)

    small, filled = asyncio.run(main())
    assert (small.stdout, small.breach) == ("kept\n", "")
    assert filled.breach.startswith("memory limit: ")


# --- what the node can do -------------------------------------------------------------------------------------------


NO_NETWORKS = "echo 0 > /proc/sys/user/max_net_namespaces"
PROBE = (
    "import json, sys; from dataclasses import asdict; from megaflow_hpc.environments.sandbox import probe;"
    "print(json.dumps(asdict(probe.probe(sys.argv[1]))))"
)


def test_this_node_is_asked_by_a_real_container_and_nothing_is_left(tmp_path: Path) -> None:
    found = probe.probe(tmp_path)
    assert (found.container, found.overlay, found.private_network, found.gateway) == ("", "", "", "")
    assert found.overlay_by == "kernel"
    assert not found.setuid
    assert [found.refuses(network) for network in ("none", "gateway", "host")] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


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


def test_a_kernel_without_network_namespaces_is_found_out(tmp_path: Path) -> None:
    done = restricted(NO_NETWORKS, "-c", PROBE, str(tmp_path))
    found = probe.Site(**json.loads(done.stdout))
    assert "max_net_namespaces" in found.private_network
    assert found.refuses("gateway")
    assert found.refuses("host") == ""


def test_scratch_that_takes_no_overlay_is_found_out_and_copies_are_left(tmp_path: Path) -> None:
    """An overlay cannot lie on an overlay; without FUSE sandboxes are copies of their images."""
    for name in ("l", "u", "w", "m"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/l,upperdir={tmp_path}/u,workdir={tmp_path}/w,userxattr"
    done = restricted(f"mount -t overlay overlay -o {options} {tmp_path}/m", "-c", PROBE, str(tmp_path / "m"))
    found = probe.Site(**json.loads(done.stdout))
    remove_tree(tmp_path / "w")
    assert found.container == ""
    assert found.overlay_by != "kernel"
    if fuse_overlay():
        assert (found.overlay, found.overlay_by) == ("", "fuse-overlayfs")
    else:  # Apptainer's last words are those of what it tried last
        assert ("fuse" if shutil.which("fuse-overlayfs") else "mounting overlay") in found.overlay
        assert (found.copy, found.refuses("host")) == ("", "")
        without = replace(found, copy="scratch is read-only")
        assert without.refuses("host").startswith("no writable layer: ")
        assert without.refuses("host").endswith("no copy of an image: scratch is read-only")


@pytest.mark.slow
def test_a_campaign_that_demands_what_the_site_cannot_give_is_refused(tmp_path: Path, rootfs: str) -> None:
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (task / "instruction.md").write_text("Do nothing.\n")
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "org/base:1"\n')
    (tmp_path / "scratch").mkdir()
    campaign = tmp_path / "campaign.yaml"

    def plan(network: str, **environ: str) -> subprocess.CompletedProcess[str]:
        campaign.write_text(
            f"name: c\ntasks: {task}\nagent: nop\n"
            f"environment: {{network: {network}, images: {{'org/base:1': {rootfs}}}}}\n"
        )
        scratch = str(tmp_path / "scratch")
        return restricted(NO_NETWORKS, "-m", "megaflow_hpc", "plan", str(campaign), MEGAFLOW_SCRATCH=scratch, **environ)

    refused = plan("gateway")
    assert refused.returncode == 3
    assert "network 'gateway' of a sandbox cannot be had" in refused.stderr
    assert "use environment.network host" in refused.stderr
    assert not (tmp_path / "runs").exists()
    assert plan("host").returncode == 0
    assert plan("gateway", MEGAFLOW_SITE_CHECK="0").returncode == 0


def test_an_apptainer_without_its_setuid_starter_is_not_setuid(tmp_path: Path) -> None:
    starter = tmp_path / "apptainer" / "bin" / "starter-suid"
    starter.parent.mkdir(parents=True)
    starter.touch()
    starter.chmod(0o4755)  # the bit, but not root's
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho PREFIX=/usr\necho LIBEXECDIR={tmp_path}\n")
    program.chmod(0o755)
    assert not probe.is_setuid(str(program))
    assert not probe.is_setuid(find_apptainer())


# --- one mount for all sandboxes of a job ---------------------------------------------------------------------------


def test_sandboxes_share_one_mount_that_ends_when_nobody_uses_it(
    base_sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where FUSE is closed to users, a demand for it is refused with that reason."""
    monkeypatch.setenv("MEGAFLOW_IMAGE_FORM", "mount")
    why_not = probe.why_no_mount("")

    async def main() -> tuple[list[str], int, int]:
        async with ApptainerProvider(tmp_path / "scratch") as provider:
            sandboxes = [await provider.start(SandboxSpec(str(base_sif), user=user)) for user in (None, None, "agent")]
            script = "echo mine > /etc/mine && cat /etc/mine && ls /etc/passwd"
            said = [(await sandbox.exec(script)).stdout for sandbox in sandboxes]
            await sandboxes[0].kill_processes()
            said.append((await sandboxes[0].exec("cat /etc/mine")).stdout)
            held = sweep_mounts(provider.scratch)
            return said, len(list((tmp_path / "scratch" / "mounts").iterdir())), held

    if why_not:
        with pytest.raises(SandboxError, match=r"cannot be mounted.*(fuse|not on PATH)"):
            asyncio.run(main())
        return
    said, mounts, held = asyncio.run(main())
    assert said == ["mine\n/etc/passwd\n"] * 3 + ["mine\n"]
    assert (mounts, held) == (1, 0)
    assert list((tmp_path / "scratch" / "mounts").iterdir()) == []


def test_a_sandbox_whose_mount_is_lost_is_lost_to_the_infrastructure(
    base_sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where FUSE is closed to users there is no mount to lose; what is left to show is that none is made."""
    monkeypatch.setenv("MEGAFLOW_IMAGE_FORM", "mount")

    async def main() -> str:
        async with ApptainerProvider(tmp_path / "scratch") as provider:
            lost = await provider.start(SandboxSpec(str(base_sif)))
            home = next((tmp_path / "scratch" / "mounts").iterdir())
            holder = Identity.parse((home / "holder").read_text().strip())
            assert holder is not None
            assert holder.kill()
            with pytest.raises(SandboxError, match="the mount of the image has ended"):
                await lost.exec(["/usr/bin/gzip", "--version"], timeout_s=3)
            fresh = await provider.start(SandboxSpec(str(base_sif)))
            return (await fresh.exec("echo again")).stdout

    if probe.why_no_mount(""):
        with pytest.raises(SandboxError, match="cannot be mounted"):
            asyncio.run(main())
        assert not list((tmp_path / "scratch").glob("mounts/*/holder"))
        return
    assert asyncio.run(main()) == "again\n"


def test_a_mount_that_cannot_be_made_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "no.sif").write_bytes(b"nothing" * 1000)
    before = set(descendants(os.getpid()))  # a mount that another test used ends a minute later
    with pytest.raises(SandboxError, match=r"no\.sif: cannot be mounted"):
        mount(str(tmp_path / "no.sif"), 4096, "key", tmp_path)
    left = set(descendants(os.getpid())) - before
    assert [pid for pid in left if "squashfuse" in Path(f"/proc/{pid}/comm").read_text()] == []
    assert sweep_mounts(tmp_path) == 1


def test_scratch_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="nowhere: not writable"):
        probe.probe(tmp_path / "nowhere")
