"""Tests a compute node together with the other nodes of a job: ``python -m megaflow_hpc.prove.node DIR``.

Each node runs one task. Tasks synchronise through files in ``DIR``, because MPI and the network are themselves under
test. Each task writes ``DIR/result.<task>.json``.

With ``--left MARK``, a task only lists this user's processes whose command line or environment contains ``MARK``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox import probe
from megaflow_hpc.environments.sandbox.scratch import file_system, scratch_base
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.address import address, listen_everywhere
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.process import node_name, parent, read_proc
from megaflow_hpc.resources import RUNNING

MEET_S = 90.0
"""Timeout in seconds for all tasks to reach the same step."""
POLL_S = 0.02
NAMES = 100
"""Number of names that all nodes try to claim simultaneously."""
RENAMES = 100
"""Number of times that a file is replaced while other nodes read it."""
PINGS = 5
GPUS_S = 60.0
"""Timeout in seconds for listing the GPUs."""
VISIBLE_S = 30.0
"""Timeout in seconds for a change to become visible on another node."""


class Nodes:
    """A task's view of the job's nodes.

    Args:
        folder: Directory shared by all nodes. It must be empty at first.
        task: Index of this task.
        tasks: Number of tasks, one per node.
    """

    def __init__(self, folder: Path, task: int, tasks: int) -> None:
        self.folder, self.task, self.tasks = folder, task, tasks

    def meet(self, step: str) -> None:
        """Waits until every task has reached ``step``.

        Raises:
            TimeoutError: A task did not reach the step in time.
        """
        write_atomic(self.folder / f"{step}.{self.task}", b"")
        self.wait(lambda: set(range(self.tasks)) - self._arrived(step) == set(), f"all nodes reach step {step}", MEET_S)

    def _arrived(self, step: str) -> set[int]:
        names = (name.rpartition(".") for name in os.listdir(self.folder))
        return {int(task) for stem, _, task in names if stem == step and task.isdecimal()}

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = VISIBLE_S) -> float:
        """Polls until ``condition`` is true. Returns the elapsed seconds.

        Raises:
            TimeoutError: The condition did not become true in time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    # --- the file system between nodes ---

    def new_files(self) -> dict[str, float]:
        """Measures the delay until a new file is visible on another node, and the difference between clocks.

        Task 0 writes a file and waits for a reply from each other node.

        Returns:
            ``visible_s`` (half of the longest round trip) and ``clock_s`` (the largest clock difference).
        """
        worst = drift = 0.0
        for n in range(PINGS):
            self.meet(f"ping{n}")
            if self.task:
                self.wait((self.folder / f"asked.{n}").exists, "a new file of another node is visible")
                write_atomic(self.folder / f"answer{n}.{self.task}", repr(time.time()).encode())
                continue
            began, began_at = time.monotonic(), time.time()
            write_atomic(self.folder / f"asked.{n}", b"")
            for other in range(1, self.tasks):
                path = self.folder / f"answer{n}.{other}"
                self.wait(path.exists, "a new file of another node is visible")
                half = (time.monotonic() - began) / 2
                worst = max(worst, half)
                drift = max(drift, abs(float(path.read_text()) - began_at - half) - half)
        return {"visible_s": round(worst, 3), "clock_s": round(max(0.0, drift), 1)}

    def links(self) -> int:
        """Creates hard links with the same names on all nodes at once. Returns the number of names that this task
        won.

        Raises:
            OSError: The file system does not support hard links.
        """
        taken = 0
        self.meet("links")
        for n in range(NAMES):
            private = self.folder / f"private.{self.task}"
            private.write_bytes(b"")
            with contextlib.suppress(FileExistsError):
                os.link(private, self.folder / f"name.{n}")
            taken += private.stat().st_nlink == 2
            private.unlink()
        return taken

    def renames(self) -> None:
        """Replaces a file repeatedly while other nodes read it. Readers must always find a complete file.

        Raises:
            ValueError: A reader found the file missing or incomplete.
        """
        path = self.folder / "replaced"
        content = b"0123456789" * 400
        if self.task == 0:
            write_atomic(path, content)
        self.meet("renames")
        ended = self.folder / "renames.ended"
        if self.task == 0:
            for _ in range(RENAMES):
                write_atomic(path, content)
            write_atomic(ended, b"")
            return
        bad, stale = "", 0
        while not ended.exists() and not bad:
            try:
                length = len(path.read_bytes())
                bad = "" if length == len(content) else f"{length} of {len(content)} bytes"
            except FileNotFoundError:
                bad = "missing"
            except OSError:  # a stale handle is reported as such, and reading again succeeds
                stale += 1
                bad = "stale at 20 reads in a row" if stale > 20 else ""
                continue
            stale = 0
        if bad:
            raise ValueError(f"a file that another node replaced by rename was {bad}")

    def appended(self) -> float:
        """Appends records to a file with fsync. Returns the seconds until another node has read all of them.

        Raises:
            TimeoutError: The records did not become visible in time.
        """
        path, record = self.folder / "journal", b"x" * 1000
        self.meet("append")
        if self.task == 0:
            with open(path, "ab") as file:
                for _ in range(10):
                    file.write(record)
                    file.flush()
                    os.fsync(file.fileno())
            write_atomic(self.folder / "append.done", b"")
            return 0.0
        self.wait((self.folder / "append.done").exists, "a new file of another node is visible")
        return self.wait(
            lambda: path.exists() and len(path.read_bytes()) == 10 * len(record), "appended bytes are read"
        )

    def rewritten(self) -> float:
        """Overwrites a small file in place, as pods do to renew leases. Returns the seconds until another node has
        read it.

        Raises:
            TimeoutError: The new content did not become visible in time.
        """
        path = self.folder / "lease"
        if self.task == 0:
            path.write_text("old")
        self.meet("rewrite")
        if self.task:
            self.wait(path.exists, "a new file of another node is visible")
            path.read_text()  # from now on, a cache may hold it
        self.meet("rewrite.read")
        if self.task == 0:
            with open(path, "r+") as file:
                file.write("new")
                file.flush()
                os.fsync(file.fileno())
            return 0.0
        return self.wait(lambda: path.read_text() == "new", "a file that was overwritten in place is read")

    # --- the network between nodes ---

    def network(self) -> list[str]:
        """Connects to every other node at the address that the node publishes.

        Returns:
            An error message for each unreachable node.
        """
        here = address()
        with listen_everywhere() as server:  # as engines do, because a name may have addresses of only one family
            threading.Thread(target=_answer, args=(server,), daemon=True).start()
            content = json.dumps([here, server.getsockname()[1]]).encode()
            write_atomic(self.folder / f"address.{self.task}", content)
            self.meet("network")
            messages = []
            for other in set(range(self.tasks)) - {self.task}:
                host, port = json.loads((self.folder / f"address.{other}").read_bytes())
                if message := _not_reached(host, port):
                    messages.append(message)
            self.meet("network.done")
        return messages


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        with connection, contextlib.suppress(OSError):
            connection.sendall(connection.recv(1024))


