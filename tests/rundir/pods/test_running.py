"""The running rollouts, independent of the order in which pods' files are read."""

from __future__ import annotations

from itertools import permutations

from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent
from megaflow_hpc.rundir.pods.running import RunningRollouts


def start(t: float, rollout: str, rank: int = 1, attempt: int = 0) -> AnyEvent:
    return StartEvent(t=t, id=rollout, rank=rank, attempt=attempt)


FILES: dict[str, list[AnyEvent]] = {
    # A killed pod. Another pod took its rollouts over, or they failed and resume started them again.
    "killed": [
        WorkerEvent(t=1, rank=1, state="ready", node="n1"),
        start(2, "taken"),
        start(2, "ended"),
        start(2, "again"),
        start(2, "left"),
        RolloutEvent(t=3, id="again", status="failed", kind="user"),
    ],
    # The pod that continues.
    "later": [
        WorkerEvent(t=5, rank=1, state="ready", node="n2"),
        WorkerEvent(t=5, rank=2, state="ready", node="n3"),
        start(6, "taken"),
        start(6, "ended"),
        start(6, "again"),
        start(6, "repeated"),
        AttemptEvent(t=7, id="repeated", attempt=0, kind="sandbox-start", rank=1),
        start(7.5, "repeated", 2, 1),
        RolloutEvent(t=9, id="ended", status="completed"),
        start(9, "lost", 2),
        WorkerEvent(t=9.5, rank=3, state="lost"),
    ],
    # A pod that ended and gave rollouts back.
    "drained": [
        WorkerEvent(t=1, rank=1, state="ready", node="n4"),
        start(1.5, "taken"),
        start(3, "back"),
        PodEvent(t=4, state="drained"),
    ],
}


def test_what_runs_is_the_same_in_whatever_order_files_are_read() -> None:
    for order in permutations(FILES):
        running = RunningRollouts()
        for pod in order:
            for event in FILES[pod]:
                running.apply(pod, event)
        found = {(place.id, place.pod, place.node) for place in running.longest(FILES)}
        assert found == {
            ("taken", "later", "n2"),
            ("again", "later", "n2"),
            ("repeated", "later", "n3"),
            ("lost", "later", "n3"),
            ("left", "killed", "n1"),
        }, order
        assert [place.id for place in running.longest({"killed"})] == ["left"]
        assert running.last["ended"].pod == running.last["taken"].pod == "later"
        assert running.failures["sandbox-start", "n2"] == 1
        running.apply("later", WorkerEvent(t=10, rank=2, state="lost"))
        assert "lost" not in {place.id for place in running.longest(FILES)}
