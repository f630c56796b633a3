"""A list and a status say the same of a run, in every state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from megaflow_hpc.campaign.overview import _Look
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger.consumers import OpenLease
from megaflow_hpc.monitor.state import run_state
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, Marks
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.slurm.accounting import JobState
from tests.support.ledgers import prepared

Answer = list[JobState] | None
"""What Slurm says: ``None`` where nobody can tell."""
LOST = 100_000.0
"""Seconds after which nobody believes in a pod that says nothing."""


def pod(run: RunDir, name: str, *, job: str = "", dead: bool = False, age_s: float = 0.0, ended: str = "") -> None:
    """A start of a pod, as its lease and its events tell of it."""
    identity = Identity.of(os.getpid())
    assert identity is not None
    said = {"pod": name, "start": "0", "job_id": job, "host": os.uname().nodename, "pid": identity.pid}
    said |= {"pid_start": identity.start - dead, "counter": 1, "t": time.time() - age_s, "running": 0, "queued": 0}
    write_json(run.ledger / "leases" / f"{name}.0", said | {"stored": 1, "ended": ended})
    writer = EventWriter(run.event_file(name, "0"))
    writer.write(PodEvent(state="started", node="n", job_id=job))
    writer.write(RolloutEvent(id=f"{name}/p/0", status="completed"))
    if ended:
        writer.write(PodEvent(state=ended, stored=1))
    writer.close()
    path = run.event_file(name, "0")
    if age_s:
        lines = [{**json.loads(line), "t": time.time() - age_s} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def submitted(run: RunDir, array: str = "7") -> None:
    make_directory(run.jobs)
    write_json(run.jobs / f"{array}.json", {"role": "pods", "id": array})


def as_pool(run: RunDir) -> None:
    write_run(run, RunRecord(campaign={"name": "x", "pool": {}}))
    EndpointFiles(run).publish(Endpoint(server="p.0", policy="p", url="http://127.0.0.1:1/v1"))


def waiting(run: RunDir) -> None:
    pod(run, "local-1")
    write_run(run, RunRecord(campaign={"name": "x"}, total=1))
    OpenLease(run, "trainer").put()


RUNS, PENDS = [JobState("7_0", "RUNNING")], [JobState("7_0", "PENDING")]

CASES: dict[str, tuple[str, Answer, list[Callable[[RunDir], object]]]] = {
    "nothing has happened": ("planned", None, []),
    "nothing has happened, and Slurm was asked": ("planned", [], []),
    "finished": ("finished", RUNS, [submitted, lambda run: write_json(run.path / FINISHED, {})]),
    "cancelled": ("cancelled", RUNS, [submitted, lambda run: Marks(run).cancel()]),
    "queued": ("queued", PENDS, [submitted]),
    "submitted, and Slurm does not answer": ("unknown", None, [submitted]),
    "submitted, and Slurm has it no more": ("stopped", [], [submitted]),
    "its pod runs": ("running", RUNS, [submitted, lambda run: pod(run, "7_0", job="7_0")]),
    "its pod runs and says nothing": ("running", RUNS, [submitted, lambda run: pod(run, "7_0", job="7_0", age_s=LOST)]),
    "its pod was killed": ("stopped", [], [submitted, lambda run: pod(run, "7_0", job="7_0", age_s=LOST)]),
    "its pod was requeued": ("queued", PENDS, [submitted, lambda run: pod(run, "7_0", job="7_0", age_s=LOST)]),
    "Slurm is away, its pod not": ("running", None, [submitted, lambda run: pod(run, "7_0", job="7_0")]),
    "nobody is heard": ("unknown", None, [submitted, lambda run: pod(run, "7_0", job="7_0", age_s=LOST)]),
    "its pod drained": ("stopped", [], [submitted, lambda run: pod(run, "7_0", job="7_0", ended="drained")]),
    "a pod here": ("running", None, [lambda run: pod(run, "local-1")]),
    "a pod here that was killed": ("stopped", None, [lambda run: pod(run, "local-1", dead=True)]),
    "a pod here that drained": ("stopped", None, [lambda run: pod(run, "local-1", ended="drained")]),
    "a trainer may add rollouts": ("waiting", None, [waiting]),
    "a pool here": ("serving", None, [as_pool]),
    "a pool": ("serving", RUNS, [as_pool, submitted]),
    "a pool whose servers are gone": ("stopped", [], [as_pool, submitted]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_list_and_a_status_say_the_same(tmp_path: Path, case: str) -> None:
    state, live, steps = CASES[case]
    run = prepared(tmp_path / "run")
    write_run(run, RunRecord(campaign={"name": "x"}, total=10))
    for step in steps:
        step(run)
    look = _Look(run.path)
    if not look.settled:
        look.decide(live, "Slurm is away")
    jobs = None if live is None else {job.id for job in live}
    pending = [job.id for job in live or () if job.state == "PENDING"]
    assert (look.glance.state, Monitor(run).status(jobs, pending)["state"]) == (state, state), look.glance.cause
    assert bool(look.glance.cause) == (state == "unknown")


def test_every_state_is_among_the_cases() -> None:
    names = ("finished", "cancelled", "serves", "alive", "waits", "submitted", "started", "queued")
    values = product(*[(False, True)] * 7, (None, False, True))
    possible = {run_state(**dict(zip(names, each, strict=True))) for each in values}
    assert possible == {state for state, _, _ in CASES.values()}


def test_a_list_and_a_status_count_what_a_killed_pod_stored_last(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    write_run(run, RunRecord(campaign={"name": "x"}, total=10))
    pod(run, "local-1", dead=True)
    with open(run.event_file("local-1", "0"), "a") as file:
        for number in range(1, 5):
            event = {"event": "rollout", "id": f"local-1/p/{number}", "status": "completed"}
            file.write(json.dumps({**event, "t": time.time() + number}) + "\n")
    look = _Look(run.path)
    assert (look.glance.done, Monitor(run).status()["rollouts"]["completed"]) == (5, 5)
