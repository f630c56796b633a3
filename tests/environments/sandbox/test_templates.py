"""Clones behave like containers that Apptainer starts, and end like them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox import templates
from megaflow_hpc.environments.sandbox.templates import Template, supported
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.process import Identity, argv, descendants, parent
from tests.support.campaigns import Make
from tests.support.sandboxes import Start, clone_at_once, host_pid
from tests.support.waiting import until, until_async

SEEN = {
    "environment": "env | grep -v MEGAFLOW_COMMAND | sort",
    "first environment": "tr '\\0' '\\n' </proc/1/environ | cut -d= -f1 | sort",
    "rights": "grep -E 'Cap|NoNewPrivs|Seccomp|Uid|Gid|Groups|Sig(Blk|Ign)' /proc/self/status",
    "limits": "cat /proc/self/limits",
    "owners": "cut -c1-10 /proc/self/uid_map /proc/self/gid_map; cat /proc/self/setgroups; id",
    "bound": "cat /proc/sys/user/*",
    "devices": "stat -c '%A %N %t %T' /dev/* | grep -v console",
    "network": "tail -n +3 /proc/net/dev | cut -d: -f1; ls /proc/sys/net/ipv4/conf",
    "name": "hostname; pwd; umask; cat /proc/1/cmdline /proc/self/oom_score_adj",
    "names": "cat /etc/resolv.conf",
}


def cloned(sandbox: ApptainerSandbox) -> bool:
    return host_pid(sandbox) == sandbox.pid


def mounts(text: str) -> list[tuple[str, str, str]]:
    """Returns mount point, options and file system of each mount except Apptainer's terminal."""
    fields = [line.split() for line in text.splitlines()]
    found = [(line[4], line[5], line[line.index("-") + 1]) for line in fields]
    return sorted(one for one in found if one[0] != "/dev/console")


async def seen(sandbox: ApptainerSandbox) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, command in SEEN.items():
        result = await sandbox.exec(command)
        assert result.exit_code == 0, result
        found[name] = re.sub(r"s\d+-[0-9a-f]+-\d+", "s", result.stdout)
    found["mounts"] = mounts((await sandbox.exec("cat /proc/self/mountinfo")).stdout)
    return found


@pytest.mark.parametrize("network", ["none", "host"])
async def test_a_clone_has_what_a_container_of_apptainer_has(rootfs: str, scratch: Path, network: str) -> None:
    assert supported()
    async with ApptainerProvider(scratch) as provider:
        spec = SandboxSpec(rootfs, env={"ONE": "two  words"}, workdir="/app", disk_mb=50, network=network)  # type: ignore[arg-type]
        both = [await provider.start(spec) for _ in range(2)]
        (first_cloned, first), (second_cloned, second) = [(cloned(sandbox), await seen(sandbox)) for sandbox in both]
    assert (first_cloned, second_cloned) == (False, True)
    for name, what in first.items():
        assert second[name] == what, name


