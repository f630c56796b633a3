"""Results of commands in sandboxes."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox.commands.command import RunningCommand, StreamPair
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.errors import ConfigError, LostError, SandboxError
from megaflow_hpc.host.process import descendants
from tests.support.sandboxes import Start
from tests.support.waiting import until_async


@pytest.fixture(autouse=True)
def no_command_is_counted_for_ever() -> Iterator[None]:
    """A command that is counted for ever would delay the reading of later ones."""
    yield
    assert RunningCommand.under_way == 0


async def test_a_start_that_is_cancelled_as_its_container_becomes_ready_is_cancelled(
    start_any: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Container._take

    def handle_and_cancel(self: Container, line: bytes) -> bool:
        taken = handle(self, line)
        if self._ready is not None and self._ready.done():
            starting.cancel()
        return taken

    monkeypatch.setattr(Container, "_take", handle_and_cancel)
    starting = asyncio.ensure_future(start_any())
    await asyncio.wait([starting])
    assert starting.cancelled()


async def test_exit_codes_signals_input_and_streams_are_exact(start_any: Start) -> None:
    """A sequence is run as it is, and a string by the shell. Standard input is empty unless given."""
    sandbox = await start_any()
    codes = {"exit 0": 0, "exit 3": 3, "exit 255": 255, "kill -TERM $$": 143, "kill -9 $$": 137, "no-such-command": 127}
    for command, code in codes.items():
        result = await sandbox.exec(command)
        assert (result.exit_code, result.timed_out, result.truncated) == (code, False, False), command
    result = await sandbox.exec("echo out; echo err >&2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out\n", "err\n")
    assert (result.timed_out, result.truncated) == (False, False)
    hostile, data, longest = "a b'c\"$HOME`id`\n\\n*", bytes(range(256)) * 300, "x" * 300_000
    assert (await sandbox.exec(["printf", "%s", hostile])).stdout == hostile
    assert (await sandbox.exec(f"cat <<'END'\n{hostile}\nEND\n")).stdout == hostile + "\n"
    assert (await sandbox.exec(f"cat <<'END' | wc -c\n{longest}\nEND\n")).stdout.strip() == "300001"
    result = await sandbox.exec("tee /dev/stderr", user_input=data)
    assert result.stdout_bytes == result.stderr_bytes == data
    assert (await sandbox.exec("cat", timeout_s=5)).stdout == ""
    assert (await sandbox.exec("cat", user_input="täxt")).stdout == "täxt"


async def test_directory_and_environment_hold_for_one_command(start_any: Start) -> None:
    sandbox = await start_any(workdir="/made/here", env={"BASE": "b b"})
    await sandbox.exec("mkdir sub")
    show = 'pwd; printf "%s|%s" "$MINE" "$BASE"'
    value = "x'y\n$z"
    assert (await sandbox.exec(show, cwd="/usr/lib", env={"MINE": value})).stdout == f"/usr/lib\n{value}|b b"
    assert (await sandbox.exec(show)).stdout == "/made/here\n|b b"
    assert (await sandbox.exec("pwd", cwd="sub")).stdout == "/made/here/sub\n"
    missing = await sandbox.exec("pwd", cwd="/no/such")
    assert missing.exit_code == 126
    assert "/no/such" in missing.stderr


async def test_signals_have_their_default_effect_in_commands(start: Start) -> None:
    """A shell's "&" would leave SIGINT and SIGQUIT ignored, and Python without KeyboardInterrupt."""
    sandbox = await start()
    code = "import signal as s; print(s.getsignal(2).__name__, s.getsignal(3), s.pthread_sigmask(0, []))"
    assert (await sandbox.exec(["python3", "-c", code])).stdout.strip() == "default_int_handler 0 set()"


