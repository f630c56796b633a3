"""A sandbox must not see, reach or leave behind anything of the host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, descendants
from tests.support.layers import unpacked
from tests.support.sandboxes import Start
from tests.support.waiting import until_async

CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).sendall(b'x')"


@pytest.mark.usefixtures("started_by")
async def test_neither_home_nor_host_environment_is_inside(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    for name in ("APPTAINER_BINDPATH", "SINGULARITY_BINDPATH", "APPTAINER_BIND"):
        monkeypatch.setenv(name, f"{secret}:/mnt/secret")
    monkeypatch.setenv("APPTAINERENV_LEAK_A", "leaked")
    monkeypatch.setenv("SINGULARITYENV_LEAK_B", "leaked")
    names = "SLURM_JOB_ID SLURM_STEP_NODELIST PMI_FD PMI_RANK PMIX_RANK SINGULARITY_CONTAIN APPTAINER_PWD LEAK_C"
    for name in (*names.split(), "OPENAI_API_KEY", "LD_PRELOAD_NOT"):
        monkeypatch.setenv(name, "leaked")
    sandbox = await start()
    # PID 1's environment as well: a command can read it.
    env = (await sandbox.exec("env; echo; echo COMMAND; tr '\\0' '\\n' < /proc/1/environ")).stdout
    paths = ["/mnt/secret", str(tmp_path), str(Path.home() / ".bashrc"), str(Path.cwd())]
    files = (await sandbox.exec(["ls", "-d", *paths])).stdout
    assert "leaked" not in env
    assert str(Path.home()) not in env
    assert files == ""
    assert not any(line.startswith(("SLURM", "PMI")) for line in env.splitlines())
    command = {line.partition("=")[0] for line in env.partition("\nCOMMAND\n")[0].splitlines()}
    assert not {name for name in command if name.startswith(("APPTAINER", "SINGULARITY"))}


TABLES = "cat /proc/[0-9]*/mountinfo /proc/mounts"
ENVIRONMENTS = "cat /proc/[0-9]*/environ | tr '\\0' '\\n'"


@pytest.mark.parametrize(
    ("started_by", "user", "layers"),
    [("apptainer", None, False), ("apptainer", "agent", True), ("clone", None, True), ("clone", "agent", False)],
    indirect=["started_by"],
)
async def test_no_path_of_the_host_stands_in_an_environment_or_the_mount_table_but_a_binds(
    start: Start, rootfs: str, scratch: Path, tmp_path: Path, started_by: str, user: str | None, layers: bool
) -> None:
    """The kernel itself shows the source of a bind on its file system, and this cannot be hidden."""
    above = unpacked([{"app/": "", "app/one": "1"}, {"app/": "", "app/two": "2"}], tmp_path / "layers")
    held = Rootfs(rootfs, lambda: None, layers=above) if layers else None
    sandbox = await start(rootfs=held, user=user, env={"OURS": "1"}, workdir="/app")
    hosts = (str(scratch), str(tmp_path), Path(rootfs).parent.name, "layer.root", "APPTAINER", "SINGULARITY")
    for _ in range(2):
        shown = (await sandbox.exec(f"{TABLES}; ls /app; {ENVIRONMENTS}")).stdout
        assert ("one\ntwo\n" in shown) == layers
        assert "PATH=/" in shown
        assert " overlay overlay rw,lowerdir=" in shown
        lines = [line for line in shown.splitlines() if " /.megaflow " not in line]
        assert [line for line in lines if any(word in line for word in hosts)] == []
        await sandbox.kill_processes()
    await start.close()
    remove_tree(tmp_path / "layers")


@pytest.mark.usefixtures("started_by", "runner")
async def test_every_process_of_a_sandbox_holds_nothing_of_the_host_but_its_pipes(start: Start) -> None:
    """Checks from the host the files, sockets and terminals that a process could reach by ``/proc/PID/fd``."""
    # Console and tty are only the runner's standard error.
    allowed = ("pipe", "/dev/null", "/dev/pts/", "/.megaflow/", "/dev/console", "/dev/tty")

    def held(init: int) -> set[str]:
        found = set()
        for pid in (init, *descendants(init)):
            try:
                for descriptor in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):  # closed between two looks
                        found.add(os.readlink(descriptor.path).partition(":")[0])
            except PermissionError:  # it starts a program, or ends
                found.add("unreadable")
        return {name for name in found if not name.startswith(allowed) and "/control-" not in name}

    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        sandbox = await start()
        pid = sandbox.pid
        assert pid is not None
        running = asyncio.create_task(sandbox.exec("sleep 30"))
        await until_async(lambda: sandbox.busy, "the command runs")
        # A program that starts has files of its image open for an instant.
        await until_async(lambda: not held(pid), f"nothing but pipes is open; first {held(pid)}", 5.0)
        running.cancel()


@pytest.mark.usefixtures("started_by")
async def test_namespaces_files_processes_and_ipc_are_the_sandboxes_own_and_rights_cannot_grow(
    start: Start, rootfs: str
) -> None:
    with open(os.devnull) as file, tempfile.NamedTemporaryFile(dir="/tmp") as marker:
        os.set_inheritable(file.fileno(), True)
        private, shared, user = await asyncio.gather(start(), start(network="host"), start(user="agent"))

        async def output(command: str | list[str]) -> str:
            return (await private.exec(command)).stdout.strip()

        code = "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1])"  # the last is listdir's own
        assert await output(["python3", "-c", code]) == "['0', '1', '2']"
        assert await output(f"ls {marker.name}") == ""
    for kind in ("pid", "ipc", "mnt", "user", "net"):
        name = await output(["readlink", f"/proc/self/ns/{kind}"])
        assert name.startswith(kind)
        assert name != os.readlink(f"/proc/self/ns/{kind}")
    assert (await shared.exec("readlink /proc/self/ns/net")).stdout.strip() == os.readlink("/proc/self/ns/net")
    assert int(await output("ls /proc | grep -c '^[0-9]'")) < 10
    assert await output("ls /dev/shm | wc -l") == "0"
    assert (await output("grep NoNewPrivs /proc/self/status")).split() == ["NoNewPrivs:", "1"]
    # As Docker's: no CAP_SYS_ADMIN, CAP_NET_ADMIN or CAP_SYS_PTRACE, and only in the sandbox's own namespaces.
    capabilities = await output("grep CapEff /proc/self/status")
    assert int(capabilities.split()[1], 16) & (1 << 21 | 1 << 12 | 1 << 19) == 0
    assert await output("touch /.megaflow/x /sys/x; mount -t tmpfs x /mnt; echo $?") != "0"
    assert await output("id -u; touch /x && echo ok") == "0\nok"
    assert (await user.exec("id -u")).stdout.strip() not in ("", "0")
    await private.exec("echo x > /etc/mine; rm -rf /usr/bin/git")
    test = "test -e /etc/mine || test ! -e /usr/bin/git"
    assert [(await sandbox.exec(test)).exit_code for sandbox in (private, shared)] == [0, 1]
    assert not Path(rootfs, "etc", "mine").exists()


@pytest.mark.usefixtures("started_by")
async def test_a_gateway_sandbox_reaches_exactly_what_is_served_on_its_listener(start: Start) -> None:
    sandbox = await start(network="gateway")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.readexactly(1))
        writer.close()

    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(serve, sock=await sandbox.listen(8123))
    async with server:
        good = await sandbox.exec(["python3", "-c", CONNECT, "8123"])
        other = await sandbox.exec(["python3", "-c", CONNECT, "8124"])
        result = await received, good.exit_code, other.exit_code
    assert result == (b"x", 0, 1)


OWNER = """
import asyncio, json, os, sys
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.host.process import argv, descendants

