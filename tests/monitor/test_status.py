"""What status reads, and how fast it says a campaign is."""

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
from megaflow_hpc.rundir.events import PodEvent, RolloutEvent, StartEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, OPEN
from megaflow_hpc.rundir.pods.condenser import SummaryWriter
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.operations import counted


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    write_run(run, RunRecord(campaign={"name": "x"}, total=10_000))
    return run


def ended(run: RunDir, pod: str, number: int, age_s: float) -> None:
    said = {"t": time.time() - age_s, "event": "rollout", "id": f"{pod}/p/{number}", "status": "completed"}
    with open(run.event_file(pod, "0"), "a") as file:
        file.write(json.dumps({**said, "kind": "", "error": ""}) + "\n")


def test_the_rate_is_that_of_all_pods_at_the_first_look_too(run: RunDir) -> None:
    for pod in range(12):
        for number in range(20):
            ended(run, f"7_{pod}", number, 200 - 10 * number)
    ended(run, "7_11", 21, 3000)  # long ago, and read last
    status = Monitor(run).status()
    assert status["rate_per_s"] == pytest.approx(240 / 200, rel=0.02)


def test_a_pod_here_that_was_killed_is_gone_at_once(run: RunDir) -> None:
    ours = Identity.of(os.getpid())
    assert ours is not None
    for pod, start in (("local-1", ours.start), ("local-2", ours.start - 1)):
        identity = PodIdentity(pod, "0", host=os.uname().nodename, pid=ours.pid, pid_start=start)
        Ledger(run, identity).register()
        with open(run.event_file(pod, "0"), "a") as file:
            file.write(json.dumps({"t": time.time(), "event": "pod", "state": "started"}) + "\n")
    status = Monitor(run).status()
    assert {pod["pod"]: pod["state"] for pod in status["pods"]} == {"local-1.0": "started", "local-2.0": "gone"}
    (run.ledger / "leases" / "local-1.0").unlink()
    (run.events / "local-1.0.jsonl").unlink()
    assert Monitor(run).status()["state"] == "stopped"


