"""The same attacks on both kinds of writable layer: overlays, and copies of the image."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.images.layers.merging import OPAQUE_MARK
from megaflow_hpc.environments.sandbox.rootfs import copies
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import remove_tree
from tests.support.sandboxes import Start
from tests.support.trees import nest

DEEP = 1500
MODES = ("overlay", "copy")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if request.param == "copy" else "")
    return request.param


@pytest.fixture
def image(busybox_rootfs: str, tmp_path: Path) -> Iterator[Path]:
    """Yields an image that the test may make hostile."""
    path = tmp_path / "image"
    shutil.copytree(busybox_rootfs, path, symlinks=True)
    yield path
    remove_tree(path)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the host that no sandbox may change."""
    path = tmp_path / "outside"
    (path / "below").mkdir(parents=True)
    (path / "secret").write_text("the host's\n")
    return path


def content(root: Path) -> dict[str, tuple[str, str]]:
    """Returns modes and contents of all files below ``root``."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        what = os.readlink(path) if path.is_symlink() else "directory"
        if stat.S_ISREG(status.st_mode):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(root))] = (f"{status.st_mode:o} {status.st_nlink}", what)
    return found


# --- what an image holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["etc", "tmp", "root", "opt", "dev", "proc", "sys", "usr", ".singularity.d", CONTROL_DIR.strip("/"), "app"],
)
async def test_links_in_an_image_lead_no_further_than_the_image(
    image: Path, outside: Path, start: Start, mode: str, name: str
) -> None:
    remove_tree(image / name)
    (image / name).symlink_to(outside)
    before = content(outside)
    script = f"for d in /{name} /etc /tmp /app /opt /usr; do echo x > $d/mine; cat $d/secret; rm -rf $d/below; done"
    with suppress(SandboxError):  # such an image may fail to start
        sandbox = await start(image, workdir="/app", binds=(f"{image}/etc/passwd:/opt/file",))
        assert "host" not in (await sandbox.exec(script)).stdout
        await sandbox.restart(change=lambda paths: None)
        assert "host" not in (await sandbox.exec(script)).stdout
    await start.close()
    assert content(outside) == before


async def test_nothing_a_sandbox_does_to_its_files_reaches_the_image_or_what_shares_its_blocks(
    image: Path, outside: Path, scratch: Path, mode: str
) -> None:
    os.link(outside / "secret", image / "opt" / "linked")
    os.link(image / "etc" / "passwd", image / "opt" / "passwd")
    (image / "opt" / "mine").write_text("mine\n")
    (image / "opt" / "mine").chmod(0o6755)
    before = content(image), content(outside)
    spoil = """
    for f in /opt/linked /opt/passwd /etc/passwd /bin/busybox; do
        echo spoilt >> $f; chmod 0777 $f; touch -t 200001010000 $f
    done
    ln /opt/mine /opt/another; ln /etc/passwd /opt/third; echo x > /opt/third
    mv /etc/profile /etc/gone; truncate -s 0 /opt/mine
    cat /opt/linked
    """
    async with ApptainerProvider(scratch) as provider:
        first = await provider.start(SandboxSpec(str(image)))
        second = await provider.start(SandboxSpec(str(image)))
        said = [(await first.exec(spoil)).stdout, (await second.exec("cat /opt/linked; ls /etc /opt")).stdout]
        await first.stop()
        third = await provider.start(SandboxSpec(str(image)))
        said.append((await third.exec("cat /opt/linked; ls /etc /opt")).stdout)
        spoilt, beside, after = said
    assert spoilt == "the host's\nspoilt\n"
    assert beside == after
    assert "spoilt" not in beside
    assert {"profile", "linked", "mine"} <= set(beside.split())
    assert (content(image), content(outside)) == before


async def test_an_image_that_cannot_be_copied_is_refused_in_a_line_and_leaves_nothing(
    image: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cp`` fails on paths that are longer than the kernel allows."""
    nest(image / "opt" / "deep", DEEP, "dir")
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay")
    async with ApptainerProvider(scratch) as provider:
        with pytest.raises(SandboxError, match=r"image: cannot be copied for a sandbox at .*: cp: "):
            await provider.start(SandboxSpec(str(image)))
        result = os.listdir(provider._own)
    assert result == []