async def main():
    provider = ApptainerProvider(sys.argv[1])
    sandboxes = [await provider.start(SandboxSpec(sys.argv[2])) for _ in range(3)]
    for sandbox in sandboxes:
        await sandbox.exec("for i in 1 2 3; do setsid sleep 3000 & done")
    busy = asyncio.create_task(sandboxes[0].exec("sleep 3001"))
    while not any(b"3001" in argv(pid) for pid in descendants(sandboxes[0].pid)):
        await asyncio.sleep(0.01)
    print(json.dumps([sandbox.pid for sandbox in sandboxes]), flush=True)
    await asyncio.sleep(3000)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("started_by", "runner", "setpriv"),
    [
        ("apptainer", "program", True),
        ("apptainer", "shell", False),
        ("clone", "program", False),
        ("clone", "shell", True),
    ],
    indirect=["started_by", "runner"],
)
def test_a_killed_owner_leaves_no_process_and_the_janitor_removes_the_rest(
    rootfs: str, tmp_path: Path, started_by: str, runner: str, setpriv: bool
) -> None:
    """Processes end by the signal of their parent's death or, without it, by the end of the command pipe."""
    scratch = tmp_path / "scratch"
    launcher = "megaflow_hpc.environments.sandbox.launcher"
    hide = "" if setpriv else f"import {launcher} as launcher; launcher.dies_with_parent = lambda: []\n"
    owner = subprocess.Popen([sys.executable, "-c", hide + OWNER, str(scratch), rootfs], stdout=subprocess.PIPE)
    assert owner.stdout
    inits = json.loads(owner.stdout.readline())
    everyone = [Identity.of(pid) for init in inits for pid in (init, *descendants(init))]
    everyone += [Identity.of(pid) for pid in descendants(owner.pid)]
    assert len([identity for identity in everyone if identity]) > 12
    assert sweep(scratch)["owners"] == 0  # it lives
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while any(identity and identity.alive() for identity in everyone) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [identity for identity in everyone if identity and identity.alive()] == []
    assert len(list((scratch / "owners").iterdir())) == 1
    counts = sweep(scratch)
    assert (counts["owners"], counts["sandboxes"], counts["left"]) == (1, 3, 0)
    assert list((scratch / "owners").iterdir()) == []


