"""A shell that keeps its state from one command to the next."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.sandboxes import Start

pytestmark = pytest.mark.usefixtures("runner")


async def test_directory_variables_functions_and_jobs_hold_between_commands(start: Start) -> None:
    sandbox = await start(workdir="/w")
    async with sandbox.session() as shell:
        await shell.run("cd /usr/lib; A='x y\n z'; export B=2; f() { echo f$1; }; set -- p q")
        result = await shell.run('pwd; echo "$A"; env | grep ^B=; f 3; echo err >&2; echo $#; false')
        assert result.stdout == "/usr/lib\nx y\n z\nB=2\nf3\n2\n"
        assert (result.stderr, result.exit_code) == ("err\n", 1)
        assert (await shell.run("cat; ls /proc/self/fd | wc -l")).stdout == "4\n"
        await shell.run("sleep 300 & P=$!")
        assert (await shell.run("kill -0 $P; echo $?")).stdout == "0\n"
        assert (await shell.run("head -c 300000 /dev/zero | tr '\\0' x; echo é")).stdout == "x" * 300000 + "é\n"
        assert (await shell.run("echo '" + "y" * 200_000 + "' | wc -c")).stdout == "200001\n"
        assert (await sandbox.exec("pwd")).stdout == "/w\n"
        assert (await shell.run("if")).exit_code != 0
        assert (await shell.run("echo still; [[ a == a ]] && echo bash")).stdout.endswith("still\nbash\n")


async def test_a_timeout_kills_what_runs_and_keeps_the_shell_unless_that_is_what_runs(start: Start) -> None:
    sandbox = await start()
    async with sandbox.session() as shell:
        await shell.run("A=1")
        late = await shell.run("echo begun; sleep 900", timeout_s=0.5)
        assert (late.exit_code, late.timed_out, late.stdout) == (124, True, "begun\n")
        assert (await shell.run("echo $A")).stdout == "1\n"
        assert (await shell.run("while :; do :; done", timeout_s=0.3)).timed_out
        assert (await shell.run("echo a$A")).stdout == "a\n"
        assert (await shell.run("exit 7")).exit_code == 7
        assert (await shell.run("echo new")).stdout == "new\n"
        assert (await shell.run("kill -9 $$")).exit_code == 137
        assert (await shell.run("echo newer")).stdout == "newer\n"
    assert (await sandbox.exec("ps -eo args | grep -c '[s]leep 900'")).stdout == "0\n"


async def test_a_bare_image_has_sessions_too(start: Start, small_rootfs: str) -> None:
    sandbox = await start(small_rootfs)
    async with sandbox.session() as first, sandbox.session() as second:
        await asyncio.gather(first.run("cd /usr; V=1"), second.run("cd /etc; V=2"))
        assert (await first.run("pwd; echo $V")).stdout == "/usr\n1\n"
        assert (await second.run("pwd; echo $V")).stdout == "/etc\n2\n"
