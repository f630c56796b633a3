"""The status of a campaign: its counts, its rate, its pods, and what it costs to compute."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megaflow_hpc.cli.output import summary
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.ledger.leader import COORDINATOR, Leader
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.events import AnyEvent, PodEvent, RolloutEvent, StartEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, OPEN
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.operations import counted


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    write_run(run, RunRecord(campaign={"name": "x"}, total=10_000))
    return run


def append(run: RunDir, pod: str, *events: AnyEvent, start: str = "0") -> Path:
    path = run.event_file(pod, start)
    for event in events:
        event.t = event.t or time.time()
    with path.open("ab") as file:
        file.write(b"".join(map(encode, events)))
    return path


def completed(rollout: str, age_s: float = 0.0) -> RolloutEvent:
    return RolloutEvent(t=time.time() - age_s, id=rollout, status="completed")


def show_progress(run: RunDir, pod: str, running: int, queued: int, stored: int) -> None:
    """Writes a pod's progress to its lease."""
    path = run.ledger / "leases" / f"{pod}.0"
    progress = {"t": time.time(), "running": running, "queued": queued, "stored": stored}
    path.write_text(json.dumps({**json.loads(path.read_text()), **progress}))


def test_the_rate_is_that_of_all_pods_at_the_first_look_too(run: RunDir) -> None:
    for pod in range(12):
        append(run, f"7_{pod}", *(completed(f"{pod}/p/{number}", 200 - 10 * number) for number in range(20)))
    append(run, "7_11", completed("11/p/21", 3000))  # long ago, and read last
    assert Monitor(run).status()["rate_per_s"] == pytest.approx(240 / 200, rel=0.02)


def test_a_killed_pod_on_this_host_is_gone_at_once(run: RunDir) -> None:
    ours = Identity.of(os.getpid())
    assert ours is not None
    for pod, start in (("local-1", ours.start), ("local-2", ours.start - 1)):
        identity = PodIdentity(pod, "0", host=os.uname().nodename, pid=ours.pid, pid_start=start)
        Ledger(run, identity).register()
        append(run, pod, PodEvent(state="started"))
    status = Monitor(run).status()
    assert {pod["pod"]: pod["state"] for pod in status["pods"]} == {"local-1.0": "started", "local-2.0": "gone"}
    (run.ledger / "leases" / "local-1.0").unlink()
    (run.events / "local-1.0.jsonl").unlink()
    assert Monitor(run).status()["state"] == "stopped"


def test_nothing_runs_in_a_finished_campaign_whatever_the_last_lease_of_a_pod_says(run: RunDir) -> None:
    Ledger(run, PodIdentity("7_0", "0")).register()
    append(run, "7_0", PodEvent(state="started", job_id="7_0"), StartEvent(id="a/p/0", rank=1, attempt=0))
    show_progress(run, "7_0", running=2, queued=0, stored=0)
    assert Monitor(run).status()["rollouts"]["running"] == 2
    (run.path / FINISHED).touch()
    assert Monitor(run).status()["rollouts"]["running"] == 0


def test_a_pod_without_work_is_reported_while_another_has_more_than_it_can_run(run: RunDir) -> None:
    now = time.time()
    for pod in ("7_0", "7_1"):
        Ledger(run, PodIdentity(pod, "0")).register()
        append(run, pod, PodEvent(t=now - 300, state="started", job_id=pod))
    append(run, "7_0", StartEvent(t=now - 290, id="a/p/0", rank=1, attempt=0))
    show_progress(run, "7_0", running=2, queued=14, stored=1)
    show_progress(run, "7_1", running=0, queued=0, stored=0)
    monitor = Monitor(run)
    status = monitor.status()
    assert [pod.get("idle_s") for pod in status["pods"]] == [None, 300]
    [warning] = monitor.idle_warning(status["pods"])
    assert warning.startswith("1 of 2 pods have nothing to run (for up to 300 s) while others have claimed 14 waiting")
    assert monitor.at_work() == [("7_0", pytest.approx(now - 290))]


