"""Measures what a campaign costs after days of walltimes, preemptions and killed pods, in simulated time.

``python -m tests.bench.aged [--days 30] [--pods 1000] [--walltime 1h|4h|24h] [--rollouts N]`` lets every pod start
again at each walltime. Every start is real: it writes its lease, claims a block, stores its share of the rollouts, and
either releases its block, is preempted before it stores anything, or is killed. Some leaders are killed too. Only the
hours between a pod's first minutes and its end are skipped. Without ``--rollouts``, a start stores one. At days 1, 7
and the last, all pods run and are measured:

- file-system operations a second of all pods, and those of each look of ``run`` and each poll of a trainer;
- files and bytes by directory;
- the memory of rank 0 (of a pod that surveys the ledger) and of ``run``, and the seconds of a cold ``status``;
- simulated seconds from the death of the leader to the first survey of its successor;
- seconds and memory of gather.

The array is submitted anew every ten days, as ``resume`` does. ``--directory`` names the file system; a RAM disk makes
the history quickly and counts the same operations.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc import config
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.ledger import Ledger, PodIdentity, write_blocks
from megaflow_hpc.ledger.leader import COORDINATOR, Leader
from megaflow_hpc.pod.master import histories
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock, ClaimedBlocks
from megaflow_hpc.pod.master.coordination import Coordination, Role
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent, StartEvent, WorkerEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.pods.condensing import condense
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectories.journal import packs
from megaflow_hpc.trajectories.journal.winners import StoredRollouts
from megaflow_hpc.trajectories.reading.follow import Follower
from megaflow_hpc.types import Rollout
from tests.support.journals import record
from tests.support.ledgers import AnyTasks, Clock
from tests.support.operations import counted
from tests.support.samples import trajectory

SMALL: dict[str, Any] = {"messages": [], "attempts": [], "agent": "", "node": "", "job_id": ""}
"""Fields of a stored rollout that would only take space."""

WALLTIMES = {"1h": 1, "4h": 4, "24h": 24}
PREEMPTED, KILLED = 0.05, 0.02
"""Shares of starts that end before they store anything, and that are killed after they have stored something."""
LEADER_DIES_EVERY = 7
"""Every so many walltimes the leader is killed."""
RESUBMIT_DAYS = 10
TURN_S = 0.5
LISTING_S = 10.0
"""Interval at which a pod lists the engines and reads requests for work."""
SETTLE_S = 60.0
MINUTES = 6
"""Simulated minutes that pods live in a walltime that is not measured. A leader removes nothing in its first four."""
MAX_TAKEOVER_S = 900.0
PART = 100
"""Number of blocks whose rollouts are in memory at the same time."""
LIMITS = {"core_hours": 1e9, "wall": 1e9}

PEAK_MB = """
def peak_mb():  # ru_maxrss would include the parent's
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
"""
RANK0 = """
import json, sys
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.winners import StoredRollouts
run = RunDir(sys.argv[1])
ledger = Ledger(run, PodIdentity("999_0", sys.argv[2]), pods=int(sys.argv[3]))
ledger.register()
events = EventWriter(run.event_file("999_0", sys.argv[2]))
blocks = ClaimedBlocks(run, ledger, StoredRollouts(run), {})
coordination = Coordination(ledger, Endpoints(run, {}), CampaignBudget(run, {"core_hours": 1e9}))
survey = ledger.survey()
while not survey.advance(10_000):
    pass
ledger.show({"ended": "released"}, 0.0)
ledger.renew(force=True)
print(json.dumps({"mb": peak_mb()}))
"""
STATUS = """
import json, sys, time
began = time.monotonic()
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.rundir.layout import RunDir
run = Run(RunDir(sys.argv[1]))
run.status()
took, cpu = time.monotonic() - began, time.process_time()
for _ in range(3):
    run.status()