# --- what an agent makes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [None, "agent"], ids=["root", "user"])
async def test_devices_and_setuid_bits_give_nothing(image: Path, start: Start, mode: str, user: str | None) -> None:
    script = """
    mknod /tmp/null c 1 3 && echo null; mknod /tmp/disk b 8 0 && echo disk; mknod /tmp/kmsg c 1 11 && echo kmsg
    cp /bin/busybox /tmp/busybox; chown 0:0 /tmp/busybox; chmod 6755 /tmp/busybox; echo $(id -u) $(/tmp/busybox id -u)
    grep NoNewPrivs /proc/self/status; mount -t tmpfs none /tmp && echo mounted
    chroot / mount -o remount,rw / && echo rw
    """
    (image / "tmp").chmod(0o777)
    sandbox = await start(image, user=user)
    lines = (await sandbox.exec(script, cwd="/")).stdout.split("\n")
    uid = os.getuid() if user else 0
    assert lines == [f"{uid} {uid}", "NoNewPrivs:\t1", ""]


async def test_what_the_runner_shares_with_its_sandboxes_cannot_be_written(
    image: Path, start: Start, mode: str
) -> None:
    sandbox = await start(image, network="gateway")
    await sandbox.listen()  # also links the helper's Python, which all sandboxes of a node share
    script = f"""
    find {CONTROL_DIR} -type f | while read f; do
        (echo x >> $f) 2>/dev/null && echo wrote $f; rm -f $f && echo removed $f
    done
    (echo x > {CONTROL_DIR}/new) 2>/dev/null && echo made; mount -o remount,rw {CONTROL_DIR} && echo remounted
    echo tried
    """
    assert (await sandbox.exec(script)).stdout == "tried\n"


MARKS = [
    *("/.wh...", "/.wh..", "/.wh.", "/.wh..wh..opq", "/.wh..wh.plnk", "/.wh.bin", "/bin/.wh.sh", "/bin/.wh..wh..opq"),
    *("/etc/.wh...", "/etc/.wh..", "/usr/bin/.wh....", "/opt/.wh.\\n"),
]


DEEPLY = f"cd /opt; i=0; while [ $i -lt {DEEP} ]; do mkdir dir; cd ./dir; i=$((i+1)); done"


LEAVES = {
    "files and whiteouts": " ".join(["touch", *(f"'{mark}'" for mark in MARKS)])
    + "; touch \"/etc/$(printf '\\377\\n\\t')\" \"/opt/$(head -c 250 /dev/zero | tr '\\0' n)\""
    + "; for f in /w /bin/w /etc/w; do mknod $f c 0 0; done; rm /etc/profile; mknod /etc/profile c 0 0",
    "directories and fifos": "mkdir " + " ".join(f"'{mark}'" for mark in MARKS) + "; mkfifo /etc/fifo /opt/fifo; "
    "rm /etc/profile; mkfifo /etc/profile; rm -rf /root; mkfifo /root",
    "links and modes": " ; ".join(f"ln -s /etc '{mark}'" for mark in MARKS)
    + "; truncate -s 900G /opt/sparse /etc/passwd; chmod 7777 /opt; chmod 0000 /etc/passwd /usr /bin",
    "locked": "mkdir -p /locked/in/side /opt/new/er; chmod 0 /locked/in /locked /opt/new /etc /opt",
    "elsewhere": "rm -rf /opt /root; ln -s / /opt; ln -s /proc/1/root /root; rm /etc/profile; "
    "ln -s ../../../etc /etc/profile",
    "deep": DEEPLY,
    "gone": "rm -rf /etc /opt /tmp /usr /.singularity.d; exec /bin/busybox rm -rf /bin",
}


