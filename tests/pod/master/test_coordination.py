"""One pod looks at the ledger, the leases and the engines for all pods. If it is gone, another one does."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, write_blocks
from megaflow_hpc.ledger.calls import Call, Link
from megaflow_hpc.ledger.coordinator import PRUNE_S
from megaflow_hpc.ledger.leader import STALE_S, Survey
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.pod.master.coordination import SELDOM_S, SOON_S, Coordination, Role
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import STALE_S as STILL_S
from megaflow_hpc.rundir.live import STALE_VIEWER_CLEANUP_S, Asked, LiveFiles
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.ledgers import Clock, prepared, rollouts
from tests.support.operations import counted


class Pod:
    """A pod's ledger and its part in the coordination. By default even few pods follow a leader."""

    def __init__(self, run: RunDir, name: str, clock: Clock, few: int = 0, start: str = "0", **limits: float) -> None:
        self.clock = clock
        self.ledger = Ledger(run, PodIdentity(name, start), clock)
        self.endpoints = Endpoints(run, {"default": 1})
        self.coordination = Coordination(self.ledger, self.endpoints, CampaignBudget(run, limits), clock, few)
        self.progress = {"running": 1, "queued": 2, "stored": 3, "core_s": 3600.0, "began_at": 0.0}
        self.ledger.register()
        self.turn()

    def turn(self) -> None:
        self.ledger.show({**self.progress, "t": self.clock.now}, self.coordination.renew_s)
        self.ledger.renew()
        self.coordination.tick()

    @property
    def leads(self) -> bool:
        return self.coordination.role is Role.LEADER

    def claim(self) -> Claim | None:
        return self.ledger.claim(lambda owner: 0)


def go_by(clock: Clock, seconds: float, *pods: Pod, step_s: float = 1) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step_s
        for pod in pods:
            pod.turn()


def pods(run: RunDir, names: str, clock: Clock, **more: Any) -> list[Pod]:
    return [Pod(run, name, clock, **more) for name in names]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = prepared(tmp_path / "run")
    write_blocks(run, rollouts(3), size=1)
    return run


def test_of_many_pods_one_looks_who_watches_and_tells_the_others(run: RunDir) -> None:
    clock = Clock()
    first, second = pods(run, "ab", clock)
    viewer = LiveFiles(run)
    viewer.ask(["t/p/0"], "t/p/1")
    go_by(clock, 2 * SELDOM_S, first, second)
    assert (first.leads, second.leads) == (True, False)
    with counted(run.live) as operations:
        assert second.coordination.asked() == Asked(("t/p/0",), ("t/p/1",))
    assert operations == {}
    go_by(clock, STILL_S + 2 * SELDOM_S, first, second)  # its counter stands still
    assert first.coordination.asked() == Asked()
    assert second.coordination.asked() == Asked()
    go_by(clock, STALE_VIEWER_CLEANUP_S, first, second)
    assert list(run.live.iterdir()) == []


def test_who_is_not_the_coordinator_reads_one_file_and_learns_what_there_is_to_claim(run: RunDir) -> None:
    clock = Clock()
    first, second, third = pods(run, "abc", clock)
    for pod in (first, second, third):
        assert pod.claim() is not None
    go_by(clock, 2 * SELDOM_S, first, second, third)
    assert [pod.leads for pod in (first, second, third)] == [True, False, False]
    assert second.coordination.report.survey == Survey(open=3, claimable=0)
    assert second.claim() is None  # what it had seen as free is not
    clock.now += SOON_S
    with counted(run.path) as operations:
        second.coordination.tick()
        assert second.claim() is None
    assert operations == {"opens": 1}
    assert not second.ledger.seen.unsettled
    first.ledger.release(Claim(0, 0), 0, [])
    go_by(clock, 2 * SOON_S, first, second, third)
    assert second.claim() == Claim(0, 1)


def test_the_coordinator_marks_whose_lease_has_run_out_and_the_others_take_over(run: RunDir) -> None:
    clock = Clock()
    first, second, third = pods(run, "abc", clock)
    for pod in (first, second, third):
        assert pod.claim() is not None
    go_by(clock, TIMES.lease_s + 3 * SELDOM_S, first, second)  # the third is no more
    assert Ledger(run).gone() == {"c.0"}
    assert second.claim() == Claim(2, 1)


def test_who_takes_over_reads_the_claims_of_nobody_else(run: RunDir) -> None:
    write_blocks(run, rollouts(37), size=1)
    clock = Clock()
    all_pods = pods(run, "abcdefgh", clock)
    for pod in [*all_pods[:6] * 6, *all_pods[6:] * 2]:
        assert pod.claim() is not None
    left = [all_pods[0], *all_pods[6:]]
    go_by(clock, TIMES.lease_s + 3 * SELDOM_S, *left)  # five are no more, with six blocks each
    survey = left[1].coordination.report.survey
    assert survey is not None
    assert (survey.claimable, len(survey.orphans)) == (30, 30)
    for pod in left[1:]:
        with counted(run.ledger / "claims") as operations:
            taken = pod.claim()
        assert taken is not None
        assert taken.epoch == 1
        assert operations["opens"] <= 4, "its own claim, and none of the 38 others"