print(json.dumps({"s": took, "cpu_s": cpu, "mb": peak_mb()}))
"""
GATHER = """
import json, sys, time
from megaflow_hpc.trajectories import gather
began = time.monotonic()
gather(sys.argv[1])
took = time.monotonic() - began
print(json.dumps({"s": took, "mb": peak_mb()}))
"""


class Start:
    """One start of a pod: the part of it that uses the run directory."""

    def __init__(self, world: Aged, number: int) -> None:
        run, clock = world.run, world.clock
        pod, start = f"{world.array}_{number}", str(world.starts)
        name = PodIdentity(pod, start, pod, "n", 1, 1)
        self.clock, self.began_at, self.core_s = clock, time.time(), 0.0
        self.stored = 0
        self.journal = JournalWriter(run.journal_file(pod, start))
        self.ledger = Ledger(run, name, clock, pods=world.pods)
        self.events = EventWriter(run.event_file(pod, start))
        self.summary = SummaryWriter(run.event_file(pod, start), clock)
        self.blocks = ClaimedBlocks(run, self.ledger, StoredRollouts(run, self.ledger.renew), AnyTasks())
        self.coordination = Coordination(
            self.ledger, Endpoints(run, {"default": 1}), CampaignBudget(run, LIMITS), clock
        )
        self.listed_at = clock.now - LISTING_S * number / world.pods
        self.block: ClaimedBlock | None = None
        self.ledger.register()
        condense(run.events, pod, start)
        self.events.write(PodEvent(state="started", job_id=pod, node="n"))
        self.events.write(WorkerEvent(rank=1, state="ready", slots=96, node="n"))
        self.events.flush()

    @property
    def name(self) -> str:
        assert self.ledger.identity
        return self.ledger.identity.name

    def turn(self) -> None:
        """Takes one turn of the pod's I/O thread."""
        now = self.clock.now
        self._show()
        self.ledger.renew()
        self.coordination.tick()
        if now - self.listed_at >= LISTING_S:
            self.listed_at = now
            self.coordination.list_engines()
        self.events.flush()
        self.summary.tick()

    def _show(self, ended: str = "") -> None:
        shown: dict[str, Any] = {"running": 96, "queued": 0, "stored": self.stored, "t": time.time()}
        shown["began_at"] = self.began_at
        self.ledger.show({**shown, "core_s": self.core_s, "ended": ended}, self.coordination.renew_s)

    def forget(self) -> None:
        """Drops what the pod remembers of other pods and their blocks, because all pods share this process."""
        rules = self.ledger._rules
        rules.leases, rules.free = {}, []
        rules._known, rules._owners = set(), {}

    def store(self, most: int = 1) -> None:
        """Stores up to ``most`` rollouts of the pod's block."""
        assert self.ledger.identity
        packs.pack_journals(self.journal.path.parent, self.ledger.identity.pod, self.ledger.identity.start)
        if self.block is None or not self.block.rollouts:
            return
        claim, rollouts = self.block.claim, self.block.rollouts[:most]
        for rollout in rollouts:
            self.events.write(StartEvent(id=rollout.id, rank=1, attempt=0))
            stored = trajectory(0, id=rollout.id, task_id=rollout.task_id, group_id=rollout.group_id, **SMALL)
            self.journal.append(record(claim.block, claim.epoch, stored))
        assert self.ledger.committed(self.journal.commit)
        self.stored += len(rollouts)
        for rollout in rollouts:
            self.events.write(RolloutEvent(id=rollout.id, status="completed", reward=1.0))
        self.events.flush()
        for rollout in rollouts:
            self.blocks.settled(claim.block, rollout.id)

    def end(self, core_s: float) -> None:
        """Releases its block and ends, as at the end of an allocation."""
        self.core_s = core_s
        left = self.block.rollouts[self.stored : self.stored + 1] if self.block else []
        histories.write(self.ledger.run, self.name, {rollout.id: History(cuts=1) for rollout in left})
        self.blocks.release(self.journal.committed)
        self.coordination.leave()
        self.ledger.leave()
        self.summary.finish()
        self._show("released")
        self.ledger.renew(force=True)
        self.events.write(PodEvent(state="drained"))
        self.kill()

    def kill(self) -> None:
        """Closes its files. Nothing else happens, as after a SIGKILL."""
        self.events.close()
        self.journal.close()