async def test_much_output_is_bounded_in_memory_and_keeps_head_and_tail(start_any: Start) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox = await start_any()
    flood = "dd if=/dev/zero bs=1000000 count=300 2>/dev/null"
    result = await sandbox.exec(f"echo first; {flood}; echo last; echo e >&2", timeout_s=60)
    assert result.exit_code == 0
    assert result.truncated
    assert len(result.stdout_bytes) < 600_000
    assert result.stdout_bytes.startswith(b"first\n")
    assert result.stdout_bytes.endswith(b"last\n")
    assert b"bytes left out" in result.stdout_bytes
    assert result.stderr == "e\n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


async def test_a_timeout_kills_everything_the_command_started(start_any: Start) -> None:
    sandbox = await start_any()
    other = asyncio.create_task(sandbox.exec("until [ -e /over ]; do sleep 0.05; done; echo fine", timeout_s=60))
    daemon = "(setsid sh -c 'sleep 1003 & sleep 1004' &)"
    command = f"echo begun; trap '' TERM; sleep 1001 & setsid sleep 1002 & {daemon}; sleep 1005"
    result = await sandbox.exec(command, timeout_s=0.5)
    left = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 100[0-9]'")).stdout
    await sandbox.exec("touch /over")
    assert (await other).stdout == "fine\n"
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "begun\n")
    assert left == ""


async def test_commands_run_at_the_same_time_in_one_sandbox(start_any: Start) -> None:
    sandbox = await start_any()
    together = "touch /here{0}; until set -- /here* && [ $# -eq 12 ]; do sleep 0.05; done; echo {0}"
    results = await asyncio.gather(*(sandbox.exec(together.format(i), timeout_s=30) for i in range(12)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(12)]


async def test_a_background_process_outlives_its_command_and_may_go_on_printing(start_any: Start) -> None:
    sandbox = await start_any()
    first = await sandbox.exec("(while :; do echo noise; echo >> /said; sleep 0.01; done) & echo $!")
    await sandbox.exec("until [ $(wc -l < /said) -gt 20 ]; do sleep 0.01; done", timeout_s=30)
    assert [(await sandbox.exec("echo quiet")).stdout for _ in range(3)] == ["quiet\n"] * 3
    pid = next(line for line in first.stdout.splitlines() if line.isdigit())
    assert (await sandbox.exec(f"kill -0 {pid}")).exit_code == 0


async def test_streams_are_used_again_and_nothing_of_them_is_lost(start_any: Start) -> None:
    """Reuses streams after a short command, a long output, late output, and next to a background process."""
    long = "sleep 0.02; i=0; while [ $i -lt 2000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done"
    sandbox = await start_any()
    shorts, longs = set(), set()
    assert sandbox._dir.container
    pairs = sandbox._dir.container.commands._pairs
    for _ in range(4):
        await sandbox.exec("sleep 0.05 &")
        shorts.add((await sandbox.exec("echo short")).stdout)
        longs.add(len((await sandbox.exec(long)).stdout_bytes))
    await until_async(lambda: not pairs._held, "nobody holds a stream")
    assert len(pairs._free) == pairs._made
    assert pairs._made <= 6
    assert (shorts, longs) == ({"short\n"}, {2000 * 41})


@pytest.mark.parametrize("last_words", [b"", b"late"], ids=["silent", "printing"])
@pytest.mark.parametrize("holds", ["2>/dev/null", ">/dev/null", ""])
async def test_a_holder_that_goes_while_its_streams_are_opened_afresh_leaves_them_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, holds: str, last_words: bytes
) -> None:
    """The process holds one stream or both after its command has ended."""
    seconds = f"{3000 + os.getpid()}.{len(holds)}{len(last_words)}"
    renew = StreamPair.renew
    gone: list[int] = []
    running: list[Any] = []

    def holders() -> list[int]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                    found.append(int(pid))
        return found

    def kill() -> None:
        for pid in holders():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def slowly(pair: StreamPair) -> None:
        if running and all(command.pair is not pair for command in running[0]._commands.values()):
            gone.extend(holders())
            for stream in (0, 1):
                if pair.held[stream]:
                    Path(pair._paths[stream]).write_bytes(last_words)
            while holders():  # a shell of the last look may be a sleep now
                kill()
                time.sleep(0.001)
        renew(pair)

    monkeypatch.setattr(StreamPair, "renew", slowly)
    sandbox = await start()
    assert sandbox._dir.container
    running.append(commands := sandbox._dir.container.commands)
    pairs = commands._pairs
    await sandbox.exec("true")
    for _ in range(100):
        await sandbox.exec(f"sleep {seconds} {holds} &")  # a slow one is listened to before it has ended
        await until_async(lambda: kill() or not pairs._held, "nobody holds a stream")
        if gone:
            break
    assert len(pairs._free) == len(set(pairs._free)) == pairs._made
    said = [await sandbox.exec(f"echo {number}; echo -{number} >&2") for number in range(2 * pairs._made)]
    said = [(one.stdout, one.stderr) for one in said]
    assert gone, "a holder went in between"
    assert said == [(f"{number}\n", f"-{number}\n") for number in range(len(said))]


