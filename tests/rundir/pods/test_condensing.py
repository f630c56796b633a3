"""A pod's events are a few files however often it started, and condensing them changes no count."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megaflow_hpc.campaign.autoscaler import Backlog
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.pod.master.histories import Histories
from megaflow_hpc.report.timeline import read_events
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import RolloutLog
from megaflow_hpc.rundir.pods import aggregator
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.pods.condensing import condense, condense_all
from megaflow_hpc.types import Rollout
from tests.support.operations import counted
from tests.support.statuses import make, said

WRITES = {"os.rename", "os.remove"}
"""Audit events of the operations that change a directory."""


class Killed(BaseException):
    """The process ends here."""


_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _hooks:
        hook = _hooks.pop()  # its own operations are not counted
        try:
            hook(event, arguments)
        finally:
            _hooks.append(hook)


@contextmanager
def at_operation(number: int, folder: Path, kinds: set[str], do: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``do`` just before operation ``number`` of this process in ``folder``. Yields the number of operations."""
    if not getattr(at_operation, "hooked", False):
        sys.addaudithook(_audit)
        at_operation.hooked = True  # type: ignore[attr-defined]
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in kinds and str(arguments[0]).startswith(str(folder)):
            seen[0] += 1
            if seen[0] == number:
                do()

    _hooks.append(hook)
    try:
        yield seen
    finally:
        _hooks.clear()


def kill() -> None:
    raise Killed


def say(run: RunDir, name: str, *events: AnyEvent) -> None:
    pod, _, start = name.rpartition(".")
    with run.event_file(pod, start).open("ab") as file:
        file.write(b"".join(map(encode, events)))


def begin(run: RunDir, pod: str, start: int, t: float) -> None:
    """Write the first events of a start."""
    worker = WorkerEvent(t=t, rank=1, state="ready", slots=4, node=f"n{start % 3}")
    say(run, f"{pod}.{start}", PodEvent(t=t, state="started", job_id=pod, node="n"), worker)


def one_start(run: RunDir, pod: str, start: int, t: float) -> None:
    """Write a whole start: two rollouts end well, one badly, one is retried and then cut short."""
    name, ids = f"{pod}.{start}", [f"{pod}-{start}-{number}/p/0" for number in range(4)]
    begin(run, pod, start, t)
    say(run, name, *(StartEvent(t=t + 1, id=rollout, rank=1, attempt=0) for rollout in ids))
    say(run, name, *(RolloutEvent(t=t + 2, id=rollout, status="completed") for rollout in ids[:2]))
    say(run, name, RolloutEvent(t=t + 2, id=ids[2], status="failed", kind="model", error="none answers"))
    say(run, name, AttemptEvent(t=t + 2, id=ids[3], attempt=0, kind="node", rank=1))
    say(run, name, StartEvent(t=t + 3, id=ids[3], rank=1, attempt=1))
    if start % 2:
        say(run, name, PodEvent(t=t + 3, state="drained", stored=3))
        SummaryWriter(run.event_file(pod, str(start))).finish()


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.events.iterdir())