def test_following_many_pods_opens_few_files(run: RunDir) -> None:
    pods = [f"7_{number}" for number in range(60)]
    for pod in pods:
        append(run, pod, completed(f"{pod}/p/0", 5))
        Ledger(run, PodIdentity(pod, "0")).register()
    progress = {f"{pod}.0": [time.time(), 2, 1, 1] for pod in pods}
    assert Leader(run, COORDINATOR, "7_0.0").hold({"pods": len(pods), "progress": progress})
    monitor = Monitor(run)
    assert monitor.status()["rollouts"]["completed"] == len(pods)
    for pod in pods:
        append(run, pod, completed(f"{pod}/p/1"))
    with counted(run.path) as operations:
        status = monitor.status()
    assert status["rollouts"]["completed"] == 2 * len(pods)
    assert operations["opens"] <= 2
    assert sum(operations.values()) <= 20


def test_of_a_large_run_failures_and_what_ends_from_now_on_are_listed(run: RunDir) -> None:
    path = append(run, "7_0", *(completed(f"t/p/{number}", 100) for number in range(20)))
    append(run, "7_0", RolloutEvent(t=time.time(), id="t/p/20", status="failed", kind="model", error="x"))
    path.write_bytes(path.read_bytes() + b"{}\n" * 2000)
    SummaryWriter(path).finish()
    listed = []
    for max_bytes in (1 << 20, 1000):
        monitor = Monitor(run)
        monitor.list_rollouts(max_bytes)
        live = Live(run, monitor)
        first = live.look(monitor.status())
        append(run, "7_0", completed(f"t/p/{21 + len(listed)}"))
        later = live.look(monitor.status())
        assert later.status["rollouts"]["completed"] == 21 + len(listed)
        assert later.status["rollouts"]["failed"] == 1
        listed.append([(len(look.rollouts), look.unlisted) for look in (first, later)])
    assert listed == [[(21, 0), (22, 0)], [(2, 20), (3, 20)]]


def test_rollouts_that_end_twice_are_not_more_than_there_are(run: RunDir) -> None:
    write_run(run, RunRecord(campaign={"name": "x"}, total=4))
    consumer = run.path / OPEN / "trainer"
    consumer.parent.mkdir()
    consumer.touch()
    Ledger(run, PodIdentity("7_0", "1")).register()
    for start in ("0", "1"):  # the node of the first was taken for lost, and it was alive
        append(run, "7_0", *(completed(f"t/p/{number}", 9 - number) for number in range(3)), start=start)
    now = time.time()
    started = PodEvent(t=now, state="started", job_id="7_0"), StartEvent(t=now, id="t/p/3", rank=1, attempt=0)
    append(run, "7_0", *started, start="1")
    status = Monitor(run).status(live_jobs=["7_0"])
    assert (status["rollouts"]["completed"], status["rollouts"]["total"]) == (4, 4)
    assert status["eta_s"] == 0
    assert status["state"] == "running", "one of them runs"
    append(run, "7_0", RolloutEvent(t=time.time(), id="t/p/3", status="failed", kind="model"), start="1")
    status = Monitor(run).status(live_jobs=["7_0"])
    assert (status["rollouts"]["completed"], status["rollouts"]["failed"], status["state"]) == (3, 1, "waiting")


def test_an_error_that_is_missing_is_searched_for_once(run: RunDir) -> None:
    failed = RolloutEvent(t=2.0, id="t/p/0", status="failed", kind="x")
    path = append(run, "7_0", StartEvent(t=1.0, id="t/p/0", rank=1, attempt=0), failed)
    path.write_bytes(path.read_bytes() + b"{}\n" * 200_000)
    monitor = Monitor(run)
    assert monitor.status()["first_failures"][0]["error"] == ""
    before = int(Path("/proc/self/io").read_text().split()[1])
    for _ in range(3):
        monitor.status()
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < path.stat().st_size / 2


