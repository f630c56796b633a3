"""The ledger does not grow with history: neither its files, nor what a pod, a coordinator or a reader asks of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, write_blocks
from megaflow_hpc.ledger.calls import Names, Read
from megaflow_hpc.ledger.coordinator import PRUNE_S
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.leader import STALE_S
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.pod.master.coordination import CALLS_PER_TURN, Coordination, Role
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from tests.support.ledgers import LEASE, Clock, prepared, rollouts
from tests.support.operations import counted

OLD = 6000
PODS = 20
TURN_S = 1.0


class Pod:
    """One start of a pod: its ledger and its part in the coordination."""

    def __init__(self, run: RunDir, pod: str, start: int, clock: Clock, few: int = 0) -> None:
        self.clock, self.name = clock, f"{pod}.{start}"
        self.ledger = Ledger(run, PodIdentity(pod, str(start), job_id=pod), clock)
        self.coordination = Coordination(self.ledger, Endpoints(run, {}), CampaignBudget(run, {}), clock, few)
        self.began_at, self.stored = clock.now + 1, 0
        self.show()
        self.ledger.register()

    def show(self, ended: str = "") -> None:
        core_s = self.clock.now + 1 - self.began_at
        shown = {"running": 1, "queued": 0, "stored": self.stored, "t": self.clock.now, "began_at": self.began_at}
        self.ledger.show({**shown, "core_s": core_s, "ended": ended}, 2.0)

    def turn(self) -> None:
        self.show()
        self.ledger.renew()
        self.coordination.tick()

    def claim(self, stored: int = 0) -> Claim | None:
        return self.ledger.claim(lambda owner: stored)

    def leave(self) -> None:
        self.coordination.leave()
        self.show("released")
        self.ledger.renew(force=True)

    @property
    def leads(self) -> bool:
        return self.coordination.role is Role.LEADER


def go_by(clock: Clock, seconds: float, *pods: Pod, step_s: float = TURN_S) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step_s
        for pod in pods:
            pod.turn()


def leave_leases(run: RunDir, count: int, pods: int) -> None:
    """Writes the leases of ``count`` starts of ``pods`` array elements, all of which have ended."""
    for number in range(count):
        pod, start = f"8_{number % pods}", str(number // pods)
        content = {**LEASE, "pod": pod, "start": start, "job_id": pod, "ended": "released", "earlier": {"starts": 1}}
        (run.ledger / "leases" / f"{pod}.{start}").write_text(json.dumps(content))


def files(run: RunDir) -> Counter[str]:
    """Returns the number of files of each directory of the ledger, and of the histories."""
    found = Counter(path.parent.name for path in run.ledger.rglob("*") if path.is_file())
    found["partial"] = len(list(run.partial.glob("*.json")))
    return found


# --- operations -------------------------------------------------------------------------------------------------------


def operations(run: RunDir, old: int) -> dict[str, int]:
    """Returns what a start, a coordinator's first report, a follower's look and a cold reader cost."""
    clock, cost = Clock(), {}
    write_blocks(run, rollouts(PODS), size=1)
    leave_leases(run, old, PODS)
    pods = []
    for number in range(PODS):
        with counted(run.path) as found:
            pods.append(Pod(run, f"8_{number}" if number else "9_0", old + 1 if number else 0, clock))
            assert pods[-1].claim() is not None
        cost["start"] = found.total()
        if number == 1 and old:
            assert len(list((run.ledger / "leases").glob("8_1.*"))) == 1, "it removed those of its earlier starts"
    with counted(run.path) as found:
        while pods[0].coordination.report.survey is None:
            clock.now += TURN_S
            pods[0].turn()
    cost["report"] = found.total()
    go_by(clock, 30, *pods)
    with counted(run.path) as found:
        pods[5].turn()
        assert pods[5].claim() is None
    cost["follower"] = found.total()
    reader = Ledger(run)
    with counted(run.path) as found:
        assert len(reader.leases()) == PODS + bool(old)
        reader.accounts()
    cost["reader"] = found.total()
    return cost


def test_what_6000_old_starts_cost(run: RunDir, tmp_path: Path) -> None:
    fresh = prepared(tmp_path / "fresh")
    without, with_old = operations(fresh, 0), operations(run, OLD)
    print(f"without old starts {without}, with {OLD} {with_old}")
    earlier = OLD // PODS
    assert with_old["start"] <= without["start"] + earlier + 5, "a start reads only leases of its own element"
    for look in ("report", "reader"):
        assert with_old[look] <= without[look] + 5, "one more pod, whose last start has ended"
    assert with_old["follower"] <= without["follower"]


def test_a_later_start_reads_one_lease_however_many_starts_there_were(run: RunDir) -> None:
    clock, cost = Clock(), []
    for start in range(30):
        with counted(run.path, whole=True) as found:
            Pod(run, "8_0", start, clock)
        clock.now += 3600
        cost.append(found.total())
        assert [path.name for path in (run.ledger / "leases").iterdir()] == [f"8_0.{start}"]
    assert len(set(cost[2:])) == 1
    (facts,) = (facts for name, facts in Ledger(run).accounts().items() if name.endswith("earlier"))
    assert facts["starts"] == 29
    assert facts["began_at"] == 1


class Name(str):
    """A file name that counts how often names are compared and hashed."""

    counted = 0

    def __eq__(self, other: object) -> bool:
        Name.counted += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        Name.counted += 1
        return str.__hash__(self)


class NamedFiles(Files):
    """Lists and reads names that count."""

    def _names(self, call: Names) -> tuple[str, ...]:
        return tuple(map(Name, super()._names(call)))

    def _read(self, call: Read) -> dict[str, Any] | None:
        content = super()._read(call)
        return content and {**content, "names": list(map(Name, content.get("names", ())))}


def comparisons(run: RunDir, ended: int) -> int:
    """Returns how often a coordinator compares and hashes names until it has removed what ended pods left."""
    clock = Clock()
    leave_leases(run, ended, ended)
    for number in range(ended):
        (run.ledger / "gone" / f"8_{number}.0").touch()
        (run.partial / f"8_{number}.0.json").touch()
        (run.ledger / "claims" / f".8_{number}.0.x").touch()
    ledger = Ledger(run, PodIdentity("9_0", "0"), clock, files=NamedFiles(run, clock))
    survey = ledger.survey()
    while not survey.advance():
        pass
    Name.counted = 0
    for _ in range(12):
        clock.now += PRUNE_S
        pruning = ledger.prune()
        while not pruning.advance():
            pass
    assert sum(files(run)[each] for each in ("leases", "gone", "partial", "claims")) == 0
    return Name.counted


def test_pruning_compares_names_in_proportion_to_their_number(tmp_path: Path) -> None:
    counts = []
    for ended in (100, 400):
        run = RunDir(tmp_path / f"run{ended}")
        run.create()
        run.partial.mkdir(exist_ok=True)
        Ledger(run).create()
        counts.append(comparisons(run, ended))
    assert counts[1] < 5 * counts[0], counts


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_of_the_ledger_follow_what_is_alive(run: RunDir) -> None:
    """Elements start again and again. Some starts are killed, some release their blocks, some finish them."""
    clock, pods, most = Clock(), 6, []
    run.partial.mkdir(exist_ok=True)
    write_blocks(run, rollouts(300), size=1)
    keeper = Pod(run, "9_0", 0, clock)
    used: dict[str, float] = {}
    sealed: dict[tuple[int, int], str] = {}
    alive: list[Pod] = []
    for start in range(12):
        array = f"{8 + start // 6 * 2}"  # the job array is replaced once
        alive = [Pod(run, f"{array}_{number}", start, clock) for number in range(pods)]
        for number, pod in enumerate(alive):
            pod.stored = 2
            for _ in range(3):
                claim = pod.claim(start)
                assert claim is not None
                for epoch, seal in enumerate(claim.seals):
                    assert sealed.setdefault((claim.block, epoch), seal.owner) == seal.owner
                if number % 3 == 0:
                    (run.partial / f"{pod.name}.json").write_text('{"rollouts": {}}')
                    pod.ledger.release(claim, start, [])
                    break  # the next claim would take it back
                if number % 3 == 1 and len(sealed) % 2:
                    pod.ledger.mark_done(claim)
        go_by(clock, 120, keeper, *alive, step_s=3.0)
        for number, pod in enumerate(alive):
            if number % 3 == 0:
                pod.leave()
        used |= {pod.name: pod.ledger._rules.lease.content["core_s"] for pod in alive}
        most.append(files(run))
    found = Ledger(run).accounts()
    used[keeper.name] = keeper.ledger._rules.lease.content["core_s"]
    assert sum(facts["core_s"] for facts in found.values()) == pytest.approx(sum(used.values()))
    assert sum(facts["starts"] for facts in found.values()) == 12 * pods + 1
    assert sum(facts["stored"] for facts in found.values()) == 12 * pods * 2
    assert {array for facts in found.values() for array in facts["arrays"]} == {"8", "9", "10"}
    print(dict(most[5]), dict(most[-1]))
    for kind in ("leases", "gone", "partial", "ended", "released"):
        assert max(count[kind] for count in most) <= 6 * pods, kind
    go_by(clock, 2 * TIMES.lease_s + 3 * PRUNE_S, keeper, step_s=3.0)  # all others are dead
    go_by(clock, 3 * TIMES.lease_s + 3 * PRUNE_S, keeper, step_s=3.0)
    seals = Ledger(run).seals()
    assert {claim: owner for claim, (owner, _) in seals.items()} == sealed
    while (claim := keeper.claim(99)) is not None:
        keeper.ledger.mark_done(claim)
    go_by(clock, 4 * TIMES.lease_s + 3 * PRUNE_S, keeper, step_s=3.0)
    chains = Counter(path.name[:6] for path in (run.ledger / "claims").iterdir() if path.name[0] != ".")
    assert files(run)["leases"] == 1
    assert sum(facts["starts"] for facts in Ledger(run).accounts().values()) == 12 * pods + 1
    assert max(chains.values()) == 2, "the first claim, and the one that ended the block"
    assert files(run)["gone"] == files(run)["partial"] == files(run)["released"] == 0
    assert Ledger(run).seals().items() >= seals.items()
    assert Ledger(run).finished


def test_facts_of_ended_pods_count_once_whatever_interrupts_a_coordinator(run: RunDir) -> None:
    leave_leases(run, 30, 30)
    clock = Clock()

    def total() -> tuple[int, float]:
        facts = Ledger(run).accounts().values()
        return sum(each["starts"] for each in facts), sum(each["core_s"] for each in facts)

    want, number = total(), 0
    # Each coordinator is killed some operations after it took over, another one takes its place.
    while any((run.ledger / "leases").glob("8_*")):
        number += 1  # so the first ones do not get far
        ledger = Ledger(run, PodIdentity(f"c{number}", "0"), clock)
        survey = ledger.survey()
        while not survey.advance():
            pass
        for look in range(6):
            clock.now += PRUNE_S
            pruning = ledger.prune()
            calls = 0
            while not pruning.advance(1) and (look < 4 or calls < 12 + 2 * number):
                calls += 1
                assert total() == want
        assert number < 30
    assert total() == want
    assert number > 2


def test_two_coordinators_add_to_the_record_one_after_the_other(run: RunDir) -> None:
    clock = Clock()
    leave_leases(run, 10, 10)
    before = sum(facts["core_s"] for facts in Ledger(run).accounts().values())
    both = [Ledger(run, PodIdentity(name, "0"), clock) for name in "ab"]
    for ledger in both:
        survey = ledger.survey()
        while not survey.advance():
            pass
    for _ in range(9):
        clock.now += PRUNE_S
        looks = [ledger.prune() for ledger in both]
        while looks:  # call by call
            looks = [look for look in looks if not look.advance(1)]
        assert sum(facts["core_s"] for facts in Ledger(run).accounts().values()) == before
    assert list((run.ledger / "leases").iterdir()) == []


# --- starts that live on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", ["open", "stale"])
def test_a_start_that_lives_on_finds_out_though_the_next_one_has_gone_too(run: RunDir, handle: str) -> None:
    clock = Clock()
    write_blocks(run, rollouts(2), size=1)
    zombie = Pod(run, "8_0", 0, clock)
    claim = zombie.claim()
    assert claim is not None
    for start in (1, 2):
        Pod(run, "8_0", start, clock)
    if handle == "stale":
        files_of: Files = zombie.ledger._files
        for file in files_of._rewritten.values():
            file.close()
        files_of._rewritten.clear()
    assert zombie.ledger.may_commit
    clock.now += 30
    zombie.turn()
    assert zombie.ledger.superseded
    assert not zombie.ledger.may_commit
    assert not zombie.ledger.committed(lambda: None)
    with pytest.raises(LedgerError, match="taken over"):
        zombie.ledger.mark_done(claim)
    clock.now += 30
    zombie.turn()
    assert [path.name for path in (run.ledger / "leases").iterdir()] == ["8_0.2"]
    late = Pod(run, "8_0", 1, clock)  # its node was lost before rank 0 had a lease
    assert late.ledger.superseded
    assert late.claim() is None
    assert [path.name for path in (run.ledger / "leases").iterdir()] == ["8_0.2"]


def test_blocks_of_a_start_without_a_lease_go_to_other_pods_in_the_end(run: RunDir) -> None:
    clock = Clock()
    write_blocks(run, rollouts(2), size=1)
    first = Pod(run, "8_0", 0, clock)
    for _ in range(2):
        assert first.claim() is not None
    second, other = Pod(run, "8_0", 1, clock), Pod(run, "8_1", 0, clock)
    go_by(clock, 20, second, other)
    assert other.claim() is None, "the element's own start comes first"
    assert second.claim() == Claim(0, 1)
    go_by(clock, TIMES.lease_s + 60, second, other)
    assert other.claim() == Claim(1, 1), "it has had time"
    second.leave()
    third = Pod(run, "8_0", 2, clock)
    go_by(clock, 20, other)
    assert third.claim() == Claim(0, 2)


def test_claims_stay_while_an_earlier_holder_lives_that_could_end_its_block_with_them(run: RunDir) -> None:
    clock = Clock()
    write_blocks(run, rollouts(2), size=2)
    mistaken, other = Pod(run, "a", 0, clock), Pod(run, "b", 0, clock)
    first = mistaken.claim()
    assert first is not None
    Ledger(run).mark_gone("a.0")
    go_by(clock, 20, mistaken, other)
    second = other.claim()
    assert second == Claim(0, 1)
    other.ledger.release(second, 0, ["t000/oracle/0"])
    assert other.claim() == Claim(0, 2)
    lease, claim = run.ledger / "leases" / "a.0", run.ledger / "claims" / "000000.1"
    while lease.exists():
        assert claim.exists()
        assert clock.now < 900
        go_by(clock, TURN_S, mistaken, other)
    go_by(clock, 60, mistaken, other)
    assert mistaken.ledger.superseded
    assert not mistaken.ledger.may_commit
    assert claim.exists()
    go_by(clock, TIMES.lease_s + 2 * PRUNE_S, mistaken, other)
    assert not claim.exists()
    with pytest.raises(LedgerError, match="taken over"):
        mistaken.ledger.mark_done(first)
    assert list((run.ledger / "done").iterdir()) == []
    assert Ledger(run).seals() == {(0, 0): ("a.0", 0), (0, 1): ("b.0", 0)}


# --- a coordinator that is killed -------------------------------------------------------------------------------------


def test_a_coordinator_is_killed_in_its_survey_of_6000_leases_and_the_next_one_finishes(run: RunDir) -> None:
    clock = Clock()
    write_blocks(run, rollouts(PODS), size=1)
    leave_leases(run, OLD, OLD)  # each of another element, so all must be read once
    pods = [Pod(run, f"9_{number}", 0, clock) for number in range(PODS)]
    for pod in pods:
        assert pod.claim() is not None
    go_by(clock, 30, *pods)
    (first,) = [pod for pod in pods if pod.leads]
    assert first.coordination.report.survey is None, "it is in the middle"
    pods.remove(first)
    killed_at, leaders = clock.now, []
    with counted(run.path) as found:
        while not any(pod.leads for pod in pods):
            go_by(clock, TURN_S, *pods)
            assert clock.now - killed_at < STALE_S + 30, "another one takes over within the time of its lease"
        (second,) = [pod for pod in pods if pod.leads]
        while second.coordination.report.survey is None:
            go_by(clock, TURN_S, *pods)
            leaders += [pod.name for pod in pods if pod.leads]
            assert clock.now - killed_at < STALE_S + 30 + 2 * OLD / CALLS_PER_TURN
    assert set(leaders) == {second.name}
    assert found["opens"] < 1.2 * OLD, "one pod read them all, once"
    go_by(clock, 20, *pods)
    assert [pod.coordination.role for pod in pods if pod is not second] == [Role.FOLLOWER] * (PODS - 2)
    assert second.coordination.report.pods == PODS, "the killed one's lease has not expired yet"


@pytest.mark.parametrize("pause_s", [0, 70, 200, 400])
def test_a_start_counts_once_if_its_element_starts_again_after_it_was_recorded(run: RunDir, pause_s: float) -> None:
    clock = Clock()
    write_blocks(run, rollouts(2), size=1)
    keeper, first = Pod(run, "9_0", 0, clock), Pod(run, "8_0", 0, clock)
    go_by(clock, 100, keeper, first)
    first.leave()
    go_by(clock, pause_s, keeper)
    second = Pod(run, "8_0", 1, clock)
    for _ in range(7):
        go_by(clock, 60, keeper, second)
        assert sum(facts["starts"] for facts in Ledger(run).accounts().values()) == 3
    second.leave()
    go_by(clock, 500, keeper)
    assert files(run)["leases"] == 1
    assert sum(facts["starts"] for facts in Ledger(run).accounts().values()) == 3


# --- private files and superseded starts ------------------------------------------------------------------------------


def private(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.ledger / "claims").iterdir() if path.name[0] == ".")


def test_private_files_of_claims_are_removed_by_their_pod_or_else_by_the_coordinator(run: RunDir) -> None:
    clock, most = Clock(), []
    write_blocks(run, rollouts(200), size=1)
    keeper = Pod(run, "host.example-9", 0, clock)  # a pod's name may contain dots
    assert keeper.claim() is not None
    for start in range(12):
        pods = [Pod(run, f"8_{number}", start, clock) for number in range(4)]
        for pod in pods:
            claim = pod.claim()
            assert claim is not None
            pod.ledger.mark_done(claim)
            assert pod.claim() is not None
        (run.ledger / "claims" / f"..8_0.{start}.done.0.77.ab").touch()  # it was killed while it wrote
        most.append(len(private(run)))
        go_by(clock, 60, keeper, *pods)
        for pod in pods[:2]:
            pod.leave()
            pod.ledger.leave()
            assert not [name for name in private(run) if name.startswith(f".{pod.name}.")]
    go_by(clock, 2 * TIMES.lease_s + 3 * PRUNE_S, keeper)
    assert private(run) == [f".{keeper.name}."]
    print(most)
    assert max(most[6:]) <= max(most[:6]) + 2
    assert keeper.claim() is not None


def test_a_pod_that_was_assumed_dead_can_claim_although_its_private_file_was_removed(run: RunDir) -> None:
    write_blocks(run, rollouts(3), size=1)
    pod = Pod(run, "a", 0, Clock())
    assert pod.claim() == Claim(0, 0)
    for name in private(run):
        (run.ledger / "claims" / name).unlink()
    assert pod.claim() == Claim(1, 0)
    assert private(run) == [".a.0."]


def test_blocks_of_a_superseded_start_are_free_once_the_later_start_is_marked_as_gone(run: RunDir) -> None:
    clock = Clock()
    write_blocks(run, rollouts(1), size=1)
    first = Pod(run, "8_0", 0, clock)
    assert first.claim() == Claim(0, 0)
    Pod(run, "8_0", 1, clock)  # removes the lease of the first, and is killed before it claims
    heir = Pod(run, "9_0", 0, clock)
    assert heir.claim() is None
    Ledger(run).mark_gone("8_0.1")  # as resume does
    assert heir.claim() == Claim(0, 1), "it does not wait for three minutes"


def test_what_a_killed_start_stored_last_counts_although_its_lease_is_removed(run: RunDir) -> None:
    clock = Clock()
    killed = Pod(run, "8_0", 0, clock)
    events = EventWriter(run.event_file("8_0", "0"))
    for number in range(3):
        events.write(RolloutEvent(id=f"t{number}/p/0", status="completed"))
    events.close()
    assert killed.ledger._rules.lease.content["stored"] == 0
    Pod(run, "8_0", 1, clock)
    assert not (run.ledger / "leases" / "8_0.0").exists()
    facts = Ledger(run).accounts().values()
    assert (sum(each["stored"] for each in facts), sum(each["journals"] for each in facts)) == (3, 1)
