"""Counts the metadata operations a second of a day of 1,000 pods with 100,000 slots.

``python -m tests.bench.day [--pods 1000] [--slots 100000] [--engines 200] [--seconds 60]`` takes pods through the
phases of a run in simulated time: they start together, use all slots, a user follows and watches them, a tenth is
preempted together, nothing is left to claim, a tenth is killed together, and all end and are gathered. Ledgers,
coordination, journals, events, summaries and engines' reports are real, on a real directory. Files opened, directories
listed, links, renames, removals and looks at one file (stat) are counted. Rollouts take 900 s. Weights, training,
images and scratch directories are not part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from megaflow_hpc import config
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, read_block, write_blocks
from megaflow_hpc.model.server.server import HEARTBEAT_S
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent, StartEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import POLL_INTERVAL_S as VIEWERS_S
from megaflow_hpc.rundir.live import Viewers
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.record import RunRecord, read_run, write_run
from megaflow_hpc.trajectories import JournalWriter, gather
from megaflow_hpc.types import Rollout
from tests.support.journals import record
from tests.support.ledgers import Clock
from tests.support.operations import counted, so_far
from tests.support.samples import trajectory

LISTING_S = 10.0
"""Interval at which a pod lists the engines and, without work, looks for a block."""
TURN_S = 1.0
"""Interval between two turns of a pod's thread. Everything it does has a longer interval of its own."""
ROLLOUT_S = 900.0
LIMITS = {"core_hours": 1e9, "gpu_hours": 1e9, "wall": 1e9}


class Pod:
    """The part of a pod that uses the run directory."""

    def __init__(self, run: RunDir, number: int, pods: int, slots: int, clock: Clock) -> None:
        read_run(run)
        self.run, self.clock, self.began_at = run, clock, clock.now
        name = PodIdentity(f"900_{number}", "0")
        self.ledger = Ledger(run, name, clock, pods=pods)
        self.journal = JournalWriter(run.journal_file(name.pod, "0"))
        self.events = EventWriter(run.event_file(name.pod, "0"))
        self.summary = SummaryWriter(run.event_file(name.pod, "0"), clock)
        self.viewers = Viewers(run, name.name)
        self.coordination = Coordination(
            self.ledger, Endpoints(run, {"default": 1}), CampaignBudget(run, LIMITS), clock
        )
        self.listed_at = self.looked_at = self.viewed_at = clock.now - LISTING_S * number / pods
        self.stored_at, self.every_s = clock.now + ROLLOUT_S * number / pods / slots, ROLLOUT_S / slots
        self.wanted = 2
        """Number of blocks that it holds if it can."""
        self.held: list[tuple[Claim, list[str]]] = []
        self.journal.append(record(number, 0, trajectory(number)))
        self.journal.commit()
        self.ledger.register()
        self.events.write(PodEvent(state="started", job_id=name.pod, node="n"))
        self.events.flush()

    def turn(self) -> None:
        """Takes one turn of its thread."""
        now = self.clock.now
        progress = {"running": 96, "queued": 0, "stored": 0, "t": now, "began_at": self.began_at, "core_s": 1.0}
        self.ledger.show(progress, self.coordination.renew_s)
        self.ledger.renew()
        self._store(now)
        self.coordination.tick()
        if len(self.held) < self.wanted and now - self.looked_at >= (LISTING_S if not self.ledger.free else 0.0):
            self.looked_at = now
            self.claim()
        if now - self.listed_at >= LISTING_S:
            self.listed_at = now
            self.coordination.list_engines()
        if now - self.viewed_at >= VIEWERS_S:
            self.viewed_at = now
            self.coordination.asked()
        self.events.flush()
        self.summary.tick()

    def claim(self) -> None:
        """Claims a block if one is available."""
        claim = self.ledger.claim(lambda owner: 0)
        if claim is not None:
            self.held.append((claim, [rollout.id for rollout in read_block(self.run, claim.block).rollouts]))

    def _store(self, now: float) -> None:
        while self.held and now >= self.stored_at:
            self.stored_at += self.every_s
            claim, left = self.held[0]
            rollout = left.pop()
            self.events.write(StartEvent(id=rollout, rank=1, attempt=0))
            self.events.write(RolloutEvent(id=rollout, status="completed", reward=1.0))
            if not left:
                self.ledger.mark_done(claim)
                self.held.pop(0)

    def drain(self) -> None:
        """Gives its blocks back and ends, as at the end of an allocation."""
        for claim, left in self.held:
            self.ledger.release(claim, 0, left)
        self.held = []
        self.coordination.leave()
        self.summary.finish()
        self.ledger.show({"ended": "released"}, 0.0)
        self.ledger.renew(force=True)
        self.events.write(PodEvent(state="drained"))
        self.events.close()
        self.journal.close()