def test_nothing_runs_in_a_finished_campaign_whatever_the_last_lease_of_a_pod_says(run: RunDir) -> None:
    Ledger(run, PodIdentity("7_0", "0")).register()
    events = [PodEvent(state="started", job_id="7_0"), StartEvent(id="a/p/0", rank=1, attempt=0)]
    run.event_file("7_0", "0").write_bytes(b"".join(map(encode, events)))
    path = run.ledger / "leases" / "7_0.0"
    said = {"t": time.time(), "running": 2, "queued": 0, "stored": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    assert Monitor(run).status()["rollouts"]["running"] == 2
    (run.path / FINISHED).touch()
    assert Monitor(run).status()["rollouts"]["running"] == 0


def test_a_pod_without_work_is_said_while_another_has_more_than_it_can_run(run: RunDir) -> None:
    now = time.time()
    for pod, queued in (("7_0", 14), ("7_1", 0)):
        Ledger(run, PodIdentity(pod, "0")).register()
        with open(run.event_file(pod, "0"), "a") as file:
            file.write(json.dumps({"t": now - 300, "event": "pod", "state": "started", "job_id": pod}) + "\n")
            if queued:
                start = {"event": "start", "id": "a/p/0", "rank": 1, "attempt": 0}
                file.write(json.dumps({"t": now - 290, **start}) + "\n")
    said = {"7_0.0": (2, 14, 1), "7_1.0": (0, 0, 0)}
    monitor = Monitor(run)
    for lease, progress in said.items():
        path = run.ledger / "leases" / lease
        shown = {"t": now, **dict(zip(("running", "queued", "stored"), progress, strict=True))}
        path.write_text(json.dumps({**json.loads(path.read_text()), **shown}))
    status = monitor.status()
    assert [pod.get("idle_s") for pod in status["pods"]] == [None, 300]
    [warning] = monitor.idle_warning(status["pods"])
    assert warning.startswith("1 of 2 pods have nothing to run (for up to 300 s) while others have claimed 14 rollouts")
    assert monitor.at_work() == [("7_0", pytest.approx(now - 290))]


def test_following_many_pods_opens_few_files(run: RunDir) -> None:
    pods = 60
    for pod in range(pods):
        ended(run, f"7_{pod}", 0, 5)
        Ledger(run, PodIdentity(f"7_{pod}", "0")).register()
    progress = {f"7_{pod}.0": [time.time(), 2, 1, 1] for pod in range(pods)}
    assert Leader(run, COORDINATOR, "7_0.0").hold({"pods": pods, "progress": progress})
    monitor = Monitor(run)
    assert monitor.status()["rollouts"]["completed"] == pods
    for pod in range(pods):
        ended(run, f"7_{pod}", 1, 0)
    with counted(run.path) as operations:
        status = monitor.status()
    assert status["rollouts"]["completed"] == 2 * pods
    assert operations["opens"] <= 2
    assert sum(operations.values()) <= 20


def test_of_a_run_too_large_to_be_read_whole_what_failed_and_what_ends_from_now_on_is_listed(run: RunDir) -> None:
    for number in range(20):
        ended(run, "7_0", number, 100)
    said = {"t": time.time(), "event": "rollout", "id": "7_0/p/20", "status": "failed", "kind": "model", "error": "x"}
    path = run.event_file("7_0", "0")
    path.write_bytes(path.read_bytes() + json.dumps(said).encode() + b"\n")
    keeper = SummaryWriter(path)
    keeper.finish()
    assert not path.with_suffix(".summary").exists()  # a few lines need none
    path.write_bytes(path.read_bytes() + b"{}\n" * 2000)
    SummaryWriter(path).finish()
    listed = []
    for within in (1 << 20, 1000):
        monitor = Monitor(run)
        monitor.list_rollouts(within)
        live = Live(run, monitor)
        first = live.look(monitor.status())
        ended(run, "7_0", 21 + len(listed), 0)
        later = live.look(monitor.status())
        assert later.status["rollouts"]["completed"] == 21 + len(listed)
        assert later.status["rollouts"]["failed"] == 1
        listed.append([(len(seen.rollouts), seen.unlisted) for seen in (first, later)])
    assert listed == [[(21, 0), (22, 0)], [(2, 20), (3, 20)]]


def test_rollouts_that_end_twice_are_not_more_than_there_are(run: RunDir) -> None:
    write_run(run, RunRecord(campaign={"name": "x"}, total=4))
    consumer = run.path / OPEN / "trainer"
    consumer.parent.mkdir()
    consumer.touch()
    Ledger(run, PodIdentity("7_0", "1")).register()
    for start in ("0", "1"):  # the node of the first was taken for lost, and it lived
        for number in range(3):
            said = {"t": time.time() - 9 + number, "event": "rollout", "id": f"t/p/{number}", "status": "completed"}
            with open(run.event_file("7_0", start), "a") as file:
                file.write(json.dumps(said) + "\n")
    with open(run.event_file("7_0", "1"), "ab") as raw:
        raw.write(encode(PodEvent(t=time.time(), state="started", job_id="7_0")))
        raw.write(encode(StartEvent(t=time.time(), id="t/p/3", rank=1, attempt=0)))
    status = Monitor(run).status(live_jobs=["7_0"])
    assert (status["rollouts"]["completed"], status["rollouts"]["total"]) == (4, 4)
    assert status["eta_s"] == 0
    assert status["state"] == "running", "one of them runs"
    with open(run.event_file("7_0", "1"), "ab") as raw:
        raw.write(encode(RolloutEvent(t=time.time(), id="t/p/3", status="failed", kind="model")))
    status = Monitor(run).status(live_jobs=["7_0"])
    assert (status["rollouts"]["completed"], status["rollouts"]["failed"], status["state"]) == (3, 1, "waiting")


def test_an_error_that_is_nowhere_is_not_looked_for_at_every_look(run: RunDir) -> None:
    path = run.event_file("7_0", "0")
    began = StartEvent(t=1.0, id="t/p/0", rank=1, attempt=0)
    failed = RolloutEvent(t=2.0, id="t/p/0", status="failed", kind="x")
    path.write_bytes(encode(began) + encode(failed) + b"{}\n" * 200_000)
    monitor = Monitor(run)
    assert monitor.status()["first_failures"][0]["error"] == ""
    before = int(Path("/proc/self/io").read_text().split()[1])
    for _ in range(3):
        monitor.status()
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < path.stat().st_size / 2


def test_calls_whose_tokens_are_masked_are_counted_and_named_at_the_end(run: RunDir) -> None:
    for number, constrained in enumerate((3, 0, 4)):
        event = RolloutEvent(id=f"t{number}/p/0", status="completed", reward=1.0, turns=5, constrained=constrained)
        with open(run.event_file("7", "0"), "ab") as file:
            file.write(encode(event))
    monitor = Monitor(run)
    monitor.list_rollouts()
    monitor.refresh()
    rows = monitor.summary()
    assert rows["p"]["constrained"] == 7
    assert "p: 7 model calls constrained their tokens or overrode the policy's sampling" in summary({"policies": rows})
