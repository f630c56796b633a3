"""The runner: the image's own shell as PID 1, which starts the commands of a sandbox."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaflow_hpc.environments import ApptainerSandbox
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host.process import descendants
from tests.support.sandboxes import runs

InSandbox = Callable[..., Any]

OWN = re.compile(rb"(OLDPWD|SHLVL|_|MEGAFLOW_COMMAND)=")
"""Variables that a shell keeps for itself, and the mark of a command."""


def test_a_command_starts_alike_under_dash_and_bash(rootfs: str, scratch: Path) -> None:
    """Environment, limits, signals and exit status do not depend on the image's shell."""
    commands: list[tuple[Any, dict[str, Any]]] = [
        (["env"], {}),
        (["env"], {"cwd": "/link", "env": {"BASE": "other", "PATH": "/bin", "MINE": "ä\n'$x"}}),
        (["env"], {"env": {f"V{number}": "v" * 100 for number in range(100)}}),  # more than a FIFO takes
        (
            "cat /proc/self/limits; umask; grep -E '^Sig(Blk|Ign|Cgt)|^Cap|^Seccomp:' /proc/self/status; pwd",
            {"cwd": "/link"},
        ),
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
        "mkdir -p /a/b /v; ln -sfn /a/b /link; echo 'echo script $*' | tee script /v/plain; "
        "chmod +x script /v/plain; touch plain"
    )

    def run_all(shell: str) -> list[tuple[int, set[bytes]]]:
        async def use(sandbox: ApptainerSandbox) -> list[tuple[int, set[bytes]]]:
            await sandbox.exec(f"ln -sf {shell} /bin/sh; {made}")
            await sandbox.kill_processes()
            results = [await sandbox.exec(command, **options) for command, options in commands]
            return [(one.exit_code, set(one.stdout_bytes.splitlines())) for one in results]

        found: list[tuple[int, set[bytes]]] = runs(rootfs, scratch)(use, workdir="/w", env={"BASE": "b b"})
        return found

    for what, one, other in zip(commands, run_all("dash"), run_all("bash"), strict=True):
        differ = {line for line in one[1] ^ other[1] if not OWN.match(line)}
        assert (one[0], differ) == (other[0], set()), what


def test_each_command_has_its_own_process_group_and_no_terminal(in_any_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> list[list[str]]:
        said = [await sandbox.exec(["cat", "/proc/self/stat"]) for _ in range(3)]
        return [one.stdout.rpartition(")")[0].split()[:1] + one.stdout.rpartition(")")[2].split()[2:5] for one in said]

    found = in_any_sandbox(use)
    assert all(pid == group and terminal == "0" for pid, group, _, terminal in found)


def test_a_command_that_kills_any_of_the_runners_processes_costs_commands_their_time_at_most(
    rootfs: str, scratch: Path
) -> None:
    own = "grep -lsa '^/bin/sh./.megaflow/runner.sh' /proc/[0-9]*/cmdline | cut -d/ -f3 | grep -vx 1"

    async def use(sandbox: ApptainerSandbox) -> list[str]:
        count, said = len((await sandbox.exec(f"sleep 1; {own}")).stdout.split()), []
        for place in range(count):
            await sandbox.exec(f"set -- $({own}); shift {place}; kill -9 $1; sleep 0.2", timeout_s=1)
            for _ in range(2):  # the workers that wait
                await sandbox.exec("true", timeout_s=1)
            said.append((await sandbox.exec("echo fine", timeout_s=20)).stdout)
        return said

    said = runs(rootfs, scratch)(use)
    assert len(said) >= 3
    assert set(said) == {"fine\n"}


def test_nothing_of_a_command_is_in_the_runners_memory(rootfs: str, scratch: Path) -> None:
    """A later command of the same sandbox may read it there: it must not find what an earlier one was given."""
    secret = os.urandom(16).hex()

    def memory_of_runner(init: int) -> bytes:
        found = b""
        for pid in filter(is_runner, descendants(init)):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            with open(f"/proc/{pid}/mem", "rb") as memory:
                for line in maps:
                    place, rights = line.split()[:2]
                    if rights.startswith("rw"):
                        first, end = (int(part, 16) for part in place.split("-"))
                        memory.seek(first)
                        found += memory.read(end - first)
        return found

    async def use(sandbox: ApptainerSandbox) -> tuple[bytes, bytes]:
        assert sandbox.pid is not None
        running = asyncio.create_task(sandbox.exec("sleep 2", env={"SECRET": secret}))
        await asyncio.sleep(1)
        during = memory_of_runner(sandbox.pid)
        await running
        return during, memory_of_runner(sandbox.pid)

    for memory in runs(rootfs, scratch)(use):
        assert b"_mf_work" in memory, "it can be read at all"
        assert secret.encode() not in memory
