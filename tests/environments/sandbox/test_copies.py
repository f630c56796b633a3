"""Sandboxes without an overlay: each writes to a copy of its image (busybox, which is copied fast)."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.images.layers.merging import OPAQUE_MARK
from megaflow_hpc.environments.sandbox.rootfs import copies
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.rootfs.writable import WritableLayer
from megaflow_hpc.environments.sandbox.snapshot import Snapshot, pack
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.steps import prepare, verify
from tests.support.harbor_tasks import write_task
from tests.support.namespaces import CLOSED, fuse_overlay, mount_overlay, restricted
from tests.support.sandboxes import Start


@pytest.fixture
def copied(busybox_rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts sandboxes that are copies."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay")
    return Start(busybox_rootfs, scratch)


# --- taking apart and laying out ------------------------------------------------------------------------------------


def image_of(root: Path) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "etc" / "deep").mkdir(parents=True)
    for name in ("bin/sh", "bin/grep", "etc/one", "etc/two", "etc/deep/three"):
        (root / name).write_text(f"{name} as it was")
    (root / "bin" / "link").symlink_to("sh")
    os.link(root / "etc" / "one", root / "etc" / "same")
    return root


def listing(root: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(root.rglob("*")):
        what: Any = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "directory"
        found[str(path.relative_to(root))] = (oct(path.lstat().st_mode), what)
    return found


def changed(root: Path) -> None:
    """Makes an agent's changes, including one that keeps size and time of a file."""
    before = (root / "bin" / "sh").stat()
    (root / "bin" / "sh").write_text("bin/sh as it wa!")
    os.utime(root / "bin" / "sh", ns=(before.st_atime_ns, before.st_mtime_ns))
    (root / "bin" / "grep").unlink()
    remove_tree(root / "etc" / "deep")
    (root / "etc" / "deep").write_text("a file now")
    (root / "bin" / "link").unlink()
    (root / "bin" / "link").mkdir()
    (root / "etc" / "two").chmod(0o600)
    (root / "new" / "er").mkdir(parents=True)
    (root / "new" / "er" / "file").write_text("new")


def test_what_is_taken_from_a_copy_and_laid_over_a_new_one_is_the_same(tmp_path: Path) -> None:
    image, layer = image_of(tmp_path / "image"), tmp_path / "layer"
    layer.mkdir()
    copies.lay_out(str(image), str(layer))
    copies.gather(str(image), str(layer))
    assert listing(layer / "upper") == {}, "nothing was changed"
    assert copies.lay_out(str(image), str(layer)) > 0
    assert listing(layer / "root") == listing(image)
    assert (layer / "root/etc/one").stat().st_ino != (image / "etc/one").stat().st_ino
    changed(layer / "root")
    after, original = listing(layer / "root"), listing(image)
    copies.gather(str(image), str(layer))
    assert sorted(name for name in listing(layer / "upper") if name.count("/") == 1) == [
        *("bin/.wh.grep", "bin/link", "bin/sh", "etc/deep", "etc/two", "new/er"),
    ]
    copies.lay_out(str(image), str(layer))
    assert listing(layer / "root") == after
    assert not (layer / "upper").exists()
    assert listing(image) == original


def test_an_overlays_layer_is_understood(tmp_path: Path) -> None:
    """Whiteouts of an overlay are devices 0/0. A directory that replaces another has an attribute."""
    image, layer = image_of(tmp_path / "image"), tmp_path / "layer"
    (layer / "upper" / "bin").mkdir(parents=True)
    (layer / "upper" / "etc").mkdir()
    os.mknod(layer / "upper" / "bin" / "grep", 0o020000, 0)
    (layer / "upper" / "etc" / "mine").write_text("mine")
    (layer / "upper" / "etc" / OPAQUE_MARK).touch()
    copies.lay_out(str(image), str(layer))
    assert sorted(listing(layer / "root")) == ["bin", "bin/link", "bin/sh", "etc", "etc/mine"]


def test_a_copy_that_does_not_fit_says_so_and_what_to_look_at(tmp_path: Path) -> None:
    image = image_of(tmp_path / "image")
    layer = WritableLayer(str(tmp_path / "layer"), Rootfs(str(image), lambda: None, copies=True))
    layer.make()
    (image / "large").write_bytes(b"x" * 2_000_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(SandboxError, match=r"image: cannot be copied for a sandbox at .*as much room on scratch"):
            asyncio.run(layer.ready())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "layer" / "root").exists()