def test_a_start_takes_its_own_blocks_back_though_another_pod_looks_for_all(run: RunDir) -> None:
    clock = Clock()
    first, second, third = pods(run, "abc", clock)
    for pod in (first, second, third):
        assert pod.claim() is not None
    go_by(clock, 2 * SELDOM_S, first, second, third)
    again = Pod(run, "c", clock, start="1")
    go_by(clock, 3 * SOON_S, first, second, again)
    assert again.coordination.report.survey == Survey(open=3, claimable=0, orphans=[(2, 0, "c.0")])
    assert second.claim() is None, "the lease of the start before has not run out"
    assert again.claim() == Claim(2, 1)


def test_a_claim_whose_answer_was_lost_is_found_though_another_pod_looks_for_all(run: RunDir) -> None:
    clock = Clock()
    first, second = pods(run, "ab", clock)
    assert [first.claim(), first.claim()] == [Claim(0, 0), Claim(1, 0)]
    go_by(clock, 2 * SELDOM_S, first, second)
    assert second.coordination.report.survey == Survey(open=3, claimable=1)

    answer = second.ledger._files.answer

    def lost(call: Call) -> object:
        found = answer(call)
        if isinstance(call, Link):
            raise OSError(errno.EIO, "the answer was lost")
        return found

    second.ledger._files.answer = lost  # type: ignore[method-assign]
    with pytest.raises(OSError, match="lost"):
        second.claim()
    second.ledger._files.answer = answer  # type: ignore[method-assign]
    go_by(clock, 2 * SELDOM_S, first, second)
    assert second.coordination.report.survey == Survey(open=3, claimable=0)
    assert second.claim() == Claim(2, 0)
    assert second.claim() is None


def test_another_pod_leads_when_the_coordinator_is_gone_or_leaves(run: RunDir) -> None:
    clock = Clock()
    first, second, third = pods(run, "abc", clock)
    go_by(clock, SELDOM_S, first, second, third)
    go_by(clock, STALE_S + TIMES.lease_s, second, third)
    assert second.leads
    second.coordination.leave()
    go_by(clock, 2 * SELDOM_S, third)
    assert third.leads
    assert third.claim() is not None


def test_what_all_have_used_is_summed_up_once_and_all_hear_of_it(run: RunDir) -> None:
    clock = Clock()
    all_pods = pods(run, "abc", clock, core_hours=2.5)
    go_by(clock, 2 * SELDOM_S, *all_pods)
    assert {pod.coordination.report.exceeded for pod in all_pods} == {
        "3.00 core-hours are used, limits.core_hours is 2.5"
    }


def test_engines_are_listed_once_for_all_and_read_where_something_has_changed(run: RunDir) -> None:
    clock = Clock()
    files = EndpointFiles(run)
    engine = Endpoint(server="default.0", policy="default", url="https://n0:1", key="secret")
    files.publish(engine)
    first, second = pods(run, "ab", clock)
    go_by(clock, 2 * SELDOM_S, first, second)

    def listed() -> list[bool]:
        changed = [first.coordination.list_engines()]
        go_by(clock, 3 * SOON_S, first, second)
        return [*changed, second.coordination.list_engines()]

    assert listed() == [True, True]
    assert second.endpoints.engines.all == first.endpoints.engines.all
    assert second.endpoints.engines.all[0]["key"] == "secret"
    assert (run.endpoints / ".listing").stat().st_mode & 0o777 == 0o600
    engine.heartbeat += 1
    files.publish(engine)
    assert listed() == [False, False]
    engine.weight_version = 7
    files.publish(engine)
    assert listed() == [True, True]
    assert second.endpoints.engines.all[0]["weight_version"] == 7
    engine.weight_version = 8
    files.publish(engine)
    assert first.coordination.list_engines()
    listing = (run.endpoints / ".listing").rename(run.path / "away")
    go_by(clock, 3 * SOON_S, first, second)
    assert not second.coordination.list_engines()
    listing.rename(run.endpoints / ".listing")
    assert second.coordination.list_engines(), "a listing that could not be read is looked at again"
    assert second.endpoints.engines.all[0]["weight_version"] == 8


def test_few_pods_each_look_for_themselves(run: RunDir) -> None:
    clock = Clock()
    first, second = pods(run, "ab", clock, few=2)
    go_by(clock, 2 * SELDOM_S, first, second)
    for pod in (first, second, first):
        assert pod.claim() is not None
    second.ledger.release(Claim(1, 0), 0, [])
    assert first.claim() == Claim(1, 1)  # at once: nobody has to report it


