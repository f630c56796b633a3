"""Snapshots of the writable layer, from which other sandboxes start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec, Snapshot
from megaflow_hpc.environments.sandbox.snapshot import pack
from megaflow_hpc.errors import SandboxError

CHANGE = """
set -e
mkdir -p /new/deep; echo one > /new/deep/file; ln /new/deep/file /new/hard; ln -s deep/file /new/soft; mkfifo /new/fifo
rm /etc/profile; rm -rf /opt /srv; G=/usr/share/git-core
rm -rf $G; mkdir $G; echo mine > $G/x
chmod 4755 /new/hard; mkdir /new/locked; echo in > /new/locked/f; chmod 0 /new/locked; touch -d @1000000 /new/deep
echo tmp > /tmp/t
"""
LOOK = """
cat /new/hard /new/soft /tmp/t; stat -c '%a %h' /new/hard; stat -c '%F' /new/fifo; stat -c '%Y' /new/deep
ls -d /etc/profile /opt /srv 2>&1 | grep -c 'No such'; ls -A /usr/share/git-core; stat -c %a /new/locked
"""


async def test_a_snapshot_brings_back_files_links_modes_and_what_was_deleted(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    spec = SandboxSpec(rootfs, workdir="/w")
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(spec) as first:
            made = await first.exec(CHANGE)
            assert made.exit_code == 0, made.stderr
            seen = (await first.exec(LOOK)).stdout
            kept = await first.snapshot(tmp_path / "kept")
            await first.exec("echo later > /new/deep/file")
        branches = await asyncio.gather(*(provider.start(spec, kept) for _ in range(2)))
        for number, branch in enumerate(branches):
            assert (await branch.exec(LOOK)).stdout == seen
            await branch.exec(f"echo {number} > /new/mine")
        assert [(await branch.exec("cat /new/mine")).stdout for branch in branches] == ["0\n", "1\n"]
        second = await branches[0].snapshot(tmp_path / "second")
        async with await provider.start(spec, second) as grandchild:
            assert (await grandchild.exec("cat /new/mine; ls /opt")).stdout == "0\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "second"]
    kept.remove()
    assert not os.path.exists(kept.path)


async def test_a_packed_snapshot_in_one_file_brings_back_the_same_on_any_node(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    spec = SandboxSpec(rootfs, workdir="/w")
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(spec) as first:
            made = await first.exec(CHANGE + "truncate -s 50M /sparse; mknod /tmp/dev c 0 0 2>/dev/null || true\n")
            assert made.exit_code == 0, made.stderr
            seen = (await first.exec(LOOK)).stdout
            kept = await first.snapshot(tmp_path / "kept")
        with open(tmp_path / "file", "wb") as file:
            file.write(b"before")
            pack(kept, file.write, 4 << 20)
        with open(tmp_path / "small", "wb") as file, pytest.raises(SandboxError, match="more than 4096 bytes"):
            pack(kept, file.write, 4096)
        kept.remove()
        packed = Snapshot(str(tmp_path / "file"), rootfs, offset=len("before"))
        async with await provider.start(spec, packed) as second:
            assert (await second.exec(LOOK)).stdout == seen
            assert (await second.exec("stat -c '%s %b' /sparse")).stdout == "52428800 0\n"
        os.truncate(packed.path, packed.offset + 100)  # tar sees no truncation at the start of a file
        with pytest.raises(SandboxError, match="cannot be unpacked"):
            await provider.start(spec, packed)


@pytest.mark.usefixtures("runner")
async def test_a_command_under_way_stands_still_for_a_snapshot_and_goes_on(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs)) as sandbox:
            loop = "i=$((i+1)); echo $i >> /a; echo $i >> /b; sleep 0.002"
            counting = f"i=0; while [ $i -lt 300 ]; do {loop}; done; echo end"
            running = asyncio.create_task(sandbox.exec(counting, timeout_s=60))
            await sandbox.exec("until [ -s /b ]; do sleep 0.01; done", timeout_s=30)
            kept = await sandbox.snapshot(tmp_path / "kept")
            result = await running
            assert (result.exit_code, result.stdout) == (0, "end\n")
        a, b = (len(Path(kept.path, "upper", name).read_text().splitlines()) for name in "ab")
        assert a - b in (0, 1)
        assert 0 < a < 300


async def test_a_place_that_is_taken_and_a_snapshot_of_another_image_are_refused(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs)) as sandbox:
            kept = await sandbox.snapshot(tmp_path / "kept")
            with pytest.raises(SandboxError, match="exists already"):
                await sandbox.snapshot(tmp_path / "kept")
            (tmp_path / "file").write_text("x")
            with pytest.raises(SandboxError, match="no snapshot could be created"):
                await sandbox.snapshot(tmp_path / "file" / "kept")
            assert (await sandbox.exec("echo on")).stdout == "on\n"
        with pytest.raises(SandboxError, match="a snapshot of a sandbox over"):
            await provider.start(SandboxSpec(str(tmp_path)), kept)