async def test_commands_run_whatever_shell_the_image_has(start: Start) -> None:
    sandbox = await start()
    said = []
    for shell in ("dash", "bash"):
        await sandbox.exec(f"ln -sf {shell} /bin/sh")
        await sandbox.kill_processes()
        name = await sandbox.exec(["/bin/sh", "-c", "echo ${BASH_VERSION:+bash}"], timeout_s=30)
        done = await sandbox.exec("printf 'two\n lines'; exit 7", timeout_s=30)
        assert done.exit_code == 7
        said.append((name.stdout.strip(), done.stdout))
    assert said == [("", "two\n lines"), ("bash", "two\n lines")]


async def test_the_shells_that_start_commands_keep_nothing_of_those_that_ended(start_any: Start) -> None:
    """A shell with job control keeps every job until it has reported it, and each fork copies these pages."""
    sandbox = await start_any()
    held = []
    for count in (100, 500):
        for _ in range(count):
            await sandbox.exec("/bin/true")
        assert sandbox.pid is not None
        held.append(max(written(pid) for pid in (sandbox.pid, *descendants(sandbox.pid))))
    assert held[1] - held[0] < 16


def written(pid: int) -> int:
    """Returns KiB of pages that a process, or the one that it was forked from, has written to."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        return int(next(line.split()[1] for line in file if line.startswith("Anonymous:")))
    return 0


async def test_killing_the_group_the_runner_or_everyone_costs_that_command_only(start_any: Start) -> None:
    sandbox = await start_any(workdir="/w")
    assert (await sandbox.exec("kill -9 0")).exit_code == 137
    assert (await sandbox.exec("kill -9 1; kill -9 $$")).exit_code == 137
    everyone = await sandbox.exec("echo said; touch kept; kill -9 -1", timeout_s=10)
    after = await sandbox.exec("ls kept")
    assert (everyone.exit_code, everyone.stdout) == (137, "said\n")
    assert "every process" in everyone.stderr
    assert after.stdout == "kept\n"


async def test_a_kill_from_outside_is_a_lost_container_and_never_a_result(start_any: Start) -> None:
    """A new container starts on the same files, so the agent's work can still be judged."""
    sandbox = await start_any()
    await sandbox.exec("touch /kept")
    command = asyncio.create_task(sandbox.exec("sleep 60"))
    await until_async(lambda: sandbox.busy, "the command runs")
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(LostError, match="killed from outside"):
        await command
    with pytest.raises(LostError, match="killed from outside"):
        await sandbox.exec("true")
    await sandbox.kill_processes()
    assert (await sandbox.exec("ls /kept")).stdout == "/kept\n"


async def test_stopping_ends_a_running_command_with_an_error_and_leaves_no_files(start_any: Start) -> None:
    sandbox = await start_any()
    await sandbox.exec("mkdir -p /a/b && chmod 0 /a")
    task = asyncio.create_task(sandbox.exec("sleep 3000"))
    await until_async(lambda: sandbox.busy, "the command runs")
    await sandbox.stop()
    await sandbox.stop()
    assert not os.path.exists(sandbox.directory)
    for ended in (task, sandbox.exec("true")):
        with pytest.raises(SandboxError, match="stopped"):
            await ended


