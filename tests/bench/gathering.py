"""Measures how long it takes to gather a whole campaign.

``python -m tests.bench.gathering [--rollouts 1000000] [--tokens 500] [--pods 20]`` writes the journals of several pods
in turn, so that their rollouts alternate in time. It then gathers them in a separate process, and prints wall and
processor time and the peak memory. At the end it reads the file and counts its ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.bench.transcripts import Transcripts

GATHER = """
import json, resource, sys, time
from megaflow_hpc.trajectories import gather, open_trajectories
began, cpu = time.monotonic(), time.process_time()
path = gather(sys.argv[1], {})
took, cpu = time.monotonic() - began, time.process_time() - cpu
with open_trajectories(path) as store:
    ids = store.column("id")
    found = len(ids), len(set(ids.tolist()))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps({"s": took, "cpu_s": cpu, "mb": memory, "found": found, "bytes": path.stat().st_size}))
"""
SAMPLES = 8
GROUP = 16
"""Rollouts of a commit."""


def write_journals(run: RunDir, pods: int, rollouts: int, tokens: int) -> int:
    """Writes the rollouts to the journals of ``pods`` pods in turn, and returns the size of the journals in bytes."""
    transcripts = Transcripts()
    drawn = [transcripts.draw(number, tokens, max(2, tokens // 750)) for number in range(12)]
    writers = [JournalWriter(run.journal_file(f"900_{pod}", "0")) for pod in range(pods)]
    for number in range(rollouts):
        task, sample = f"task-{number // SAMPLES:07d}", number % SAMPLES
        trajectory = replace(
            drawn[number % 12],
            id=f"{task}/default/{sample}", task_id=task, group_id=f"{task}/default", sample_index=sample,
        )  # fmt: skip
        pod = number % pods
        record = {"kind": "trajectory", "epoch": 0, "block": pod, "trajectory": trajectory.to_record()}
        writers[pod].append(pack_record(record))
        if number // pods % GROUP == GROUP - 1:
            writers[pod].commit()
    for writer in writers:
        writer.close()
    return sum(file.stat().st_size for file in run.journal.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description="Gather a whole campaign.")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--pods", type=int, default=20)
    parser.add_argument("--directory", help="for the run, about 11 GB by default")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gathering-", dir=given.directory))
    try:
        run = RunDir(folder / "run")
        run.create()
        Ledger(run).create()
        size = write_journals(run, given.pods, given.rollouts, given.tokens)
        print(f"{given.rollouts} rollouts of {given.tokens} tokens, {given.pods} pods: {size / 1e9:.2f} GB", flush=True)
        words = [sys.executable, "-c", GATHER, str(run.path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        found = json.loads(done.stdout)
        print(
            f"gathered: {found['s']:.0f} s wall, {found['cpu_s']:.0f} s of processor time, {found['mb']} MB of memory, "
            f"{found['bytes'] / 1e9:.2f} GB, ids and different ids: {found['found']}"
        )
        return found["found"] != [given.rollouts, given.rollouts]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