@dataclass
class Aged:
    """A campaign in which pods start again and again."""

    run: RunDir
    pods: int
    days: int
    hours: int
    share: int = 1
    """Number of rollouts that a start stores."""
    clock: Clock = field(default_factory=Clock)
    array: int = 900
    starts: int = 0
    """Number of the next start of each pod of the array."""
    luck: random.Random = field(default_factory=lambda: random.Random(1))

    def create(self) -> None:
        """Plans the campaign without blocks."""
        self.run.create()
        self.run.partial.mkdir()
        Ledger(self.run).create()
        campaign = {"name": "x", "tasks": ["t"], "agent": "oracle", "slurm": {"pods": {"count": self.pods}}}
        dumped = config.parse(campaign).model_dump(mode="json")
        total = self.pods * (self.days + 1) * 24 // self.hours * self.share
        write_run(self.run, RunRecord(campaign=dumped, total=total))

    def add_day(self, day: int) -> None:
        """Adds a block for each pod, which takes it a day."""
        size = 24 // self.hours * self.share
        for first in range(0, self.pods * size, PART * size):
            last = min(first + PART * size, self.pods * size)
            rollouts = [Rollout(f"d{day}-{n}", "default", 0, "nop") for n in range(first, last)]
            write_blocks(self.run, rollouts, 1, size=size)

    def start(self) -> list[Start]:
        """Starts all pods within ten seconds. Each claims a block."""
        started = []
        for number in range(self.pods):
            started.append(Start(self, number))
            started[-1].block = started[-1].blocks.claim()
            started[-1].forget()
            self.clock.now += 10 / self.pods
        self.starts += 1
        return started

    def live(self, pods: list[Start], seconds: float) -> None:
        """Lets time pass for pods."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            for pod in pods:
                pod.turn()
            self.clock.now += TURN_S

    def walltime(self, number: int) -> None:
        """Lets all pods start, store and end, in a few simulated minutes, and skips the rest of the walltime."""
        pods = self.start()
        leader = pods[number % self.pods]
        for _ in range(MINUTES * 6):
            leader.turn()
            for _ in range(19):  # of the turns in ten seconds
                leader.coordination.tick()
            for pod in pods:
                pod.ledger.renew()  # the others look at nothing, because they end soon
            self.clock.now += 10.0
        for pod in pods:
            fate = self.luck.random()
            if pod is leader:
                fate = PREEMPTED if number % LEADER_DIES_EVERY == 0 else 1.0
            if fate >= PREEMPTED:
                pod.store(self.share)
            if PREEMPTED <= fate < PREEMPTED + KILLED:
                pod.kill()
            else:
                pod.end(self.hours * 3600 * 96)
        self.clock.now += self.hours * 3600

    def resubmit(self) -> None:
        """Starts a new array, as ``resume`` does after it has marked the pods that Slurm no longer knows."""
        ledger = Ledger(self.run)
        gone = ledger.gone()
        for name, lease in ledger.leases().items():
            if not lease.get("ended") and name not in gone:
                ledger.mark_gone(name)
        self.array, self.starts = self.array + 1, 0


def files_of(run: RunDir) -> dict[str, tuple[int, int]]:
    """Returns the number of files and their bytes by directory of the run, and by directory of its ledger."""
    sizes: dict[str, tuple[int, int]] = {}
    for directory, _, names in os.walk(run.path):
        parts = Path(directory).relative_to(run.path).parts
        top = "/".join(parts[: 2 if parts[:1] == ("ledger",) else 1]) or "."
        size = sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
        files, held = sizes.get(top, (0, 0))
        sizes[top] = files + len(names), held + size
    return {top: pair for top, pair in sizes.items() if pair[0]}


def measured(script: str, *words: object) -> dict[str, float]:
    """Runs a script in a process of its own and returns what it printed."""
    command = [sys.executable, "-c", PEAK_MB + script, *map(str, words)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def takeover_s(world: Aged, pods: list[Start]) -> float:
    """Kills the leader. Returns simulated seconds until another pod has surveyed the ledger; infinity if none has."""
    observer = Leader(world.run, COORDINATOR, clock=world.clock)
    observer.holder()
    dead = [pod for pod in pods if pod.name == observer.report.get("holder")]
    for pod in dead:
        pod.kill()
        pods.remove(pod)
    began, before = world.clock.now, {pod.name: pod.coordination.report for pod in pods}
    while world.clock.now - began < MAX_TAKEOVER_S:
        world.live(pods, TURN_S)
        for pod in pods:
            if pod.coordination.role is not Role.LEADER:
                before[pod.name] = pod.coordination.report
            elif pod.coordination.report is not before[pod.name]:
                return world.clock.now - began
    return float("inf")


def measure(world: Aged, day: int, seconds: float) -> dict[str, Any]:
    """Starts all pods, measures, and ends them."""
    pods = world.start()
    world.live(pods, SETTLE_S)
    with counted(world.run.path, whole=True) as operations:
        world.live(pods, seconds)
    row: dict[str, Any] = {"day": day, "all pods, operations/s": round(operations.total() / seconds, 1)}
    leaders = sum(pod.coordination.role is Role.LEADER for pod in pods)
    row["pods that lead; alone"] = f"{leaders}; {sum(pod.coordination.role is Role.ALONE for pod in pods)}"
    run = Run(world.run)
    with counted(world.run.path, whole=True) as operations:
        run.status()
    row["first look of run, operations"] = operations.total()
    world.live(pods, 5.0)
    with counted(world.run.path, whole=True) as operations:
        for _ in range(5):
            run.status()
    row["run, operations a look"] = round(operations.total() / 5, 1)
    del run
    follower = Follower(world.run)
    follower.entries()
    with counted(world.run.path, whole=True) as operations:
        follower.entries()
    row["poll of a trainer, operations"] = operations.total()
    status = measured(STATUS, world.run)
    row["cold status, s"], row["cold status, s of a processor"] = round(status["s"], 2), round(status["cpu_s"], 2)
    row["run, MB"] = status["mb"]
    row["rank 0 that surveys, MB"] = measured(RANK0, world.run, day, world.pods)["mb"]
    row["takeover of the leader, simulated s"] = takeover_s(world, pods)
    for pod in pods:
        with suppress(Exception):  # its fence may have closed
            pod.store(world.share)
        pod.end(world.hours * 3600 * 96)
    pods.clear()
    files = files_of(world.run)
    gathering = measured(GATHER, world.run)
    row["gather, s"], row["gather, MB"] = round(gathering["s"], 1), gathering["mb"]
    world.run.trajectories.unlink()
    own = {top: files.pop(top) for top in ("journal", "tasks", "ledger/done") if top in files}
    done = Ledger(world.run).done()
    claims = [path for path in (world.run.ledger / "claims").iterdir() if path.name[0] != "."]
    ended = [path.stat().st_size for path in claims if int(path.name[:6]) in done]
    own["claims of done blocks"] = len(ended), sum(ended)
    files["ledger/claims"] = files["ledger/claims"][0] - len(ended), files["ledger/claims"][1] - sum(ended)
    row["files of results and plan"] = ", ".join(f"{top} {n:,}" for top, (n, _) in own.items())
    row["MB of results and plan"] = ", ".join(f"{top} {size / 1e6:.1f}" for top, (_, size) in own.items())
    row["other files"] = sum(n for n, _ in files.values())
    row["MB of other files"] = round(sum(size for _, size in files.values()) / 1e6, 1)
    for top, (count, size) in sorted(files.items(), key=lambda pair: -pair[1][0])[:8]:
        row[f"{top}/"] = f"{count:,} files, {size / 1e6:.1f} MB"
    world.clock.now += world.hours * 3600
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table with a column for each day."""
    names = dict.fromkeys(name for row in rows for name in row if name != "day")
    lines = ["| | " + " | ".join(f"day {row['day']}" for row in rows) + " |", "| --- |" + " --- |" * len(rows)]
    lines += [f"| {name} | " + " | ".join(str(row.get(name, "")) for row in rows) + " |" for name in names]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--walltime", choices=WALLTIMES, default="24h")
    parser.add_argument("--rollouts", type=int, default=0, help="of the whole campaign; default: one for each start")
    parser.add_argument("--seconds", type=float, default=60, help="simulated seconds for which operations are counted")
    parser.add_argument("--directory", type=Path, help="on the file system to be used; /dev/shm is the fastest")
    given = parser.parse_args(arguments)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # every pod has its files open in this process
    packs.LISTING_AGE_S = 0.0  # hours pass in seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megaflow-aged-", dir=given.directory) as folder:
        hours = WALLTIMES[given.walltime]
        share = max(1, round(given.rollouts * hours / (24 * given.pods * given.days)))
        world = Aged(RunDir(Path(folder) / "run"), given.pods, given.days, hours, share)
        world.create()
        rows, number = [], 0
        world.add_day(0)
        for day in range(1, given.days + 1):
            world.add_day(day)
            for _ in range(24 // world.hours):
                number += 1
                world.walltime(number)
                print(f"\rday {day}, walltime {number}, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
            if day in (1, 7, given.days):
                rows.append(measure(world, day, given.seconds))
                peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                took_s = time.monotonic() - began
                print(f"\rday {day}: {json.dumps(rows[-1])} ({took_s:.0f} s, {peak_mb} MB)", file=sys.stderr)
            if day % RESUBMIT_DAYS == 0:
                world.resubmit()
        print(f"{given.pods} pods, walltimes of {given.walltime}, {number * given.pods:,} starts in {given.days} days")
        print(table(rows))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