class Day:
    """The run, its pods and its engines."""

    def __init__(self, run: RunDir, pods: int, slots: int, engines: int, block: int) -> None:
        self.run, self.clock, self.each = run, Clock(), slots // pods
        run.create()
        Ledger(run).create()
        run.gpus.mkdir()
        campaign = config.parse({"name": "x", "tasks": ["t"], "agent": "oracle", "slurm": {"pods": {"count": pods}}})
        rollouts = [Rollout(f"t{n}", "default", 0, "nop") for n in range(4 * pods * block)]
        write_run(run, RunRecord(campaign=campaign.model_dump(mode="json"), total=len(rollouts)))
        write_blocks(run, rollouts, 1, size=block)
        self.engines = [
            Endpoint(server=f"default.{n}", policy="default", url="https://n:1", key="k") for n in range(engines)
        ]
        self.pods: list[Pod] = []
        self.seconds: list[int] = []
        """Number of operations up to each second of a phase."""
        self._beats = 0
        for engine in self.engines:
            self._beat(engine)

    def _beat(self, engine: Endpoint) -> None:
        """Renews an engine's report, as every half minute."""
        EndpointFiles(self.run).publish(engine)
        write_json(self.run.gpus / f"{engine.server}.json", {"gpus": 1, "gpu_s": 30.0})

    def start(self, pods: int) -> None:
        """Starts pods within ten seconds."""
        for number in range(pods):
            self.pods.append(Pod(self.run, number, pods, self.each, self.clock))
            self.pods[-1].claim()
            self.clock.now += 10 / pods

    def live(self, seconds: float, turn_s: float = TURN_S) -> None:
        """Lets time pass for pods and engines."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            for pod in self.pods:
                pod.turn()
            beats = int(self.clock.now / HEARTBEAT_S * len(self.engines))
            for beat in range(self._beats or beats, beats):
                self._beat(self.engines[beat % len(self.engines)])
            self._beats = beats
            self.clock.now += turn_s
            if turn_s == TURN_S:
                self.seconds.append(so_far())


@contextmanager
def phase(name: str, day: Day, among: float = 1.0, per: str = "a second") -> Iterator[None]:
    """Counts operations meanwhile. Prints them divided by ``among``, and those of the busiest second."""
    day.seconds = [0]
    with counted(day.run.path, whole=True) as operations:
        yield
    shown = ", ".join(f"{kind} {count / among:,.1f}" for kind, count in operations.most_common() if count)
    most = max((later - before for before, later in pairwise(day.seconds)), default=0)
    peak = f"{most:,}" if most else ""
    print(f"| {name} | {operations.total() / among:,.0f} {per} | {peak} | {shown} |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=100_000, help="of all pods")
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--block", type=int, default=64, help="rollouts of a block")
    parser.add_argument("--seconds", type=float, default=60, help="of each phase")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        run = RunDir(Path(folder) / "run")
        day = Day(run, given.pods, given.slots, given.engines, given.block)
        with phase("start of all pods within 10 s", day, given.pods, "a pod"):
            day.start(given.pods)
        day.live(90)
        with phase("all slots at work", day, given.seconds):
            day.live(given.seconds)
        follow(day)
        tenth = given.pods // 10
        with phase("a tenth of the pods is preempted together", day, given.seconds):
            for pod in day.pods[:tenth]:
                pod.drain()
            del day.pods[:tenth]
            day.live(given.seconds)
        for pod in day.pods:
            pod.wanted = 9
        day.live(120)
        for pod in day.pods:
            pod.wanted = len(pod.held) + 1
        with phase("a free slot each and nothing to claim", day, given.seconds):
            day.live(given.seconds)
        del day.pods[:tenth]  # with the one that leads
        with phase("a tenth was killed together, and is taken over from", day, 300):
            day.live(300)
        print(f"{sum(len(pod.held) for pod in day.pods)} blocks are held", file=sys.stderr)
        with phase("all pods end", day, len(day.pods), "a pod"):
            for pod in day.pods:
                pod.drain()
        with phase("gathering", day, given.pods, "a journal"):
            gather(run)
    return 0


def follow(day: Day) -> None:
    """Follows and watches the run, as users do."""
    run = Run(day.run)
    with phase("a first look", day, per="in all"):
        run.status()
    live = Live(day.run, run.monitor)
    for name, look in (("run", run.status), ("watch", lambda: live.look(run.status()))):
        day.live(1)
        with phase(f"a look of `{name}`", day, per="a look"):
            look()


if __name__ == "__main__":
    raise SystemExit(main())