def test_constrained_calls_are_counted_and_named_at_the_end(run: RunDir) -> None:
    for number, constrained in enumerate((3, 0, 4)):
        event = RolloutEvent(id=f"t{number}/p/0", status="completed", reward=1.0, turns=5, constrained=constrained)
        append(run, "7", event)
    monitor = Monitor(run)
    monitor.list_rollouts()
    monitor.refresh()
    rows = monitor.summary()
    assert rows["p"]["constrained"] == 7
    assert "p: 7 model calls constrained their tokens or overrode the policy's sampling" in summary({"policies": rows})


LOST = """\
srun: error: cpu1: task 1: Exited with exit code 1
pod 3_0 start 0: lost (srun exit status 1)
requeueing element (1 of 3 in a row that stored nothing)
slurmstepd-cpu2: error: *** JOB 3 ON cpu2 CANCELLED AT 2026-11-26T18:00:03 DUE TO JOB REQUEUE ***
t/p/0: an agent may print error
srun: error: cpu2: task 2: Killed
srun: First task exited 15s ago
0: slurmstepd-cpu2: error: *** STEP 3.0 ON cpu2 CANCELLED AT 2026-11-26T18:00:02 ***
"""
"""A pod's log as Slurm 24.05 wrote it."""


def test_a_lost_pod_is_shown_with_the_cause_that_its_log_names(run: RunDir) -> None:
    log = run.logs / "pod-3_0.log"
    for start in ("0", "1"):
        append(run, "3_0", PodEvent(state="started", job_id="3_0", node="cpu2"), start=start)
    append(run, "3_1", PodEvent(state="started", job_id="3_1", node="cpu2"))
    told = {
        LOST: "srun: error: cpu2: task 2: Killed",
        LOST + "slurmstepd-cpu2: error: Detected 1 oom_kill event in StepId=3.0.\n": "Detected 1 oom_kill event",
        LOST + "pod 3_0 start 1: lost (srun exit status 137)\n0: pod: the next start\n": "task 2: Killed",
        LOST[: LOST.index("srun: error: cpu2")]: None,
    }
    for text, why in told.items():
        log.write_text("x" * 200_000 + "\n" + text)
        monitor = Monitor(run)
        gone, unlogged = monitor.status(live_jobs=[])["pods"]
        assert (gone["pod"], gone["state"], gone["starts"]) == ("3_0.1", "gone", 2)
        assert (why in gone["why"]) if why else ("why" not in gone)
        assert "why" not in unlogged
        with counted(run.path) as operations:
            monitor.status(live_jobs=[])
        with counted(run.path) as again:
            monitor.status(live_jobs=[])
        assert operations == again, "the log is not read at every look"


def test_the_pods_table_is_as_new_as_the_totals(run: RunDir) -> None:
    Ledger(run, PodIdentity("7_0", "0")).register()
    append(run, "7_0", PodEvent(state="started", job_id="7_0"))
    starts = [StartEvent(id=f"t/p/{number}", rank=1, attempt=0) for number in range(4)]
    append(run, "7_0", *starts, *(completed(f"t/p/{number}") for number in range(3)))
    show_progress(run, "7_0", running=4, queued=2, stored=0)  # the lease is from before
    lease = run.ledger / "leases" / "7_0.0"
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "t": time.time() - 30}))
    for monitor in (Monitor(run), Monitor(run)):
        status = monitor.status(live_jobs=["7_0"])
        [pod] = status["pods"]
        assert (pod["running"], pod["stored"]) == (1, 3)
        assert (status["rollouts"]["running"], status["rollouts"]["completed"]) == (1, 3)
        SummaryWriter(run.event_file("7_0", "0")).finish()
    append(run, "7_0", completed("t/p/3"))
    status = monitor.status(live_jobs=["7_0"])
    [pod] = status["pods"]
    assert (pod["running"], pod["stored"], status["rollouts"]["running"]) == (0, 4, 0)