async def test_nothing_of_the_template_is_left_inside(
    start: Start, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone_at_once(monkeypatch)
    sandbox = await start()
    commands = (
        f"ls -d {scratch} /.megaflow/cloner.py /.megaflow/python; umount / /proc /sys /dev",
        "unshare --user true || unshare --mount true || echo refused",
        "ls /proc | grep -c '^[0-9]'; cat /proc/*/comm",
        "ls -l /proc/1/fd | grep -c socket",
    )
    paths, namespaces, processes, sockets = [(await sandbox.exec(command)).stdout for command in commands]
    assert (paths, namespaces, sockets) == ("", "refused\n", "0\n")
    assert "python" not in processes
    assert "loader" not in processes


REACH = """
import ctypes, fcntl, glob, os, re, sys
libc, reached = ctypes.CDLL(None, use_errno=True), []
def tried(what, call):
    try:
        found = call()
    except OSError:
        return
    if not isinstance(found, int) or found >= 0:
        reached.append(what)
for pid in map(int, sys.argv[2:]):
    tried(f"signal {pid}", lambda: os.kill(pid, 0))
    tried(f"pidfd {pid}", lambda: os.pidfd_open(pid))
    tried(f"proc {pid}", lambda: os.stat(f"/proc/{pid}"))
    tried(f"trace {pid}", lambda: libc.ptrace(16, pid, 0, 0))
    word = ctypes.create_string_buffer(8)
    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
    own, theirs = Part(ctypes.addressof(word), 8), Part(0x400000, 8)
    tried(f"memory {pid}", lambda: libc.process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0))
for kind in ("user", "pid"):
    space = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    tried(f"parent {kind}", lambda: fcntl.ioctl(space, 0xB702))
    for owner in (1, os.getpid()):
        tried(f"enter {kind}", lambda: libc.setns(os.open(f"/proc/{owner}/ns/user", os.O_RDONLY), 0x10000000))
handle = ctypes.create_string_buffer((8).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(8))
tried("handle", lambda: libc.open_by_handle_at(os.open("/", os.O_RDONLY), handle, 0))
for link in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        if "socket" in os.readlink(link):
            reached.append(link)
    except OSError:
        pass
reached += [line for line in open("/proc/net/unix").read().splitlines()[1:]]
reached += [line for line in open("/proc/self/mountinfo") if sys.argv[1] in line]
for top in ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp"):
    reached += [name for _, _, names in os.walk(top) for name in names if "others" in name]
print(reached)
"""
"""Arguments: the directory of another sandbox, then processes of the host by their numbers there."""


async def test_a_clone_reaches_neither_its_template_nor_another_clone(
    rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries process numbers, descriptors, namespaces, memory and files. A kill ends only its own processes."""
    clone_at_once(monkeypatch)
    async with ApptainerProvider(scratch) as provider:
        one, other = [await provider.start(SandboxSpec(rootfs)) for _ in range(2)]
        assert cloned(one)
        assert cloned(other)
        await other.exec("touch /tmp/others /dev/shm/others /dev/mqueue/others")
        template = parent(other.pid or 0)
        assert template is not None
        pids = [template, other.pid, *descendants(other.pid or 0), os.getpid()]
        reached = await one.exec(["python3", "-c", REACH, Path(other.directory).name, *map(str, pids)])
        assert reached.exit_code == 0, reached
        ended = await one.exec("kill -9 -1; kill -9 1; echo it went on")
        reached, _, other = reached.stdout, ended.stdout, (await other.exec("ls /tmp/others; echo and on")).stdout
    assert reached == "[]\n"
    assert other == "/tmp/others\nand on\n"


async def test_a_request_is_the_fields_that_it_was_made_of(tmp_path: Path) -> None:
    template = Template(str(tmp_path / "log"))
    (tmp_path / "log").touch()
    fields = ["none", "/d", "lowerdir=/", "/d/merged", "1", "/bin/sh", "0", "A=b\0/home:/home:rw"]
    with pytest.raises(SandboxError, match="zero byte"):
        await template.clone(fields, 2, lambda identity: None)


async def test_links_in_a_layer_lead_a_clone_nowhere(
    start: Start, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount points are files of the agent when the next container starts."""
    clone_at_once(monkeypatch)
    trap = scratch / "trap"
    trap.mkdir(parents=True, exist_ok=True)
    (trap / "resolv.conf").write_text("host's\n")
    sandbox = await start()

    def set_traps(paths: object) -> None:
        upper = Path(sandbox.directory, "layer", "upper")
        shutil.rmtree(upper / "etc", ignore_errors=True)
        (upper / "etc").symlink_to(trap)
        shutil.rmtree(upper / "dev", ignore_errors=True)
        (upper / "dev").symlink_to("/srv")

    await sandbox.end_processes(set_traps)
    assert cloned(sandbox) or sandbox.pid is None
    said = (await sandbox.exec("ls /srv; cat /etc/resolv.conf; echo x >/etc/resolv.conf")).stdout
    assert "null" in said
    assert "host's" not in said
    assert (trap / "resolv.conf").read_text() == "host's\n"
    assert os.listdir(trap) == ["resolv.conf"]


async def test_a_template_that_is_killed_takes_its_sandboxes_along_and_the_next_start_makes_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone_at_once(monkeypatch)
    sandbox = await start()
    assert sandbox.pid is not None
    template = Identity.of(parent(sandbox.pid))
    assert template is not None
    template.kill()
    await until_async(lambda: not template.alive(), "the template has ended")
    with pytest.raises(SandboxError, match="from outside"):
        await sandbox.exec("true")
    await sandbox.stop()
    other = await start()
    assert cloned(other)
    assert (await other.exec("echo on")).stdout == "on\n"


async def test_nothing_is_left_when_the_provider_is_closed(rootfs: str, scratch: Path) -> None:
    before = set(descendants(os.getpid()))
    async with ApptainerProvider(scratch) as provider:
        sandboxes = await asyncio.gather(*(provider.start(SandboxSpec(rootfs)) for _ in range(6)))
        await asyncio.gather(*(sandbox.exec("sleep 60 & echo") for sandbox in sandboxes))
        clones = sum(map(cloned, sandboxes))
        for sandbox in sandboxes[:3]:
            await sandbox.stop()
        result = clones
    assert result == 5
    assert set(descendants(os.getpid())) <= before  # an earlier idle mount may have ended by itself
    assert os.listdir(scratch / "owners") == []


def scratch_is_a_link(image: Path, scratch: Path) -> None:
    top = image / Path(os.path.realpath(scratch)).parts[1]
    shutil.rmtree(top, ignore_errors=True)
    top.symlink_to("/srv")


def environment_is_large(image: Path, scratch: Path) -> None:
    settings = image / ".singularity.d/env/99-large.sh"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f"export LARGE={'x' * 40000}\n")


def clones_are_off(image: Path, scratch: Path) -> None:
    os.environ["MEGAFLOW_SANDBOX_WITHOUT"] = "clones"


@pytest.mark.parametrize("change", [scratch_is_a_link, environment_is_large, clones_are_off])
async def test_apptainer_starts_every_container_that_cannot_be_a_clone(
    rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None]
) -> None:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "")
    image = tmp_path / "image" if change is scratch_is_a_link else scratch / change.__name__
    shutil.copytree(rootfs, image, symlinks=True, copy_function=os.link)
    change(image, scratch)
    length = 40000 if change is environment_is_large else 0
    async with ApptainerProvider(scratch, scratch / f"cache-{change.__name__}") as provider:
        for _ in range(3):
            sandbox = await provider.start(SandboxSpec(str(image)))
            assert (await sandbox.exec("echo ${#LARGE}")).stdout == f"{length}\n"
            assert not cloned(sandbox)