def test_the_janitor_ends_processes_that_outlived_their_owner(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "3000"], start_new_session=True)
    identity = Identity.of(left.pid)
    sandbox = tmp_path / "owners" / "1-1" / "s1"
    sandbox.mkdir(parents=True)
    (sandbox / "owner").write_text(f"{identity}\n")
    other = tmp_path / "owners" / "1-1" / "s2"
    other.mkdir()
    (other / "owner").write_text(f"{os.getpid()}-1\n")  # our pid, another start time: must live
    assert sweep(tmp_path)["processes"] == 1
    assert left.wait(10) == -signal.SIGKILL


def test_janitors_at_the_same_time_leave_nothing_and_do_not_fail(tmp_path: Path) -> None:
    for owner, sandbox in itertools.product(range(20), range(3)):
        work = tmp_path / "owners" / f"{owner + 1}-1" / f"s{sandbox}" / "work"
        for name in range(10):
            (work / str(name)).mkdir(parents=True)
        work.chmod(0)
    sweeping = (
        "import sys; from megaflow_hpc.environments.sandbox.scratch import sweep; print(sweep(sys.argv[1])['left'])"
    )
    command = [sys.executable, "-c", sweeping, str(tmp_path)]
    janitors = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [janitor.communicate(timeout=60)[0] for janitor in janitors]
    assert [janitor.returncode for janitor in janitors] == [0] * 4
    assert said == ["0\n"] * 4
    assert list((tmp_path / "owners").iterdir()) == []


async def test_what_is_no_image_is_refused_and_named(start: Start, tmp_path: Path) -> None:
    image = tmp_path / "empty-image"
    for name in ("etc", "proc", "sys", "dev", "tmp", "bin"):
        (image / name).mkdir(parents=True)
    with pytest.raises(SandboxError, match=r"empty-image: .*no /bin/sh"):
        await start(image)
    (tmp_path / "broken.sif").write_text("not an image")
    with pytest.raises(SandboxError, match=r"broken\.sif: cannot be read as an image"):
        await start(tmp_path / "broken.sif")
    with pytest.raises(SandboxError, match=r"missing\.sif: no such image"):
        await start(tmp_path / "missing.sif")
