"""The program that starts commands: the compiled one if it was built and runs, else the image's shell."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments.sandbox.commands import container
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host.process import descendants
from tests.support.places import ROOT
from tests.support.sandboxes import Start

OWN = re.compile(rb"(OLDPWD|SHLVL|_|MEGAFLOW_COMMAND)=")
"""Variables of the shell itself, and the mark of a command."""


@pytest.mark.parametrize("shell", ["dash", "bash"])
async def test_a_command_is_started_as_a_shell_would(start: Start, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares environment, limits, signals and exit status of both runners."""
    commands: list[tuple[Any, dict[str, Any]]] = [
        (["env"], {}),
        (["env"], {"cwd": "/link", "env": {"BASE": "other", "PATH": "/bin", "MINE": "ä\n'$x"}}),
        (["env"], {"env": {f"V{number}": "v" * 100 for number in range(100)}}),  # more than a FIFO takes
        ("ulimit -a; umask; grep -E '^Sig(Blk|Ign|Cgt)|^Cap|^Seccomp:' /proc/self/status; pwd", {"cwd": "/link"}),
        (["/w/script", "1"], {}),
        (["script", "x y"], {"env": {"PATH": "/none:/w:/bin"}}),
        (["/w/plain"], {}),
        (["plain"], {"env": {"PATH": "/w"}}),
        (["plain"], {"env": {"PATH": "/w:/v"}}),
        (["/w"], {}),
        (["no-such"], {}),
        (["no-such"], {"env": {"PATH": ""}}),
        ("pwd", {"cwd": "/w/plain"}),
    ]
    made = (
        f"ln -sf {shell} /bin/sh; mkdir -p /a/b /v; ln -sfn /a/b /link; echo 'echo script $*' | tee script /v/plain; "
        "chmod +x script /v/plain; touch plain"
    )
    sandboxes = []
    for without in ("program", ""):
        monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", without)
        sandbox = await start(workdir="/w", env={"BASE": "b b"})
        await sandbox.exec(made)
        await sandbox.kill_processes()
        sandboxes.append(sandbox)
    for command, options in commands:
        by_shells, by_program = [await sandbox.exec(command, **options) for sandbox in sandboxes]
        lines = [set(result.stdout_bytes.splitlines()) for result in (by_shells, by_program)]
        differing = {line for line in lines[0] ^ lines[1] if not OWN.match(line)}
        assert (by_shells.exit_code, differing) == (by_program.exit_code, set()), command


async def test_each_command_has_its_own_session_and_no_terminal(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGAFLOW_SANDBOX_WITHOUT", raising=False)
    sandbox = await start()
    said = [await sandbox.exec(["cat", "/proc/self/stat"]) for _ in range(3)]
    found = [one.stdout.rpartition(")")[0].split()[:1] + one.stdout.rpartition(")")[2].split()[2:5] for one in said]
    assert all(pid == group == session and terminal == "0" for pid, group, session, terminal in found)
    assert len({session for _, _, session, _ in found}) == 3


def not_for_this_machine() -> bytes:
    """Returns a program for another kind of machine."""
    own = bytearray(Path("/bin/true").resolve().read_bytes())
    struct.pack_into("<H", own, 18, 8)  # EM_MIPS
    return bytes(own)


@pytest.mark.parametrize("built", [None, b"", b"#!/no/such\n", b"exit 3\n", not_for_this_machine()])
async def test_where_the_program_is_missing_or_does_not_run_the_shells_do(
    start: Start, monkeypatch: pytest.MonkeyPatch, built: bytes | None
) -> None:
    monkeypatch.setattr(container, "compiled_runner", lambda machine: built)
    sandbox = await start()
    said = [(await sandbox.exec(command)).stdout for command in ("echo fine", "echo again; cat /proc/1/cmdline")]
    assert said[0] == "fine\n"
    assert said[1].startswith("again\n/bin/sh\0/.megaflow/runner.sh")


async def test_a_command_that_kills_any_of_the_runners_processes_costs_itself_at_most(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGAFLOW_SANDBOX_WITHOUT", raising=False)
    sandbox = await start()
    own = "grep -lsa '^/.megaflow/runner.[^.]' /proc/[0-9]*/cmdline | cut -d/ -f3"
    count = len((await sandbox.exec(own)).stdout.split())
    assert count >= 3  # main, reader, and the waiting worker
    for signal in ("KILL", "TERM", "SEGV"):
        for index in range(count):
            await sandbox.exec(f"set -- $({own}); shift {index}; kill -{signal} $1; sleep 0.2", timeout_s=20)
            assert (await sandbox.exec("echo fine", timeout_s=20)).stdout == "fine\n"


async def test_nothing_of_a_command_that_has_ended_is_in_the_runners_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later commands of the same sandbox could read it from that memory."""
    monkeypatch.delenv("MEGAFLOW_SANDBOX_WITHOUT", raising=False)
    secret = os.urandom(16).hex()

    def held(init: int) -> int:
        found = 0
        for pid in filter(is_runner, descendants(init)):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            with open(f"/proc/{pid}/mem", "rb") as memory:
                for line in maps:
                    place, rights = line.split()[:2]
                    if rights.startswith("rw"):
                        first, end = (int(part, 16) for part in place.split("-"))
                        memory.seek(first)
                        found += memory.read(end - first).count(secret.encode())
        return found

    sandbox = await start()
    running = asyncio.create_task(sandbox.exec("sleep 2", env={"SECRET": secret}))
    await asyncio.sleep(1)
    assert sandbox.pid is not None
    during = held(sandbox.pid)
    await running
    after = held(sandbox.pid)
    assert during, "it can be read at all"
    assert after == 0


def test_the_program_is_built_from_its_source_in_a_clone(tmp_path: Path) -> None:
    commands = "megaflow_hpc/environments/sandbox/commands"
    (tmp_path / commands).mkdir(parents=True)
    for name in ("hatch_build.py", f"{commands}/runner.c", f"{commands}/runner.h"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(["python3", "hatch_build.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    built = tmp_path / commands / f"runner-{os.uname().machine}"
    assert str(built) in done.stdout.splitlines()
    assert subprocess.run([built], check=False).returncode == 0  # without arguments it only shows that it runs
    assert sorted(os.listdir(tmp_path / commands)) == [built.name, "runner.c", "runner.h"]
