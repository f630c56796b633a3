"""Another user of a node tries everything that a campaign at work has there; who runs it has the widest umask."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaflow_hpc.host.process import descendants
from megaflow_hpc.rundir.engine_pool import EnginePool, digest_of
from megaflow_hpc.rundir.layout import RunDir
from tests.support.accounts import INTRUDER
from tests.support.campaigns import CALL, Make, running
from tests.support.second_user import as_second_user
from tests.support.waiting import until

FURTHER = """
import json, os, socket, sys
told, found = json.load(sys.stdin), {}
def attempt(what, action, *arguments):
    try:
        found[what] = repr(action(*arguments))[:200]
    except OSError as error:
        pass
def connect(name):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(name)
    return "connected"
def put(path):
    os.symlink("/etc/passwd", os.path.join(path, "intruder"))
    return "put"
def replace(path):
    os.rename(path, path + ".moved")
    return "moved"
cmdlines = {}
for pid in told["processes"]:
    attempt(f"/proc/{pid}/cmdline", lambda: cmdlines.setdefault(pid, open(f"/proc/{pid}/cmdline").read()))
    found.pop(f"/proc/{pid}/cmdline", None)
for pid in told["processes"]:
    for part in ("fd", "map_files", "task/%s/fd" % pid):
        attempt(f"/proc/{pid}/{part}", os.listdir, f"/proc/{pid}/{part}")
    for part in ("cwd", "root", "exe", "fd/0", "ns/mnt"):
        attempt(f"/proc/{pid}/{part}", os.readlink, f"/proc/{pid}/{part}")
    attempt(f"/proc/{pid}/root/tmp", os.listdir, f"/proc/{pid}/root/tmp")
for name in told["sockets"]:
    attempt(f"socket {name!r}", connect, name)
for path in told["folders"]:
    attempt(f"{path}: put", put, path)
for path in told["files"] + told["folders"]:
    attempt(f"{path}: moved", replace, path)
    attempt(f"{path}: removed", os.remove, path)
    attempt(f"{path}: opened up", os.chmod, path, 0o777)
print(json.dumps({"found": found, "cmdlines": cmdlines}))
"""


def listening_sockets() -> set[str]:
    """Names of the Unix sockets of this host, abstract ones with a leading NUL."""
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]]
    return {row[7].replace("@", "\0", 1) if row[7].startswith("@") else row[7] for row in rows if len(row) == 8}


def ports(inodes: set[str]) -> list[int]:
    rows = [line.split() for f in ("tcp", "tcp6") for line in Path(f"/proc/net/{f}").read_text().splitlines()[1:]]
    return sorted({int(x[1].rpartition(":")[2], 16) for x in rows if x[3] == "0A" and x[9] in inodes})


def descriptors(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return set()


@pytest.mark.slow
def test_a_stranger_gets_nothing_of_a_campaign_at_work(
    place: Path, tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its umask leaves everything open, so what a stranger does not get with it they get with no other."""
    shared = place / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("TMPDIR", "MEGAFLOW_SCRATCH"):
        monkeypatch.setenv(name, str(shared))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    (tmp_path / "answers.yaml").write_text('default: [{text: "42", delay_s: 8}]\n')
    command = json.dumps(f"python3 -c '{CALL}'")
    campaign = make_campaign(
        1,
        f"model: {{engine: scripted, script: answers.yaml}}\nrun_dir: {place}/runs\n",
        agent=f"{{name: command, args: {{command: {command}}}}}",
    )
    campaign.write_text(campaign.read_text().replace("network: none", "network: gateway"))
    (place / "runs").mkdir(mode=0o755)
    memory = set(os.listdir("/dev/shm"))
    sockets = listening_sockets()
    before = os.umask(0)
    try:
        process, run = running(campaign)
    finally:
        os.umask(before)
    try:
        until(lambda: list(Path(run).glob("endpoints/*.json")), "the server registers")
        until(lambda: list(shared.glob("megaflow-*/owners/*/*/owner")), "a sandbox runs")
        mine = [process.pid, *descendants(process.pid)]
        here = [Path(run), *Path(run).rglob("*"), *(p for p in shared.rglob("*") if "cache" not in p.parts)]
        here += [Path("/dev/shm", name) for name in set(os.listdir("/dev/shm")) - memory if _own(f"/dev/shm/{name}")]
        here += [path for path in shared.glob("megaflow-*/cache/*")]
        held = set().union(*map(descriptors, mine))
        told = {
            "files": [str(p) for p in here if p.is_file() and not p.is_symlink()],
            "folders": [str(p) for p in here if p.is_dir() and not p.is_symlink()],
            "processes": mine,
            "ports": ports({name[8:-1] for name in held if name.startswith("socket:[")}),
            "sockets": sorted(listening_sockets() - sockets),
        }
        assert len(told["files"]) > 10
        assert len(mine) > 5
        assert len(told["ports"]) > 1
        assert told["sockets"]
        further = as_second_user(FURTHER, told)  # first: it tells whether there still was something to look at
        found = as_second_user(INTRUDER, told)
        keys = [json.loads(p.read_text())["key"] for p in Path(run).glob("endpoints/*.json")]
    finally:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert found == {}
    assert further["found"] == {}
    assert len(further["cmdlines"]) > 5
    assert not any(key in line for key in keys for line in further["cmdlines"].values())


def _own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False


MEMBER = """
import json, os, socket, sys
told = json.load(sys.stdin)
os.chdir(told["members"])
names = iter(told["names"])
os.mkdir(next(names))
os.mkfifo(next(names))
socket.socket(socket.AF_UNIX).bind(next(names))
os.symlink(told["victim"], next(names))
os.symlink("/nowhere", next(names))
with open(next(names), "wb") as file:
    file.truncate(1 << 40)
with open(next(names), "w") as file:
    file.write(told["victim"])
os.mkdir(b"\\xff")
print("{}")
"""


def test_what_a_member_puts_among_a_pools_members_shuts_nobody_else_out(place: Path) -> None:
    run = RunDir(place / "pool")
    run.create()
    pool = EnginePool(run.path)
    pool.create({"default": 1}, "group")
    victim = digest_of("the victim's key")
    (pool.members / victim).write_text(victim)
    names = [digest_of(str(number)) for number in range(7)]
    as_second_user(MEMBER, {"members": str(pool.members), "names": names, "victim": victim}, member=True)
    held = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert set(pool.users()) == {victim}
    assert len(os.listdir("/proc/self/fd")) == held