async def test_a_command_that_is_cancelled_or_cannot_be_handed_over_costs_nothing_else(start_any: Start) -> None:
    sandbox = await start_any()
    task = asyncio.create_task(sandbox.exec("sleep 2001"))
    await until_async(lambda: sandbox.busy, "the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 2001'")
    assert left.stdout.strip() == "0"
    for _ in range(70):  # more than the number of workers
        with pytest.raises(SandboxError, match="zero byte"):
            await sandbox.exec(["echo", "a\0b"])
        with pytest.raises(ConfigError, match="A-B"):
            await sandbox.exec("true", env={"A-B": "x"})
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_the_number_of_processes_is_bounded_per_sandbox(start_any: Start) -> None:
    sandbox = await start_any(processes=50)
    result = await sandbox.exec("i=0; while [ $i -lt 80 ]; do sleep 5 & i=$((i+1)); done", timeout_s=20)
    assert result.exit_code != 0
    assert "fork" in result.stderr.lower()


async def test_uploads_and_downloads_keep_contents_modes_and_links(start_any: Start, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "data").write_bytes(bytes(range(256)))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/er/data")
    back = tmp_path / "back"
    sandbox = await start_any()
    await sandbox.upload(str(source), "/place/with blank")
    await sandbox.upload(str(source / "run.sh"), "/place/renamed.sh")
    await sandbox.upload(str(source / "run.sh"), "/place/dir/")
    await sandbox.download("/place/with blank", str(back))
    await sandbox.download("/place/renamed.sh", str(tmp_path / "one.sh"))
    ran = ["'/place/with blank/run.sh'", "/place/renamed.sh", "/place/dir/run.sh"]
    assert [(await sandbox.exec(command)).stdout for command in ran] == ["ran\n"] * 3
    assert (back / "deep" / "er" / "data").read_bytes() == bytes(range(256))
    assert os.readlink(back / "link") == "deep/er/data"
    assert os.access(back / "run.sh", os.X_OK)
    assert (tmp_path / "one.sh").read_text() == "#!/bin/sh\necho ran\n"


async def test_reset_gives_the_image_back_and_kill_processes_keeps_the_files(start_any: Start) -> None:
    sandbox = await start_any()
    look = "ls -d /kept /etc/hostname-not 2>/dev/null; cat /tmp/note 2>/dev/null; "
    # The runner's own shells come and go; what is looked for is the process that was left behind.
    look += "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'slee[p] 500'"
    await sandbox.exec("touch /kept; echo note > /tmp/note; rm -rf /opt; (setsid sleep 500 &)")
    await sandbox.kill_processes()
    after_kill = (await sandbox.exec(look)).stdout
    await sandbox.reset()
    after_reset = (await sandbox.exec(look + "; ls -d /opt")).stdout
    assert after_kill.split() == ["/kept", "note", "0"]
    assert after_reset.split() == ["0", "/opt"]


AT_REST = {"file": b"written", "deep/file": b"x" * 100, "none": None, "deep": None, "pipe": None, "/w/../w/deep": None}
WOKEN = {"link": b"written", "gone": None, "/etc/passwd": b"root:"}


@pytest.fixture(params=["", "overlay"], ids=["overlay", "copy"])
def start_either(
    request: pytest.FixtureRequest, busybox_rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Starts sandboxes over an overlay, or as copies of their image."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", request.param)
    return Start(busybox_rootfs, scratch)


