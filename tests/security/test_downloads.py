"""Downloads stay below their target and within their limits, whatever the sandbox's tools have become."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerSandbox
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from tests.support.archives import hostile
from tests.support.sandboxes import Start

MB = 1 << 20


def taken(path: Path) -> int:
    """Returns bytes on disk below ``path``."""
    found = [path, *path.rglob("*")] if path.exists() else []
    return sum(os.lstat(file).st_blocks * 512 for file in found)


async def outcome(sandbox: ApptainerSandbox, source: str, target: Path) -> str:
    """Downloads, and returns the error's text, or an empty string."""
    try:
        await asyncio.wait_for(sandbox.download(source, str(target)), 100)
    except SandboxError as error:
        return str(error)
    return ""


def replaced(program: str, script: str) -> str:
    """Returns a command that replaces a program by a shell script."""
    return (
        f"printf '#!/bin/sh\\n%s\\n' '{script}' >/new && chmod 755 /new && "
        f"for p in /bin/{program} /usr/bin/{program}; do cp --remove-destination /new $p; done"
    )


async def test_links_that_stand_in_or_at_a_target_do_not_lead_out(start: Start, tmp_path: Path) -> None:
    up = "p/q/r/s/t/u/v/up"
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "bashrc").write_text("original\n")
    sandbox = await start()
    made = await sandbox.exec(
        f"mkdir -p /d/p/q/r/s/t/u/v && cd /d && ln -s ../../../../../../.. {up} && ln -s {up}/../victim vic && "
        f"ln -s {up}/../../../../../../../../../etc/passwd pw && ln -s here/../victim later && ln -s . kept"
    )
    assert made.exit_code == 0
    await sandbox.download("/d", str(tmp_path / "in"))
    first = sorted(path.name for path in (tmp_path / "in").iterdir())
    # The first download has prepared the target of the second.
    await sandbox.exec(
        "rm -rf /d && mkdir -p /d/vic /d/later /d/kept && ln -s . /d/here && "
        "echo new | tee /d/vic/bashrc /d/later/bashrc /d/kept/file"
    )
    await sandbox.download("/d", str(tmp_path / "in"))
    await sandbox.exec("echo more >/file")
    await sandbox.download("/file", str(tmp_path / "in" / "vic" / "bashrc"))
    assert " ".join(first) == "kept p"
    assert (tmp_path / "victim" / "bashrc").read_text() == "original\n"
    inside = tmp_path / "in"
    assert all(path.resolve().is_relative_to(inside) for path in inside.rglob("*"))
    assert (inside / "kept" / "file").is_file()
    assert (inside / "vic" / "bashrc").read_text() == "more\n"
    (tmp_path / "file").symlink_to("victim/bashrc")  # a link that stands at the target of a file
    await sandbox.download("/file", str(tmp_path / "file"))
    assert (tmp_path / "victim" / "bashrc").read_text() == "original\n"
    assert (tmp_path / "file").read_text() == "more\n"


async def test_hard_links_and_sparse_files_cost_no_more_than_the_sandbox_may_write(
    start: Start, tmp_path: Path
) -> None:
    sandbox = await start(disk_mb=100)
    await sandbox.exec(
        "mkdir /h /s && head -c 30000000 /dev/urandom >/h/big && for i in $(seq 30); do ln /h/big /h/l$i; done; "
        "truncate -s 90M /s/1 /s/2 /s/3"
    )
    for name in ("h", "s"):
        assert "100 MB" in await outcome(sandbox, f"/{name}", tmp_path / name)
    assert taken(tmp_path) < 200 * MB


@pytest.mark.slow
async def test_an_archive_of_a_false_tar_is_an_error_or_stays_inside(start: Start, tmp_path: Path) -> None:
    evil = hostile()
    (tmp_path / "evil").mkdir()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox = await start()
    await sandbox.exec(replaced("tar", "exec cat /evil.tar") + "; mkdir /d")
    found = {}
    for number, (name, data) in enumerate(evil.items()):
        (tmp_path / "evil" / "evil.tar").write_bytes(data)
        await sandbox.upload(str(tmp_path / "evil" / "evil.tar"), "/evil.tar")
        target = tmp_path / "in" / str(number)
        found[name] = await outcome(sandbox, "/d", target)
        assert taken(target) <= 260 * MB, name
        remove_tree(target)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil", "in"]
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == []
    harmless = {"a link to itself", "a file through a link", "a file through a later link", "a file and below it"}
    assert {name for name, error in found.items() if not error} == harmless


@pytest.mark.parametrize("program", ["cat", "head", "tar"])
async def test_a_flood_on_both_streams_is_cut_off(start: Start, tmp_path: Path, program: str) -> None:
    flood = 'exec python3 -c "import os; b = bytes(1 << 20)\nwhile True: os.write(1, b); os.write(2, b)"'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox = await start(disk_mb=50)
    (tmp_path / "new").write_text(f"#!/bin/sh\n{flood}\n")
    (tmp_path / "new").chmod(0o755)
    await sandbox.exec("mkdir /d; touch /d/file")
    await sandbox.upload(str(tmp_path / "new"), f"/{program}")
    await sandbox.exec(f"for p in /bin/{program} /usr/bin/{program}; do cp --remove-destination /{program} $p; done")
    found = [await outcome(sandbox, source, tmp_path / "in") for source in ("/d", "/d/file")]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    flooded = {"cat": 1, "tar": 0}.get(program)  # head is not used
    assert [bool(error) for error in found] == [number == flooded for number in range(2)]
    assert taken(tmp_path) < 60 * MB


async def test_a_directory_of_many_small_files_comes_out_whole(start_any: Start, tmp_path: Path) -> None:
    """Has odd names, hard links, links and modes. Uses the tar of Debian and of busybox."""
    sandbox = await start_any()
    made = await sandbox.exec(
        "mkdir -p /d/a/b /d/empty && cd /d && i=0; while [ $i -lt 300 ]; do echo $i >a/b/$i; i=$((i+1)); done; "
        "n=$(printf '%0200d' 0); mkdir -p $n/$n && echo long >$n/$n/$n; echo odd >\"$(printf 'a\\nb \\377')\"; "
        "chmod 4755 a/b/0; chmod 0 a/b/1; ln a/b/2 hard; ln -s a/b/3 soft; ln -s ../../a a/b/up; ln -s . dot; "
        "ln -s ../out out; ln -s a/../../out2 out2; ln -s /etc absolute; mkfifo fifo; : >empty/file"
    )
    assert made.exit_code == 0, made.stderr
    await sandbox.download("/d", str(tmp_path / "in"))
    inside = tmp_path / "in"
    n = "0" * 200
    assert sorted(os.listdir(os.fsencode(inside))) == sorted(
        [b"a", b"a\nb \xff", b"dot", b"empty", b"hard", n.encode(), b"soft"]
    )
    assert [(inside / "a" / "b" / str(i)).read_text() for i in range(300)] == [f"{i}\n" for i in range(300)]
    assert (inside / n / n / n).read_text() == "long\n"
    assert (inside / "hard").read_text() == "2\n"
    assert (inside / "soft").read_text() == "3\n"
    assert os.readlink(inside / "a" / "b" / "up") == "../../a"
    assert (inside / "a" / "b" / "0").stat().st_mode & 0o7777 == 0o755
    assert (inside / "empty" / "file").read_bytes() == b""