async def test_no_program_of_the_image_runs_in_the_template(
    rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template sees the scratch of all sandboxes and has the host's network. The image is not trusted."""
    clone_at_once(monkeypatch)
    image, reached = scratch / "hostile", scratch / "reached"
    shutil.copytree(rootfs, image, symlinks=True, copy_function=os.link)
    lines = f"echo $0 >>{reached}; echo $0 >>/ran"
    for place, text in (
        ("usr/bin/sh", f'#!/usr/bin/dash\n({lines}) 2>/dev/null\nexec /usr/bin/dash "$@"\n'),
        (".singularity.d/env/99-ours.sh", f"({lines}) 2>/dev/null\nexport OURS='one two'\n"),
        ("etc/ld.so.preload", "libm.so.6\n"),
    ):
        (image / place).unlink(missing_ok=True)
        (image / place).parent.mkdir(parents=True, exist_ok=True)
        (image / place).write_text(text)
        (image / place).chmod(0o755)
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(str(image))) as sandbox:
            assert sandbox.pid is not None
            assert cloned(sandbox)
            maps = Path(f"/proc/{parent(sandbox.pid)}/maps").read_text().splitlines()
            mapped = {line.split()[5] for line in maps if line.count("/")}
            ran = (await sandbox.exec("cat /ran")).stdout
            variable = (await sandbox.exec("echo $OURS")).stdout
    assert "/bin/sh" in ran.split()
    assert variable == "one two\n"
    assert not reached.exists(), reached.read_text()
    assert {name for name in mapped if not name.startswith("/.megaflow/")} == set()


