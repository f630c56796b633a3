"""Watches over a child: starts it again when an input ended it.

An input that takes too much processor time, or waits for ever, is a fault (``hang``), as is one that ends the process
(``died``): a crash in a library, or more memory than the machine gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.security.fuzz.limits import CPU_S, WALL_S, Notes
from tests.support.places import ROOT

_TICK_S = 0.2
IDLE = "idle"
"""A child that feeds nothing: no fault of an input."""


@dataclass
class Outcome:
    """What a target was given, and what came of it."""

    target: str
    runs: int = 0
    seconds: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)
    """Text by kind."""

    @property
    def rate(self) -> float:
        """Inputs a second."""
        return self.runs / self.seconds if self.seconds else 0.0


def fuzzed(target: str, folder: Path, *, count: int = 0, seconds: int = 0, seed: int = 1) -> Outcome:
    """Feeds a target ``count`` inputs that are always the same, or as many as ``seconds`` allow.

    Args:
        folder: where notes, corpus and faults are; see :mod:`.child`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(target)
    began = time.monotonic()
    restarts = 0
    while True:
        left = seconds - (time.monotonic() - began)
        if restarts > 200 or (seconds and left < 3):
            break
        options = ["--count", str(count)] if count else ["--seconds", str(int(left))]
        (folder / "notes").unlink(missing_ok=True)
        ended, text = _run(target, folder, [*options, "--seed", str(seed + restarts)])
        notes = Notes(folder / "notes")
        outcome.runs += notes.counts[1]
        if ended == "finished":
            break
        restarts += 1
        if not notes.counts[0]:
            raise RuntimeError(f"{target}: the child ended before it was fed\n{text}")
        if ended != IDLE:
            _keep(folder, ended, notes.input, text)
        if count:
            break  # the same inputs would follow
    outcome.seconds = time.monotonic() - began
    outcome.faults = {path.stem: path.read_text(errors="replace") for path in sorted((folder / "faults").glob("*.txt"))}
    return outcome


def _run(target: str, folder: Path, options: list[str]) -> tuple[str, str]:
    """Runs a child to its end.

    Returns:
        How it ended (``finished``, :data:`IDLE`, ``hang…`` or ``died…``), and the last it said.
    """
    command = [sys.executable, "-m", "tests.security.fuzz.child", target, str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "HDF5_USE_FILE_LOCKING": "FALSE"}
    said = folder / "said"
    with open(said, "wb") as file:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        hung = _watched(child, folder / "notes")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = said.read_text(errors="replace")[-20_000:]
    if hung == IDLE:
        return IDLE, text
    if hung:
        return f"hang-{_place(text)}", f"{hung}\n{text}"
    if child.returncode:
        return f"died-{-child.returncode}-{_place(text)}", f"ended with status {child.returncode}\n{text}"
    return "finished", text


def _watched(child: subprocess.Popen[bytes], file: Path) -> str:
    """Waits for a child's end; what it was killed for, if it was."""
    seen, since, cpu_before = (-1, -1), 0.0, 0.0
    notes: Notes | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_TICK_S)
            return ""
        cpu, now = _cpu_s(child.pid), time.monotonic()
        if notes is None and file.exists():
            notes = Notes(file)
        counts = notes.counts if notes else (0, 0)
        if counts != seen:
            seen, since, cpu_before = counts, now, cpu
            continue
        fed = counts[0] != counts[1]  # else it begins, ends, or looks for an input
        if not fed and now - since > 2 * WALL_S:
            return IDLE
        if fed and (now - since > WALL_S or cpu - cpu_before > 2 * CPU_S):
            child.send_signal(signal.SIGABRT)  # it says where it is
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            return f"an input took {cpu - cpu_before:.0f} s of processor time and {now - since:.0f} s"


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _place(text: str) -> str:
    """The innermost line of the package in what faulthandler printed."""
    for line in text.splitlines():
        if line.strip().startswith("File ") and "megaflow_hpc/" in line:
            path, _, function = line.strip().removeprefix('File "').partition('", line ')
            return f"{Path(path).stem}-{function.rpartition(' in ')[2]}"
    return "nowhere"


def _keep(folder: Path, ended: str, data: bytes, text: str) -> None:
    key = "".join(c if c.isalnum() or c in "-_" else "" for c in ended)[:80] or hashlib.sha256(data).hexdigest()[:8]
    faults = folder / "faults"
    faults.mkdir(parents=True, exist_ok=True)
    if not (faults / f"{key}.txt").exists():
        (faults / f"{key}.input").write_bytes(data)
        (faults / f"{key}.txt").write_text(text)
