"""Measure what a thousand pods ask of a metadata server: real ledgers on a real directory, in simulated time.

``python -m tests.bench.pods [--pods 1000] [--seconds 120]`` lets so many pods start within ten seconds, then run with a
free slot each and nothing to claim, beside 200 engines and with limits, and then without any work, while somebody may
add some; and prints what they open, list and publish.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from megaflow_hpc.ledger import Claim, Ledger, OpenLease, PodIdentity, write_blocks
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout
from tests.support.ledgers import Clock
from tests.support.operations import counted

LISTING_S = 10.0
"""How often a pod looks at the engines and, without work, for a block."""
SOON_S = 1.0
"""How often it looks for a block that a consumer may add."""


class Pod:
    """What of one pod's I/O thread touches the run directory when nothing is stored."""

    def __init__(self, run: RunDir, number: int, pods: int, clock: Clock, few: int | None = None) -> None:
        more = {} if few is None else {"few": few}
        self.clock, self.began_at = clock, clock.now
        self.ledger = Ledger(run, PodIdentity(f"900_{number}", "0"), clock, pods=pods)
        endpoints = Endpoints(run, {"default": 1})
        budget = CampaignBudget(run, {"core_hours": 1e9, "wall": 1e9})
        self.coordination = Coordination(self.ledger, endpoints, budget, clock, **more)
        self.listed_at = self.looked_at = clock.now - LISTING_S * number / pods
        self.claims: list[Claim] = []
        self.ledger.register()

    def turn(self) -> None:
        """One of those that the thread takes every half second."""
        said = {"running": 96, "queued": 0, "stored": 0, "t": self.clock.now, "began_at": self.began_at, "core_s": 1.0}
        self.ledger.show(said, self.coordination.renew_s)
        self.ledger.renew()
        self.coordination.tick()
        if self.clock.now - self.listed_at >= LISTING_S:
            self.listed_at = self.clock.now
            self.coordination.list_engines()
            self.ledger.work_requests()
        if self.clock.now - self.looked_at >= (SOON_S if self.ledger.seen.awaited else LISTING_S):
            self.looked_at = self.clock.now
            assert self.ledger.claim(lambda owner: 0) is None


def make_run(folder: Path, blocks: int, engines: int) -> RunDir:
    """Returns a run of so many blocks, of one rollout each, and so many engines that serve."""
    run = RunDir(folder / "run")
    run.create()
    Ledger(run).create()
    write_blocks(run, [Rollout(f"t{n}", "default", 0, "nop") for n in range(blocks)], 1, size=1)
    for n in range(engines):
        EndpointFiles(run).publish(Endpoint(server=f"default.{n}", policy="default", url=f"https://n{n}:1", key="k"))
    return run


def start(run: RunDir, pods: int, clock: Clock) -> tuple[list[Pod], dict[str, float]]:
    """Has pods start within ten seconds, each of which claims two blocks; returns them and operations a pod."""
    found = []
    with counted(run.path) as operations:
        for number in range(pods):
            found.append(Pod(run, number, pods, clock))
            for _ in range(2):
                claim = found[-1].ledger.claim(lambda owner: 0)
                assert claim is not None
                found[-1].claims.append(claim)
            clock.now += 10 / pods
    return found, {kind: round(count / pods, 2) for kind, count in operations.items()}


def tail(run: RunDir, pods: list[Pod], clock: Clock, seconds: float) -> dict[str, float]:
    """Returns the operations a second of all pods while nothing is to be claimed."""

    def pass_by(seconds: float) -> None:
        end = clock.now + seconds
        while clock.now < end:
            for pod in pods:
                pod.turn()
            clock.now += 0.5

    pass_by(60)
    with counted(run.path) as operations:
        pass_by(seconds)
    return {kind: round(count / seconds, 1) for kind, count in operations.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        clock, began = Clock(), time.monotonic()
        run = make_run(Path(folder), 2 * given.pods, given.engines)
        pods, starting = start(run, given.pods, clock)
        print(f"{given.pods} pods start within 10 s: operations a pod {starting}", flush=True)
        print(f"nothing to claim: operations a second of all {tail(run, pods, clock, given.seconds)}")
        OpenLease(run, "default").put()
        for pod in pods:
            for claim in pod.claims:
                pod.ledger.mark_done(claim)
        print(f"waiting for a consumer: operations a second of all {tail(run, pods, clock, given.seconds)}")
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