def _not_reached(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(b"hello")
            return "" if connection.recv(1024) == b"hello" else f"{host}: another program answered"
    except OSError as error:
        return f"{host}: {error}"


# --- this node alone ---


def here(folder: Path) -> dict[str, Any]:
    """Returns facts about this node. If scratch or sandboxes are unavailable, ``error`` contains the reason."""
    facts: dict[str, Any] = {
        "node": node_name(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "shared_file_system": file_system(str(folder)),
        "packages": [name for name in RUNNING if not _imports(name)],
        "squeue": _squeue(),
        "gpus": _gpus(),
        "scratch_warning": "",
    }
    try:
        scratch, facts["scratch_warning"] = scratch_base()
        room = os.statvfs(scratch)
        facts["scratch"] = scratch
        facts["scratch_type"] = file_system(scratch)
        facts["scratch_gb"] = round(room.f_bavail * room.f_frsize / 1e9, 1)
        facts["sandbox"] = asdict(probe.probe(scratch, find_apptainer()))
    except (MegaflowError, OSError) as error:
        facts["error"] = str(error)
    return facts


def _imports(name: str) -> bool:
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _squeue() -> bool:
    try:
        return subprocess.run(["squeue", "-h", "--me"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _gpus() -> int | None:
    """Returns the number of GPUs that nvidia-smi or rocm-smi lists. ``None`` if neither program exists or answers."""
    for command, mark in ((["nvidia-smi", "-L"], "GPU "), (["rocm-smi", "--showid"], "Device ID")):
        if shutil.which(command[0]):
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver hangs
                done = subprocess.run(command, capture_output=True, text=True, timeout=GPUS_S, check=False)
                return sum(mark in line for line in done.stdout.splitlines())
    return None


def left(mark: str) -> list[str]:
    """Returns the command lines of this user's processes that mention ``mark``, except processes of this job."""
    lines, own, pid = [], set[int](), os.getpid()
    while pid:
        own.add(pid)
        pid = parent(pid)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in own:
            continue
        try:
            line = read_proc(f"/proc/{entry}/cmdline")
            mentioned = line + b"\0" + read_proc(f"/proc/{entry}/environ")
        except OSError:  # it has ended, or belongs to another user
            continue
        if mark.encode() in mentioned and b"megaflow_hpc.prove.node" not in line:
            lines.append(f"{entry} {line.replace(bytes(1), b' ').decode(errors='replace').strip()}")
    return lines


STEPS = ("new_files", "links", "renames", "appended", "rewritten", "network")


def main(folder: Path, mark: str = "") -> int:
    """Runs all tests of this task and writes the result. With ``mark``, only runs :func:`left`."""
    task, tasks = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    if mark:
        write_atomic(folder / f"result.{task}.json", json.dumps({"left": left(mark)}).encode())
        return 0
    nodes = Nodes(folder, task, tasks)
    result: dict[str, Any] = {"here": here(folder)}
    try:
        nodes.meet("start")
        for step in STEPS:
            began = time.monotonic()
            try:
                result[step] = getattr(nodes, step)()
            except (OSError, ValueError) as error:
                result[step] = {"error": f"{error}"}
            nodes.meet(f"{step}.over")
            result[f"{step}_took_s"] = round(time.monotonic() - began, 2)
    except (OSError, ValueError) as error:
        result["error"] = str(error)
    write_atomic(folder / f"result.{task}.json", json.dumps(result).encode())
    return 0


if __name__ == "__main__":
    words = argparse.ArgumentParser(description="Test one compute node.")
    words.add_argument("folder", type=Path)
    words.add_argument("--left", default="")
    arguments = words.parse_args()
    raise SystemExit(main(arguments.folder, arguments.left))
