"""Throwaway user accounts of a lab that root runs, the jobs they run, and what each account can try against another."""

from __future__ import annotations

import functools
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

GROUP = "mflab"
COMMENT = "throwaway account of tests/lab"

INTRUDER = """
import json, os, socket, ssl, sys
told, found = json.load(sys.stdin), {}
def attempt(what, action, *arguments):
    try:
        result = action(*arguments)
    except OSError as error:
        result = None if isinstance(error, (PermissionError, FileNotFoundError, ProcessLookupError)) else repr(error)
    if result is not None:
        found[what] = result
def read(path):
    open(path, "rb").read(1)
    return "read"
def peek(path):
    # Of a process that has ended and is not yet waited for, anybody may open these files; nothing is in them.
    return "read" if open(path, "rb").read(1) else None
def listing(path):
    os.listdir(path)
    return "listed"
def write(path):
    open(os.path.join(path, "intruder"), "w").close()
    return "written"
def ask(port, tls):
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    if tls:
        client = ssl._create_unverified_context().wrap_socket(client)
    client.sendall(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
    said = client.recv(200).split(b"\\r\\n")[0].decode("latin-1")
    return None if not said or " 401 " in said or " 400 " in said else said
def kill(pid):
    os.kill(pid, 0)
    return "signalled"
for path in told["files"]:
    attempt(path, read, path)
for path in told["folders"]:
    attempt(path + "/", listing, path)
    attempt(path + "/ (write)", write, path)
for pid in told["processes"]:
    for part in ("environ", "mem", "maps"):
        attempt(f"/proc/{pid}/{part}", peek, f"/proc/{pid}/{part}")
    attempt(f"signal to {pid}", kill, pid)
for port in told["ports"]:
    for tls in (False, True):
        try:
            said = ask(port, tls)
        except OSError:
            said = None
        if said:
            found[f"port {port}"] = said
print(json.dumps(found))
"""


class Account:
    """A throwaway user and its processes."""

    def __init__(self, name: str, lab: Path, shared: bool) -> None:
        self.name = name
        self.within: list[str] = []
        """Command prefix that runs a program on another host."""
        try:
            if pwd.getpwnam(name).pw_gecos != COMMENT:
                raise SystemExit(f"error: there is a user {name} that this command did not make")
        except KeyError:
            groups = ["--groups", GROUP] if shared else []
            subprocess.run(["useradd", "--create-home", "--comment", COMMENT, *groups, name], check=True)
        self.entry = pwd.getpwnam(name)
        self.home = Path(self.entry.pw_dir)
        self.home.chmod(0o700)
        self.before = set(self._outside())  # left by an earlier user with this uid
        tools = [Path(sys.executable).parent, Path(shutil.which("apptainer") or "/usr/bin/apptainer").parent]
        path = ":".join([*map(str, tools), "/usr/bin", "/bin", "/usr/sbin"])
        self.environment = {"HOME": str(self.home), "PATH": path, "SLURM_CONF": str(lab / "slurm.conf")}
        self.environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}

    def start(self, *words: object, **how: Any) -> subprocess.Popen[str]:
        shown = [f"{name}={value}" for name, value in self.environment.items()]
        command = [*self.within, "runuser", "-u", self.name, "--", "env", "-i", *shown, *map(str, words)]
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        return subprocess.Popen(command, cwd=self.home, text=True, **how)

    def call(self, *words: object, given: str = "") -> tuple[int, str, str]:
        process = self.start(*words, stdin=subprocess.PIPE)
        out, err = process.communicate(given, timeout=300)
        return process.returncode, out, err

    def cli(self, *words: object) -> tuple[int, str, str]:
        return self.call(sys.executable, "-m", "megaflow_hpc", *words)

    def write(self, name: str, content: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        self.own(self.home)
        return path

    def own(self, root: Path) -> None:
        for path in [root, *root.rglob("*")]:
            os.chown(path, self.entry.pw_uid, self.entry.pw_gid, follow_symlinks=False)

    def processes(self) -> list[int]:
        return [int(e.name) for e in os.scandir("/proc") if e.name.isdigit() and _owner(e.path) in self.ids]

    @functools.cached_property
    def ids(self) -> set[int]:
        """Return the user's own uid and its subordinate uids in containers."""
        for line in Path("/etc/subuid").read_text().splitlines():
            name, first, count = line.split(":")
            if name == self.name:
                return {self.entry.pw_uid, *range(int(first), int(first) + int(count))}
        return {self.entry.pw_uid}

    def ports(self) -> list[int]:
        """Return the TCP ports on which the user's processes listen."""
        lines = [line.split() for f in ("tcp", "tcp6") for line in Path(f"/proc/net/{f}").read_text().splitlines()[1:]]
        return sorted({int(x[1].rpartition(":")[2], 16) for x in lines if x[3] == "0A" and int(x[7]) in self.ids})

    def left(self) -> list[str]:
        """Return the user's files outside its home and the lab's logs, except images and the Python that nodes keep."""
        found = [f"process {pid}: {_command(pid)}" for pid in self.processes()]
        return [*found, *(what for what in self._outside() if what not in self.before)]

    def _outside(self) -> list[str]:
        scratch = f"/tmp/megaflow-{self.entry.pw_uid}"
        # Use find, because trees left by other users' tests are deeper than the maximum path length.
        first, last = min(self.ids - {self.entry.pw_uid}, default=self.entry.pw_uid), max(self.ids)
        kept = ["(", "-path", f"{scratch}/cache", "-o", "-path", f"{scratch}/python-*", ")", "-prune", "-o"]
        theirs = ["(", "-uid", str(self.entry.pw_uid), "-o", "-uid", f"+{first - 1}", "-uid", f"-{last + 1}", ")"]
        command = ["find", "/tmp", "/dev/shm", "/var/tmp", "-mindepth", "1", *kept, *theirs, "-print"]
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        ).stdout.splitlines()
        found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if scratch in line]
        return [what for what in found if what not in (scratch, f"{scratch}/owners", f"{scratch}/site.json")]

    def remove(self) -> None:
        shutil.rmtree(f"/tmp/megaflow-{self.entry.pw_uid}", ignore_errors=True)
        subprocess.run(["userdel", "--remove", self.name], check=False, capture_output=True)


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    except OSError:
        return "(ended)"


def tell(account: Account, run: Path) -> dict[str, Any]:
    """Return every path, port and process of an account that another account could attack."""
    everything = [run, *(p for p in run.rglob("*") if not p.is_symlink())]
    scratch = [Path(f"/tmp/megaflow-{account.entry.pw_uid}"), *Path("/tmp").glob("megaflow-pod.*")]
    scratch = [path for path in scratch if _owner(str(path)) == account.entry.pw_uid]
    return {
        "files": [str(p) for p in everything if p.is_file()],
        "folders": [str(p) for p in [*everything, *scratch] if p.is_dir()],
        "processes": account.processes(),
        "ports": account.ports(),
    }


def intrude(account: Account, told: dict[str, Any]) -> dict[str, str]:
    status, out, err = account.call("/usr/bin/python3", "-c", INTRUDER, given=json.dumps(told))
    assert status == 0, err
    return json.loads(out)
