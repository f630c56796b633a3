"""Measures a day's events, and a first look at them: 1,000 pods, 100,000 slots, in simulated time.

``python -m tests.bench.events [--pods 1000] [--slots 100000] [--hours 24] [--seconds 900]`` writes the events and
summaries of some pods line by line, as pods do, and copies them for the other pods under other ids. Then another
process takes a first look at the run, with and without summaries. Prints bytes and times.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.ledgers import Clock

LOOK = """
import json, resource, sys, time
from pathlib import Path
began, cpu = time.monotonic(), time.process_time()
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.layout import RunDir
monitor = Monitor(RunDir(sys.argv[1]))
status = monitor.status()
took = time.monotonic() - began, time.process_time() - cpu
begun = time.monotonic()
monitor.status()
print(json.dumps({"s": took[0], "cpu_s": took[1], "again_s": time.monotonic() - begun,
    "rollouts": status["rollouts"], "bytes": int(Path("/proc/self/io").read_text().split()[1]),
    "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""


def write_pod(run: RunDir, number: int, slots: int, hours: float, seconds: float, ends_at: float) -> tuple[int, int]:
    """Writes the events and summaries of one pod. Returns its rollouts and how often its summary was replaced."""
    draw, clock = random.Random(number), Clock()
    path = run.event_file(f"900_{number}", "0")
    keeper, renames, inode = SummaryWriter(path, clock), 0, 0
    begins_at = ends_at - hours * 3600
    lines: list[bytes] = []

    def say(t: float, *events: AnyEvent) -> None:
        for event in events:
            event.t = round(begins_at + t, 3)
            lines.append(encode(event))

    say(0, PodEvent(state="started", job_id=f"900_{number}", node=f"n{number:04d}"))
    say(1, *(WorkerEvent(rank=r, state="ready", slots=slots // 8 + 1, node=f"n{number:04d}") for r in range(8)))
    stored, every = 0, seconds / slots
    for step in range(int(hours * 3600 / every)):
        clock.now = step * every
        rollout = f"django__django-{number:04d}{step:05d}/qwen3-32b/{step % 8}"
        events: list[AnyEvent] = [StartEvent(id=rollout, rank=1 + step % 7, attempt=0)]
        if step >= slots:
            ended = f"django__django-{number:04d}{step - slots:05d}/qwen3-32b/{(step - slots) % 8}"
            what = draw.random()
            if what < 0.02:
                events.append(AttemptEvent(id=ended, attempt=0, kind="model", error="no engine answered", rank=1))
            failed = {"status": "failed", "kind": "model", "error": "the engine has not answered for 600 s " * 3}
            said = {"status": "completed", "reward": 1.0} if what > 0.01 else failed
            events.append(
                RolloutEvent(id=ended, **said, seconds=draw.uniform(0.5, 1.5) * seconds, turns=31, cpu_s=45.25)
            )
            stored += 1
        say(clock.now, *events)
        if step % 8:
            continue
        with open(path, "ab") as file:
            file.write(b"".join(lines))
        lines.clear()
        keeper.tick()
        there = summaries.path_of(path)
        if there.exists() and there.stat().st_ino != inode:
            inode, renames = there.stat().st_ino, renames + 1
    return stored, renames


def copy_pod(run: RunDir, number: int, other: int) -> None:
    """Copies the events of one pod for another, with other rollouts."""
    path, copy = (run.event_file(f"900_{n}", "0") for n in (number, other))
    ours, theirs = (f"django-{n:04d}".encode() for n in (number, other))
    copy.write_bytes(path.read_bytes().replace(ours, theirs))
    if summaries.path_of(path).exists():
        body = summaries.path_of(path).read_bytes()[4:].replace(ours, theirs)
        summaries.path_of(copy).write_bytes(zlib.crc32(body).to_bytes(4, "little") + body)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--written", type=int, default=40, help="pods whose events are written line by line")
    parser.add_argument("--slots", type=int, default=100_000, help="of all pods")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--seconds", type=float, default=900, help="of a rollout in the mean")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        run = RunDir(Path(folder) / "run")
        run.create()
        Ledger(run).create()
        write_run(run, RunRecord(campaign={"name": "x"}, total=10**8))
        ends_at, slots = time.time(), given.slots // given.pods
        written = min(given.pods, given.written)
        pods = [write_pod(run, n, slots, given.hours, given.seconds, ends_at) for n in range(written)]
        stored, renames = (sum(column) * given.pods // written for column in zip(*pods, strict=True))
        for number in range(written, given.pods):
            copy_pod(run, number % written, number)
        size = sum(path.stat().st_size for path in run.events.glob("*.jsonl"))
        condensed = [path.stat().st_size for path in run.events.glob("*.summary")]
        print(
            f"{given.pods} pods, {given.slots} slots, {given.hours:g} h, "
            f"rollouts of {given.seconds:g} s: {stored} stored\n"
            f"events: {size / 1e6:,.0f} MB, {size / max(stored, 1):.0f} bytes a rollout, "
            f"{size / given.pods / given.hours / 1e3:.0f} kB a pod and hour\n"
            f"summaries: {sum(condensed) / 1e6:.1f} MB, replaced {renames / given.pods / given.hours:.1f} times a pod "
            f"and hour, {renames / given.hours / 3600:.2f} a second of all",
            flush=True,
        )
        for what in ("with summaries", "without"):
            if what == "without":
                for path in run.events.glob("*.summary"):
                    path.unlink()
            done = subprocess.run([sys.executable, "-c", LOOK, str(run)], stdout=subprocess.PIPE, check=True)
            said = json.loads(done.stdout)
            print(
                f"first look {what}: {said['s']:.1f} s ({said['cpu_s']:.1f} s of CPU), "
                f"{said['bytes'] / 1e6:,.0f} MB read, {said['mb']} MB of memory, "
                f"{said['rollouts']['completed']} completed, {said['rollouts']['failed']} failed; "
                f"the next {said['again_s']:.2f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