def test_status_says_how_far_pods_are_by_their_leases_or_by_the_report(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    write_run(run, RunRecord(campaign={"name": "x"}, total=3))
    for name in "ab":
        writer = EventWriter(run.event_file(name, "0"))
        writer.write(PodEvent(state="started"))
        writer.close()
    clock.now = 4e9  # later than the events
    both = pods(run, "ab", clock)
    go_by(clock, 2 * SELDOM_S, *both)
    monitor = Monitor(run)
    assert monitor.status()["rollouts"]["running"] == 2
    both[0].progress["running"] = 4
    go_by(clock, 2 * SELDOM_S, *both)
    monkeypatch.setattr("megaflow_hpc.monitor.status.FEW", 1)
    with counted(run.path) as operations:
        assert monitor.status()["rollouts"]["running"] == 5
    assert operations["opens"] <= 2
    assert [pod["stored"] for pod in monitor.status()["pods"]] == [3, 3]


# --- pods that are over -----------------------------------------------------------------------------------------------


def write_events(run: RunDir, pod: str, starts: int = 3) -> None:
    for start in range(starts):
        events = EventWriter(run.event_file(pod, str(start)))
        events.write(PodEvent(state="started", job_id=pod, node="n"))
        events.write(RolloutEvent(id=f"{pod}-{start}/p/0", status="completed"))
        events.write(PodEvent(state="drained"))
        events.close()


def event_files(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.events.iterdir())


def test_the_leader_condenses_the_events_of_arrays_that_are_over(run: RunDir) -> None:
    clock = Clock()
    write_run(run, RunRecord(campaign={"name": "x"}, total=100))
    for pod in ("8_0", "8_1", "9_0", "9_1", "local"):
        write_events(run, pod)
    whole = event_files(run)
    leader = Pod(run, "9_0", clock, start="2")
    holder, ended = Pod(run, "8_1", clock, start="2"), Pod(run, "9_1", clock, start="2")
    claim = holder.claim()
    assert claim is not None
    ended.ledger.show({**ended.progress, "ended": "released"}, 0.0)
    ended.ledger.renew(force=True)
    before = Monitor(run).status()
    go_by(clock, TIMES.lease_s - 10, leader, holder, step_s=10)
    assert event_files(run) == whole, "a listing may be old"
    go_by(clock, 4 * TIMES.lease_s, leader, holder, step_s=10)
    assert not (run.ledger / "leases" / "9_1.2").exists()
    left = sorted({*whole} - {f"local.{start}.jsonl" for start in range(3)} | {"local.2.condensed"})
    assert event_files(run) == left, "arrays 8 and 9 still have pods that live"
    holder.ledger.release(claim, 0, [])
    holder.ledger.show({**holder.progress, "ended": "released"}, 0.0)
    holder.ledger.renew(force=True)
    go_by(clock, 4 * TIMES.lease_s, leader, step_s=10)
    assert event_files(run) == sorted(
        ["8_0.2.condensed", "8_1.2.condensed", "local.2.condensed"] + [name for name in whole if name[0] == "9"]
    )
    after = Monitor(run).status()
    assert after["rollouts"] == before["rollouts"]
    assert [pod["pod"] for pod in after["pods"]] == [pod["pod"] for pod in before["pods"]]
    with counted(run.events) as operations:
        go_by(clock, 20 * PRUNE_S, leader, step_s=10)
    assert operations.total() <= 25, "later checks list the directory and read nothing"


def test_a_pod_whose_lease_is_hidden_for_a_while_keeps_its_events(run: RunDir) -> None:
    clock = Clock()
    for pod in ("8_0", "9_0"):
        write_events(run, pod)
    whole = event_files(run)
    leader, other = Pod(run, "9_0", clock, start="3"), Pod(run, "8_0", clock, start="3")
    claim = other.claim()
    assert claim is not None
    lease = run.ledger / "leases" / "8_0.3"
    for _ in range(4):  # by a cache, as if no check within a lease had seen it
        lease.rename(run.path / "hidden")
        go_by(clock, TIMES.lease_s - PRUNE_S, leader, step_s=10)
        (run.path / "hidden").rename(lease)
        go_by(clock, 2 * PRUNE_S, leader, other, step_s=10)
    assert event_files(run) == whole


def test_a_file_that_cannot_be_condensed_stops_no_coordinator(run: RunDir) -> None:
    clock = Clock()
    for pod in ("8_0", "8_1"):
        write_events(run, pod)
    (run.events / "8_0.2.jsonl").unlink()
    (run.events / "8_0.2.jsonl").mkdir()
    leader = Pod(run, "9_0", clock)
    go_by(clock, 3 * TIMES.lease_s, leader, step_s=10)
    assert "8_1.2.condensed" in event_files(run)
    assert "8_0.1.jsonl" in event_files(run)
    assert leader.leads