@pytest.mark.parametrize("does", LEAVES.values(), ids=LEAVES)
async def test_whatever_an_agent_leaves_the_next_container_starts_and_the_image_shows(
    image: Path, start: Start, tmp_path: Path, mode: str, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(image)

    async def keeps(sandbox: ApptainerSandbox) -> bool:
        return (await sandbox.exec("cat /kept", timeout_s=30)).stdout == "kept\n"

    sandbox = await start(image)
    await sandbox.exec("echo kept > /kept")
    await sandbox.exec(does, timeout_s=60)
    await sandbox.restart(change=lambda paths: None)
    assert await keeps(sandbox)
    await sandbox.exec(does, timeout_s=60)
    try:
        if does == DEEPLY:  # a suspended rollout starts again then
            with pytest.raises(SandboxError, match="cannot be copied"):
                await sandbox.snapshot(tmp_path / "kept")
        else:
            kept = await sandbox.snapshot(tmp_path / "kept")
            for writes in MODES:  # rollouts may continue on another node
                monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if writes == "copy" else "")
                other = Start(str(image), Path(sandbox.directory).parents[2])
                assert await keeps(await other(kept=kept))
                await other.close()
            monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if mode == "copy" else "")
    finally:
        remove_tree(tmp_path / "kept")
    await sandbox.reset()
    renewed = (await sandbox.exec("cat /etc/passwd; ls /bin/sh; ls /kept 2>/dev/null")).stdout
    assert renewed == (image / "etc" / "passwd").read_text() + "/bin/sh\n"
    await start.close()
    assert content(image) == before


def test_a_copy_is_taken_apart_without_namespaces_whatever_modes_its_directories_have(tmp_path: Path) -> None:
    """With only a setuid Apptainer, the user runs all of this without a namespace."""
    image, layer = tmp_path / "image", tmp_path / "layer"
    (image / "etc" / "deep").mkdir(parents=True)
    (image / "etc" / "deep" / "file").write_text("as it was")
    layer.mkdir()
    copies.lay_out(str(image), str(layer))
    (layer / "root" / "new" / "er").mkdir(parents=True)
    (layer / "root" / "new" / "er" / "file").write_text("mine")
    (layer / "root" / "etc" / "deep" / "file").write_text("changed")
    for name in ("new/er", "new", "etc/deep/file", "etc/deep", "etc"):
        (layer / "root" / name).chmod(0)
    try:
        copies.gather(str(image), str(layer))
        copies.lay_out(str(image), str(layer))
        for name in ("new", "new/er", "etc", "etc/deep", "etc/deep/file"):
            assert stat.S_IMODE((layer / "root" / name).lstat().st_mode) == 0, name
            (layer / "root" / name).chmod(0o700)
        assert (layer / "root" / "new" / "er" / "file").read_text() == "mine"
        assert (layer / "root" / "etc" / "deep" / "file").read_text() == "changed"
    finally:
        remove_tree(layer)


def test_an_agents_own_marks_of_deletion_delete_nothing(tmp_path: Path) -> None:
    image, layer = tmp_path / "image", tmp_path / "layer"
    for name in ("bin/sh", "etc/one", "etc/two"):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        (image / name).write_text(name)
    (layer / "kept").mkdir(parents=True)
    copies.lay_out(str(image), str(layer))
    root = layer / "root"
    for name in (".wh...", ".wh..", ".wh.", OPAQUE_MARK, ".wh.bin", "etc/.wh.one", "etc/.wh..wh..opq"):
        (root / name).touch()
    with suppress(OSError):  # some file systems lack them
        os.setxattr(root, "user.overlay.opaque", b"y")
        os.setxattr(root / "bin", "user.fuseoverlayfs.opaque", b"y")
    (root / "etc" / "two").unlink()
    copies.gather(str(image), str(layer))
    copies.lay_out(str(image), str(layer))
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == ["bin/sh", "etc/one"]
    assert (layer / "kept").is_dir()