# --- sandboxes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [None, "agent"], ids=["root", "user"])
async def test_a_sandbox_writes_to_a_copy_that_a_reset_renews(
    copied: Start, busybox_rootfs: str, user: str | None
) -> None:
    sandbox = await copied(user=user)
    first = (
        await sandbox.exec("echo x > /etc/mine; echo bad > /etc/passwd; rm /etc/profile; rm -r /opt; ls /etc; id -u")
    ).stdout
    await sandbox.kill_processes()
    kept = (await sandbox.exec("ls /etc; ls -d /opt; ls /sys/class/net | wc -l")).stdout
    await sandbox.reset()
    renewed = (await sandbox.exec("ls /etc; ls -d /opt; grep -c bad /etc/passwd")).stdout
    assert first.split()[-3:] == ["mine", "passwd", str(os.getuid() if user else 0)]
    assert kept.split()[:-1] == first.split()[:-1]
    assert renewed.split()[-4:] == ["passwd", "profile", "/opt", "0"]
    assert sorted(os.listdir(Path(busybox_rootfs, "etc"))) == ["passwd", "profile"]


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "packed"])
def test_snapshots_pass_between_copies_and_overlays(
    busybox_rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    change = "echo one > /new; mkdir /opt/d; rm /etc/profile; rm -r /root; mkdir /locked; "
    change += "echo in > /locked/f; chmod 0 /locked"
    look = "cat /new; ls -d /opt/d /etc/profile /root 2>/dev/null; stat -c %a /locked; ls -A /etc"

    async def through(writes: tuple[str, str, str]) -> list[str]:
        said: list[str] = []
        kept: Snapshot | None = None
        for number, kind in enumerate(writes):
            monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if kind == "copy" else "")
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(busybox_rootfs), kept) as sandbox:
                    if kept is None:
                        await sandbox.exec(change)
                    said.append((await sandbox.exec(look)).stdout)
                    kept = await sandbox.snapshot(tmp_path / "-".join((*writes, str(number))))
                    if packed:
                        with open(f"{kept.path}.tar", "wb") as file:
                            pack(kept, file.write, 1 << 20)
                        kept = replace(kept, path=file.name, offset=0)
        return said

    for writes in (("copy", "overlay", "copy"), ("overlay", "copy", "overlay")):
        first, second, third = asyncio.run(through(writes))
        assert first.splitlines()[:3] == ["one", "/opt/d", "0"]
        assert "profile" not in first
        assert first == second == third


@pytest.mark.slow
async def test_what_a_sandbox_writes_is_bounded_and_the_copy_itself_is_not_its_work(copied: Start) -> None:
    sandbox = await copied(disk_mb=3)  # the image alone is 2 MB
    small = await sandbox.exec("sleep 1; dd if=/dev/zero of=/small bs=1000 count=1000; sleep 2; echo kept")
    fill = "i=0; while :; do i=$((i+1)); dd if=/dev/zero of=/f$i bs=1000000 count=1 || exit; done"
    filled = await sandbox.exec(fill, timeout_s=60)
    assert (small.stdout, small.breach) == ("kept\n", "")
    assert filled.breach.startswith("disk limit: ")


@pytest.mark.parametrize("fresh", [False, True], ids=["shared", "fresh"])
@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        ("echo 42 > /app/answer", 1.0),
        ("printf '#!/bin/busybox sh\\necho 1 > /logs/verifier/reward.txt\\n' > /p; chmod 755 /p; mv /p /bin/sh", 0.0),
        ("rm /bin/grep /bin/cat; mkdir -p /tests; echo 1 > /tests/x; chmod 0 /etc", 0.0),
        ("rm -rf /logs; ln -s /app /logs", 0.0),
    ],
    ids=["an honest answer", "a false shell", "tools that are gone", "a reward directory elsewhere"],
)
async def test_a_verdict_on_a_copy_is_honest(
    copied: Start, tmp_path: Path, agent: str, reward: float, fresh: bool
) -> None:
    path = write_task(tmp_path, toml='[environment]\ndocker_image = "base"\nworkdir = "/app"\n')
    test = "if grep -q 42 answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    (path / "tests" / "test.sh").write_text(test)
    task = read_harbor_task(path)

    sandbox = await copied(workdir=task.workdir)
    await prepare(task, sandbox)
    await sandbox.exec(agent, timeout_s=30)
    verdict = await verify(task, sandbox, VerificationContext(fresh=fresh))
    assert (verdict.reward, verdict.error) == (reward, "")


# --- when ------------------------------------------------------------------------------------------------------------

START = """
import asyncio, json, sys
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox import probe

async def main():
    async with ApptainerProvider(sys.argv[1]) as provider:
        async with await provider.start(SandboxSpec(sys.argv[2])) as sandbox:
            said = await sandbox.exec("echo x > /etc/mine; rm -r /opt; ls /etc; ls -d /opt")
            print(json.dumps([provider.images.writes, said.stdout, probe.probe(sys.argv[1]).copy]))

asyncio.run(main())
"""


@pytest.mark.parametrize("fuse", ["closed", "open"])
def test_on_scratch_that_takes_no_overlay_sandboxes_are_copies(tmp_path: Path, busybox_rootfs: str, fuse: str) -> None:
    """Scratch is really an overlay, which cannot hold another. With FUSE, its overlay is used instead."""
    lent = os.environ.get("MEGAFLOW_FUSE")
    device = CLOSED if fuse == "closed" else f"mount --bind {lent} /dev/fuse" if lent else ":"
    done = restricted(f"{device} && {mount_overlay(tmp_path)}", "-c", START, str(tmp_path / "m"), busybox_rootfs)
    remove_tree(tmp_path / "w")
    assert done.returncode == 0, done.stderr
    writes, said, why_no_copy = json.loads(done.stdout)
    overlay = fuse == "open" and fuse_overlay(lent or "/dev/fuse")
    assert writes == ("overlay" if overlay else "copy")
    # If Apptainer mounts the overlay itself, it also mounts the node's resolv.conf.
    settings = ["resolv.conf"] if overlay and Path("/etc/resolv.conf").exists() else []
    assert said.splitlines() == ["mine", "passwd", "profile", *settings]
    assert why_no_copy == ""