async def test_what_a_rollout_left_is_no_part_of_the_environment_of_others(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    """The first sandbox over the image continues from a snapshot, so the environment is not read from it."""
    path = "/.singularity.d/env/99-agent.sh"
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs)) as sandbox:
            await sandbox.exec(f"mkdir -p ${{0%/*}} /.singularity.d/env; echo export AGENT=1 >{path}")
            kept = await sandbox.snapshot(tmp_path / "kept")
    async with ApptainerProvider(scratch) as provider:
        continued = await provider.start(SandboxSpec(rootfs), kept)
        others = [await provider.start(SandboxSpec(rootfs)) for _ in range(2)]
        every = [continued, *others]
        result = list(map(cloned, every)), [(await one.exec("echo $AGENT")).stdout.strip() for one in every]
    assert result == ([False, False, True], ["1", "", ""])


async def test_a_template_that_stands_still_delays_a_start_and_no_more(
    rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "START_TIMEOUT_S", 5.0)
    async with ApptainerProvider(scratch) as provider:
        first = [await provider.start(SandboxSpec(rootfs)) for _ in range(2)]
        assert first[1].pid is not None
        template = parent(first[1].pid)
        os.kill(template, signal.SIGSTOP)
        try:
            sandboxes = [*first, await provider.start(SandboxSpec(rootfs))]
            said = [(await sandbox.exec("echo on")).stdout for sandbox in sandboxes]
        finally:
            os.kill(template, signal.SIGCONT)
        result = list(map(cloned, sandboxes)), said
    assert result == ([False, True, False], ["on\n"] * 3)


async def test_starts_that_are_given_up_harm_no_other(rootfs: str, scratch: Path) -> None:
    """The template's child may have ended and been reaped before the provider asks about it."""
    async with ApptainerProvider(scratch) as provider:
        _, other = [await provider.start(SandboxSpec(rootfs)) for _ in range(2)]
        assert cloned(other)
        for turn in range(40):
            start = asyncio.create_task(provider.start(SandboxSpec(rootfs)))
            for _ in range(turn):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        async with await provider.start(SandboxSpec(rootfs)) as last:
            assert cloned(last)
        result = (await other.exec("echo on")).stdout
    assert result == "on\n"


def templates_below(pid: int) -> list[int]:
    return [one for one in descendants(pid) if any(word.endswith(b"/cloner.py") for word in argv(one)[-1:])]


@pytest.mark.slow
def test_rollouts_of_a_killed_template_are_tried_again_and_none_is_lost(
    make_campaign: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path))
    schedule = "slurm: {pods: {slots_per_rank: 3}}\n"
    run = Campaign.from_yaml(
        make_campaign(6, schedule, agent="oracle", solution="echo 1 >/begun; sleep 5; echo 42 >answer")
    ).submit(launcher="local")
    assert run.local is not None
    pod = run.local.pod.pid
    until(lambda: len(list(tmp_path.glob("megaflow-*/owners/*/*/layer/upper/begun"))) == 3, "three agents are at work")
    (killed,) = templates_below(pod)
    os.kill(killed, signal.SIGKILL)
    until(lambda: set(templates_below(pod)) - {killed}, "the pod has made another template")
    summary = run.wait(timeout_s=200)
    assert summary["rollouts"]["completed"] == summary["rollouts"]["total"] == 6
    with open_trajectories(run.path) as store:
        assert [(one.status, one.reward) for one in store] == [("completed", 1.0)] * 6
        assert sorted(one.attempt for one in store) == [0, 0, 0, 0, 1, 1]  # the first sandbox is Apptainer's own
    assert list(tmp_path.glob("megaflow-*/owners/*")) == []
    assert not any(b"cloner.py" in word for pid in descendants(os.getpid()) for word in argv(pid))