def test_hundreds_of_starts_of_a_pod_leave_a_few_files(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 5000
    sizes = []
    for start in range(300):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
        assert len(names(run)) <= 5
        sizes.append(sum(path.stat().st_size for path in run.events.iterdir()))
    status = Monitor(run).status()
    assert (status["rollouts"]["completed"], status["rollouts"]["failed"]) == (600, 300)
    [pod] = status["pods"]
    assert (pod["pod"], pod["stored"], pod["starts"]) == ("7_0.299", 900, 300)
    assert status["retries"] == {"node": 300}
    assert status["failed_at"]["node"] == {"n0": 100, "n1": 100, "n2": 100}
    per_result = (sizes[299] - sizes[99]) / (200 * 3)
    assert per_result < 100, "the files grow with results, not with starts"


def test_starts_without_results_leave_no_trace_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UNFINISHED", 20)
    run, began = make(tmp_path / "run"), time.time() - 5000
    sizes = []
    for start in range(300):
        condense(run.events, "7_0", str(start))
        begin(run, "7_0", start, began + start)
        for slot in range(4):
            rollout = f"t{start}-{slot}/p/0"
            say(run, f"7_0.{start}", StartEvent(t=began + start, id=rollout, rank=1, attempt=0))
            say(run, f"7_0.{start}", AttemptEvent(t=began + start, id=rollout, attempt=0, kind="walltime", rank=1))
        sizes.append(sum(path.stat().st_size for path in run.events.iterdir()))
    assert max(sizes[150:]) < 1.3 * sizes[100]
    assert Monitor(run).status()["retries"] == {"walltime": 1200}


def live_and_ended(run: RunDir, pods: int, starts: int) -> None:
    began = time.time() - 4 * starts - 10
    for start in range(starts):
        for pod in range(pods):
            condense(run.events, f"7_{pod}", str(start))
            one_start(run, f"7_{pod}", start, began + 4 * start)


def test_a_look_costs_the_same_whatever_the_number_of_earlier_starts(tmp_path: Path) -> None:
    costs = []
    for starts in (3, 60):
        run = make(tmp_path / f"run{starts}")
        live_and_ended(run, 10, starts)
        monitor = Monitor(run)
        with counted(run.path, whole=True) as cold:
            first = monitor.status()
        with counted(run.path, whole=True) as again:
            monitor.status()
        assert (len(first["pods"]), first["rollouts"]["completed"]) == (10, 20 * starts)
        costs.append((sum(cold.values()), sum(again.values())))
    (few_cold, few_again), (many_cold, many_again) = costs
    assert many_cold <= few_cold + 5
    assert many_again <= few_again + 5


LOOK = """
import sys
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.layout import RunDir
print(Monitor(RunDir(sys.argv[1])).status()["rollouts"]["completed"], "numpy" in sys.modules)
"""


def test_a_first_look_at_condensed_events_loads_no_library_for_arrays(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    live_and_ended(run, 2, 5)
    said = subprocess.run([sys.executable, "-c", LOOK, str(run)], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert said.split() == ["20", "False"], "its 0.1 s and 12 MB are more than the rest of a look"


def test_a_follower_pays_once_for_each_new_start(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 4000
    monitor, per_start = Monitor(run), []
    for start in range(40):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
        with counted(run.path) as operations:
            status = monitor.status()
        per_start.append(operations["opens"])
        assert status["rollouts"]["completed"] == 2 * (start + 1)
    assert max(per_start[20:]) <= max(per_start[4:20])
    assert len(monitor._starts) <= 2
    assert len(monitor.running.last) <= 60, "only rollouts that may run again"


@pytest.mark.parametrize("when", ["before", "at", "after"])
def test_a_kill_at_any_step_loses_and_doubles_nothing(tmp_path: Path, when: str) -> None:
    number, going = 0, True
    while going:
        number += 1
        run, began = make(tmp_path / f"run{number}"), time.time() - 100
        for start in range(5):
            one_start(run, "7_0", start, began + 4 * start)
            if when == "before" and start == 2:
                condense(run.events, "7_0", "3")
        expected, follower = said(run), Monitor(run)
        follower.status()
        try:
            with at_operation(number, run.events, WRITES, kill) as seen:
                condense(run.events, "7_0", "5")
        except Killed:
            pass
        going = seen[0] >= number
        if when == "at":
            (run.events / ".7_0.3.condensed.77.ab").write_bytes(b"half")  # SIGKILL while it was written
        assert said(run) == expected
        follower.status()
        assert follower.status()["rollouts"]["completed"] == 10
        one_start(run, "7_0", 5, began + 20)
        condense(run.events, "7_0", "6")
        if when == "after":
            condense(run.events, "7_0", "6")
        assert names(run) == ["7_0.4.condensed", "7_0.5.jsonl"] or names(run) == [
            "7_0.4.condensed",
            "7_0.5.jsonl",
            "7_0.5.summary",
        ]
        assert said(run)["rollouts"]["completed"] == follower.status()["rollouts"]["completed"] == 12
    assert number > 4


def test_a_reader_in_the_middle_sees_every_count_once(tmp_path: Path) -> None:
    number, going = 0, True
    while going:  # the reader looks while files are condensed
        number += 1
        run, began = make(tmp_path / f"a{number}"), time.time() - 100
        for start in range(5):
            one_start(run, "7_0", start, began + 4 * start)
        follower = Monitor(run)
        follower.status()
        looks: list[Any] = []

        def look(follower: Monitor = follower, run: RunDir = run, looks: list[Any] = looks) -> None:
            for monitor in (follower, Monitor(run)):
                rollouts = monitor.status()["rollouts"]
                looks.append((rollouts["completed"], rollouts["failed"]))

        with at_operation(number, run.events, WRITES, look) as seen:
            condense(run.events, "7_0", "5")
        going = seen[0] >= number
        assert looks == [(10, 5)] * len(looks)
    assert number > 4


@pytest.mark.parametrize("late", [False, True])
def test_files_that_vanish_while_they_are_read_are_counted_once(tmp_path: Path, late: bool) -> None:
    number, going = 0, True
    while going:
        number += 1
        run, began = make(tmp_path / f"run{number}"), time.time() - 100
        for start in range(5):
            one_start(run, "7_0", start, began + 4 * start)
        monitor = Monitor(run)
        if late:
            monitor.status()
        say(run, "7_0.0", RolloutEvent(t=began + 50, id="late/p/0", status="completed"))
        kinds = {"open", "os.listdir"}
        with at_operation(number, run.events, kinds, lambda run=run: condense(run.events, "7_0", "5")) as seen:
            found = [monitor.status()["rollouts"]]
        going = seen[0] >= number
        found.append(monitor.status()["rollouts"])
        for rollouts in found[late:]:  # a follower may learn of the last event with its next look
            assert (rollouts["completed"], rollouts["failed"]) == (11, 5)
    assert number >= (2 if late else 5)


def test_a_pod_that_was_taken_for_lost_and_still_writes_does_no_harm(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 100
    for start in range(3):
        one_start(run, "7_0", start, began + 4 * start)
    zombie, follower = run.event_file("7_0", "0").open("ab"), Monitor(run)
    follower.status()
    condense(run.events, "7_0", "3")
    expected = said(run)
    zombie.write(encode(RolloutEvent(t=began + 30, id="z/p/0", status="completed")))
    zombie.close()
    one_start(run, "7_0", 0, began)  # as its writer would if it reopened the file
    assert said(run) == expected
    assert follower.status()["rollouts"] == expected["rollouts"]
    condense(run.events, "7_0", "3")
    assert not run.event_file("7_0", "0").exists()
    condense(run.events, "7_0", "1")  # and one that only now begins
    assert said(run) == expected


def test_a_damaged_condensed_file_stops_nobody(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 100
    for start in range(4):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
    (run.events / "7_0.1.condensed").write_bytes(b"\0" * 50)
    assert Monitor(run).status()["rollouts"]["completed"] == 4
    condense(run.events, "7_0", "4")
    assert names(run)[0] == "7_0.2.condensed"
    assert Monitor(run).status()["rollouts"]["completed"] == 4


def test_readers_of_single_rollouts_know_what_was_condensed(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 100
    ids = [f"7_0-{start}-{number}" for start in range(5) for number in range(4)]
    write_blocks(run, [Rollout(task, "p", 0, "a") for task in ids], size=50)
    follower = Backlog(run)
    for start in range(5):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
        follower.look()
    assert Backlog(run).look() == follower.look() == {"p": 5}
    known = Histories(run)
    known.look_at_events(["7_0.0", "7_0.4"])
    for rollout in ("7_0-0-3/p/0", "7_0-2-3/p/0", "7_0-4-3/p/0"):
        history = known.take(rollout)
        assert history is not None
        assert history.causes == ["node"]
    assert known.take("7_0-0-0/p/0") is None
    for rollout, text in (("7_0-0-0/p/0", "ended well"), ("7_0-0-2/p/0", "none answers")):
        log = RolloutLog(run, rollout)
        [line] = log.read()
        assert text in line
        assert log.ended
        assert log.read() == []
    events = read_events(run)
    assert sum(pod.stored for pod in events.pods) == 15
    assert events.repeated == {"node": 5}
    slot_s = sum((end - begin) * slots for pod in events.pods for (begin, end), slots in pod.slot_spans)
    assert slot_s == pytest.approx(5 * 3 * 4)


# --- pods that are over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [1, 2, 3, 6])
def test_all_starts_of_a_pod_that_is_over_are_one_file_and_readers_see_the_same(tmp_path: Path, starts: int) -> None:
    run, began = make(tmp_path / "run"), time.time() - 100
    for start in range(starts):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
    why = f"{starts} starts"
    say(run, f"7_0.{starts - 1}", WorkerEvent(t=began + 50, rank=1, state="excluded", node="n1", why="disk"))
    say(run, f"7_0.{starts - 1}", PodEvent(t=began + 50, state="lost", stored=3, why=why))
    expected, follower = said(run), Monitor(run)
    before = {**follower.status(), "eta_s": None, "rate_per_s": None}
    assert expected["pods"][0]["why"] == why
    slots, stored = of_report(run)
    condense_all(run.events, "7_0")
    assert names(run) == [f"7_0.{starts - 1}.condensed"]
    assert said(run) == expected
    assert of_report(run) == (pytest.approx(slots), stored)
    with counted(run.path) as operations:
        assert {**follower.status(), "eta_s": None, "rate_per_s": None} == before
    assert operations["opens"] <= 3, "a follower that has read everything reads the condensed file alone"
    # Slurm requeues the element after all.
    for start in range(starts, starts + 4):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 60 + 4 * start)
        [pod] = Monitor(run).status()["pods"]
        assert (pod["pod"], pod["starts"], pod["stored"]) == (f"7_0.{start}", start + 1, 3 * (start + 1))
        assert follower.status()["pods"] == Monitor(run).status()["pods"]
        assert len(names(run)) <= 5
    assert of_report(run)[1] == 3 * (starts + 4)


def of_report(run: RunDir) -> tuple[float, int]:
    """Return the slot-seconds and the stored rollouts that the report sees."""
    pods = read_events(run).pods
    return sum((end - begin) * slots for pod in pods for (begin, end), slots in pod.slot_spans), sum(
        pod.stored for pod in pods
    )


def test_rollouts_of_a_killed_pod_that_is_over_no_longer_run(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 30
    for start in (0, 2):
        one_start(run, "7_0", start, began + 4 * start)
    assert Monitor(run).status()["pods"][0]["running"] == 1
    follower = Monitor(run)
    follower.status()
    condense_all(run.events, "7_0")
    for monitor in (Monitor(run), follower):
        status = monitor.status()
        assert (status["rollouts"]["completed"], status["rollouts"]["failed"], status["retries"]) == (4, 2, {"node": 2})
        [pod] = status["pods"]
        assert (pod["pod"], pod["node"], pod["running"], pod["starts"], pod["stored"]) == ("7_0.2", "n", 0, 2, 6)
        assert monitor.at_work() == []
    known = Histories(run)
    known.look_at_events(["7_0.2"])
    history = known.take("7_0-2-3/p/0")
    assert history is not None
    assert history.causes == ["node"], "a pod that takes the rollout over knows how often it failed"


@pytest.mark.parametrize("reads", [False, True])
def test_a_kill_while_a_pod_that_is_over_is_condensed_loses_and_doubles_nothing(tmp_path: Path, reads: bool) -> None:
    number, going = 0, True
    while going:
        number += 1
        run, began = make(tmp_path / f"run{number}"), time.time() - 100
        for start in (0, 1, 3, 5):
            one_start(run, "7_0", start, began + 4 * start)
            if start == 3:
                condense(run.events, "7_0", "5")
        expected, follower = said(run), Monitor(run)
        followed = follower.status()["rollouts"]

        def interrupt(run: RunDir = run, expected: Any = expected, follower: Monitor = follower) -> None:
            if not reads:
                raise Killed
            assert said(run) == expected
            assert follower.status()["rollouts"] == expected["rollouts"]

        try:
            with at_operation(number, run.events, WRITES, interrupt) as seen:
                condense_all(run.events, "7_0")
        except Killed:
            pass
        going = seen[0] >= number
        assert said(run) == expected
        assert follower.status()["rollouts"] == followed
        condense_all(run.events, "7_0")
        assert names(run) == ["7_0.5.condensed"]
        assert said(run) == expected
    assert number > 4


def test_many_periods_of_slots_are_merged(tmp_path: Path) -> None:
    run, began = make(tmp_path / "run"), time.time() - 5000
    for start in range(200):
        condense(run.events, "7_0", str(start))
        one_start(run, "7_0", start, began + 4 * start)
    condensed = summaries.read_condensed(run.events / "7_0.197.condensed")
    assert condensed is not None
    assert len(condensed.slots) <= aggregator.MAX_PERIODS
    assert sum((end - begin) * slots for begin, end, slots in condensed.slots) == pytest.approx(198 * 3 * 4)


# --- a model: the same history, condensed and not ---------------------------------------------------------------------

STEPS = st.tuples(st.integers(0, 99), st.integers(0, 2), st.integers(0, 7), st.integers(0, 12))
"""What happens, to which pod, to which of its rollouts, and the operation at which a condensing start is killed."""

TWO_FAILURES = [(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0), (50, 1, 0, 0), (75, 0, 0, 0), (0, 0, 0, 0), (50, 0, 1, 0)]
"""A rollout fails in the second pod, and then in the first one."""


OVER_AND_BACK = [(0, 0, 0, 0), (0, 0, 0, 0), (55, 0, 0, 0), (0, 0, 0, 0), (82, 0, 1, 0), (75, 0, 0, 0), (0, 0, 0, 0)]
"""A pod is over after a failure, and then starts again."""


class Twins:
    """Two runs with the same events. Starts condense those of the second one, and are killed at any step."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.small = make(folder / "plain"), make(folder / "small")
        self.t = time.time() - 250.0
        self.starts: dict[str, int] = {}
        self.running: dict[str, list[tuple[str, int]]] = {}
        self.failed: list[str] = []
        self.new = 0
        self.follower = Monitor(self.small)

    def say(self, pod: str, event: AnyEvent) -> None:
        self.t += 0.5
        event.t = round(self.t, 3)
        for run in (self.plain, self.small):
            say(run, f"{pod}.{self.starts[pod]}", event)

    def begin(self, pod: str, at: int) -> None:
        self.starts[pod] = self.starts.get(pod, -1) + 1
        try:
            with at_operation(at, self.small.events, {*WRITES, "open"}, kill):
                condense(self.small.events, pod, str(self.starts[pod]))
        except Killed:
            pass
        self.running[pod] = []
        self.say(pod, PodEvent(state="started", job_id=pod, node="n"))
        self.say(pod, WorkerEvent(rank=1, state="ready", slots=4, node=f"n{self.starts[pod] % 2}"))

    def end(self, pod: str, which: int, at: int) -> None:
        """The pod is over for good. Its next step is a start, as if Slurm requeued it after all."""
        self.say(pod, PodEvent(state=("drained", "lost")[which % 2], stored=which, why="why" * (which % 3)))
        try:
            with at_operation(at, self.small.events, {*WRITES, "open"}, kill):
                condense_all(self.small.events, pod)
        except Killed:
            pass
        self.running.pop(pod)

    def step(self, what: int, number: int, which: int, at: int) -> None:
        pod = f"7_{number}"
        if self.running.get(pod) is None or what >= 85:
            if self.running.get(pod) is not None and what % 2:
                self.say(pod, PodEvent(state="drained", stored=which))
            if self.running.get(pod) is not None and what % 3 == 0:
                SummaryWriter(self.small.event_file(pod, str(self.starts[pod]))).finish()
            self.begin(pod, at)
            return
        if what >= 81:
            self.end(pod, which, at)
            return
        if what >= 75:
            self.follower.status()
            return
        running = self.running[pod]
        if what < 30 or not running:
            rollout, attempt = (self.failed.pop() if self.failed and what % 5 == 0 else f"t{self.new}/p/0"), 0
            self.new += 1
        else:
            rollout, attempt = running.pop(which % len(running))
            if what < 50:
                self.say(pod, RolloutEvent(id=rollout, status="completed", inexact=which, constrained=which % 2))
                return
            if what < 60:
                kind = ("model", "node")[which % 2]
                self.say(pod, RolloutEvent(id=rollout, status="failed", kind=kind, error=kind))
                self.failed.append(rollout)
                return
            self.say(pod, AttemptEvent(id=rollout, attempt=attempt, kind="sandbox", rank=1))
            attempt += 1
        running.append((rollout, attempt))
        self.say(pod, StartEvent(id=rollout, rank=1, attempt=attempt))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=20, max_size=200))
@example(TWO_FAILURES)
@example(OVER_AND_BACK)
def test_condensed_events_count_as_the_events_do(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("twins")
    twins = Twins(folder)
    for step in steps:
        twins.step(*step)
    expected, found = counts(said(twins.plain)), counts(said(twins.small))
    assert found == expected
    followed = twins.follower.status()
    for key in ("failures", "retries", "failed_at"):
        assert followed[key] == expected[key]
    for state in ("completed", "truncated", "failed", "cancelled", "total"):
        assert followed["rollouts"][state] == expected["rollouts"][state]
    assert [pod["stored"] for pod in followed["pods"]] == [pod["stored"] for pod in expected["pods"]]
    shutil.rmtree(folder)


def counts(status: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the place of the run. Only the first error of a kind is kept."""
    status["first_failures"] = [(cause["kind"], cause["count"], cause["id"]) for cause in status["first_failures"]]
    return {key: value for key, value in status.items() if key != "run"}
