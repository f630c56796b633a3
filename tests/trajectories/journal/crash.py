"""Kills writers with SIGKILL inside their write and fsync windows, and counts what was lost or doubled.

    python -m tests.trajectories.journal.crash --kills 200 --seed 1

Each trial starts a writer that appends trajectories in group commits and reports on a pipe which rollouts were
acknowledged. It stops itself at a point drawn from: before a write, in the middle of a write (part of the bytes are in
the file), before an fsync, after an fsync but before it reports, and while it writes a gathered file. There the parent
kills it. Then the journal, and a file gathered from what is left, must contain every acknowledged rollout, each rollout
once, and whole. A pod that takes over the block must find the same rollouts stored.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import JournalWriter, gather, validate
from megaflow_hpc.trajectories.journal.winners import StoredBlock, StoredRollouts, index
from megaflow_hpc.trajectory import Trajectory
from tests.support.samples import run_dir, trajectory

WINDOWS = ("before write", "in write", "before fsync", "behind fsync", "in gather")


def writer(path: Path, seed: int, window: str) -> None:
    """The process that is killed. Prints ``ack N`` for each commit, and ``here`` when it waits to be killed."""
    draw = random.Random(seed)
    run = RunDir(path)
    countdown = draw.randint(1, 12)
    real_pwrite, real_fsync = os.pwrite, os.fsync
    armed = False

    def halt() -> None:
        os.write(1, b"here\n")
        signal.pause()

    def due(here: str) -> bool:
        nonlocal countdown
        if not armed or window != here:
            return False
        countdown -= 1
        return countdown <= 0

    def pwrite(file: int, data: bytes, place: int) -> int:
        if due("before write"):
            halt()
        if due("in write"):
            part = draw.randint(1, max(1, len(data) - 1))
            real_pwrite(file, memoryview(data)[:part], place)
            halt()
        return real_pwrite(file, data, place)

    def fsync(file: int) -> None:
        if due("before fsync"):
            halt()
        real_fsync(file)
        if due("behind fsync"):
            halt()

    with JournalWriter(run.journal_file("pod", "0")) as journal:
        os.pwrite, os.fsync = pwrite, fsync  # type: ignore[assignment]
        armed = True
        number = 0
        while True:
            for _ in range(draw.randint(1, 6)):
                record = {"kind": "trajectory", "epoch": 0, "block": 0, "trajectory": trajectory(number).to_record()}
                journal.append(record)
                number += 1
            journal.commit()
            os.write(1, b"ack %d\n" % number)
            if number > 60 and window == "in gather":
                from megaflow_hpc.trajectories.hdf5 import writer as module

                module.TrajectoryWriter.close = lambda _: halt()  # type: ignore[method-assign, misc, assignment]
                gather(run)


def stored(run: RunDir) -> tuple[int, set[str]]:
    """Returns the seal of the journal, and the rollouts that a successor finds stored within."""
    found = StoredRollouts(run)
    sealed = found.length("pod.0")
    return sealed, found.ids(0, [StoredBlock(0, "pod.0", sealed)])


def same(one: Trajectory, other: Trajectory) -> bool:
    return repr(one.to_record()) == repr(other.to_record())


def trial(path: Path, seed: int, window: str) -> tuple[int, int, int]:
    """Runs and kills one writer. Returns the number of acknowledged rollouts, of lost ones and of doubled ones."""
    run = run_dir(path)
    code = "import sys; from pathlib import Path; from tests.trajectories.journal.crash import writer\n"
    code += "writer(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    command = [sys.executable, "-c", code, str(path), str(seed), window]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = 0
        for line in process.stdout:
            if line == "here\n":
                break
            acknowledged = int(line.split()[1])
        process.kill()
        acknowledged = max([acknowledged, *(int(line.split()[1]) for line in process.stdout if line[0] == "a")])
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"seed {seed}, {window}: the writer ended by itself ({process.returncode})")
    expected = {trajectory(n).id for n in range(acknowledged)}
    lost = doubled = 0
    sealed, found_stored = stored(run)
    assert sealed <= run.journal_file("pod", "0").stat().st_size
    lost = len(expected - found_stored)
    for gathered in (False, True):
        if not gathered:
            found = index(run, {})
            ids = [entry.id for entry in found.winners]
            assert all(same(found.load(entry), trajectory(n)) for n, entry in enumerate(found.winners))
        else:
            file = gather(run)
            assert validate(file) == []
            with h5py.File(file) as opened:
                ids = list(opened["trajectories/id"].asstr()[:])
                whole = opened["tokens/id"][:].tobytes()
            assert whole == b"".join(s.tokens.tobytes() for n in range(len(ids)) for s in trajectory(n).sequences)
        lost = max(lost, len(expected - set(ids)))
        doubled = max(doubled, len(ids) - len(set(ids)))
    left = [p.name for p in run.path.iterdir() if p.name.startswith(".")]
    assert not left, left
    return acknowledged, lost, doubled


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    draw = random.Random(arguments.seed)
    totals: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.kills):
            window, seed = WINDOWS[number % len(WINDOWS)], draw.randrange(2**31)
            acknowledged, lost, doubled = trial(Path(directory) / str(number), seed, window)
            totals.update(acknowledged=acknowledged, lost=lost, doubled=doubled, **{window: 1})
            shutil.rmtree(Path(directory) / str(number))
    windows = ", ".join(f"{totals[window]} {window}" for window in WINDOWS)
    print(f"{arguments.kills} SIGKILLs ({windows}), seed {arguments.seed}")
    print(f"{totals['acknowledged']} rollouts acknowledged, {totals['lost']} lost, {totals['doubled']} doubled")
    return 1 if totals["lost"] or totals["doubled"] else 0


if __name__ == "__main__":
    sys.exit(main())