async def test_a_sandbox_at_rest_is_read_by_the_host_and_wakes_for_a_command(start_either: Start) -> None:
    sandbox = await start_either(workdir="/w")
    made = await sandbox.exec(
        "mkdir -p deep && printf written > file && printf %0100d 0 | tr 0 x > deep/file && ln -s file link && "
        "mkfifo pipe && ln -s /proc/self/environ out && (setsid sleep 500 &)"
    )
    assert made.exit_code == 0, made.stderr
    for path, content in (AT_REST | WOKEN).items():
        assert await sandbox.read(path, 5 if path == "/etc/passwd" else 1000) == content, path
    await sandbox.end_processes()
    for path, content in list(AT_REST.items())[:5]:
        assert await sandbox.read(path) == content, path
    assert await sandbox.read("deep/file", 7) == b"x" * 7
    assert sandbox.pid is None, "reading what the sandbox wrote starts no container"
    for path, content in WOKEN.items():
        await sandbox.end_processes()
        assert await sandbox.read(path, 5 if path == "/etc/passwd" else 1000) == content, path
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'slee[p] 500'")
    assert left.stdout == "0\n"
    await sandbox.end_processes()
    await sandbox.end_processes()
    await sandbox.restart()
    assert (await sandbox.exec("cat file")).stdout == "written"
    await sandbox.end_processes()
    await sandbox.reset()
    assert await sandbox.read("file") is None


LACKED = {"none": True, "none/deeper": True, "/no/such": True, "empty": True}
LACKED |= dict.fromkeys(
    ("file", "deep", "dots", "link", "gone", "linked/x", "../w/none/..", "/etc", "/", "/bound"), False
)


async def test_the_host_knows_what_a_sandbox_at_rest_lacks(start_either: Start, tmp_path: Path) -> None:
    sandbox = await start_either(workdir="/w", binds=(f"{tmp_path}:/bound",))
    made = await sandbox.exec(
        "mkdir deep empty dots && touch file deep/file dots/.hidden && ln -s file link && ln -s nowhere gone && "
        "ln -s / linked && ls /bound && rm /etc/passwd"
    )
    assert made.exit_code == 0, made.stderr
    assert not await sandbox.lacks("none"), "while it runs a command may make it at any time"
    await sandbox.end_processes()
    assert {path: await sandbox.lacks(path) for path in LACKED} == LACKED
    assert sandbox.pid is None, "looking starts no container"
    assert (await sandbox.exec("ls -d deep empty")).stdout == "deep\nempty\n"


async def test_an_image_with_little_more_than_a_shell_is_enough(start: Start, small_rootfs: str) -> None:
    sandbox = await start(small_rootfs, workdir="/w", env={"A": "b"})
    assert (await sandbox.exec("cat", user_input="in", timeout_s=5)).stdout == "in"
    assert (await sandbox.exec("while :; do :; done", timeout_s=0.3)).timed_out
    result = await sandbox.exec('echo "$A"; kill -9 $$')
    assert (result.exit_code, result.stdout, result.stderr) == (137, "b\n", "")


async def test_directories_of_the_image_can_be_deleted_replaced_and_moved(start: Start) -> None:
    sandbox = await start()
    result = await sandbox.exec(
        "set -e; cd /usr; rm -rf share/doc lib/python3; mkdir share/doc; ls -A share/doc; ls -d lib/python3"
    )
    assert result.stdout == ""
    assert "Input/output error" not in result.stderr
    assert "lib/python3" in result.stderr
    moved = await sandbox.exec("cp -a /usr/share/perl5 /p; rm -rf /usr/share/perl5; mv /p /usr/share/perl5; echo $?")
    assert moved.stdout == "0\n"


async def test_many_sandboxes_leave_no_descriptor_and_no_directory(rootfs: str, scratch: Path) -> None:
    four = asyncio.Semaphore(4)
    async with ApptainerProvider(scratch) as provider:

        async def one() -> None:
            async with four, await provider.start(SandboxSpec(rootfs)) as sandbox:
                assert (await sandbox.exec("echo x; sleep 300 &")).stdout == "x\n"

        await one()
        before = sorted(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(one() for _ in range(12)))
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 1
    assert not list((scratch / "owners").glob(f"{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("spec", "value"), [({"network": "tor"}, "tor"), ({"workdir": "here"}, "absolute"), ({"env": {"A-B": "x"}}, "A-B")]
)
async def test_a_wrong_spec_is_refused_with_its_value(start: Start, spec: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        await start(**spec)
