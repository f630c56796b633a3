"""Groups: closed at their rewards, dropped without signal, and every sample accounted for."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.pod.scheduling.groups import GroupRules, Groups, GroupStep


class Queue:
    """A queue that does what the steps say, as results do it with a scheduler."""

    def __init__(self, rules: GroupRules, samples: int) -> None:
        self.groups = Groups(rules)
        self.ids = [f"t/p/{n}" for n in range(samples)]
        self.later = self.groups.admit("t/p", "p", self.ids)
        self.waiting = [i for i in self.ids if i not in self.later] + [i for i in self.ids if i in self.later]
        self.running: list[str] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []

    def start(self) -> str:
        self.running.append(self.waiting.pop(0))
        self.groups.started("t/p", self.running[-1])
        return self.running[-1]

    def end(self, rollout: str, reward: float | None) -> GroupStep:
        self.running.remove(rollout)
        self.ended.append(rollout)
        step = self.groups.ended("t/p", rollout, reward)
        self.later -= set(step.promote)
        for one in step.cancel:
            (self.waiting if one in self.waiting else self.running).remove(one)
            self.cancelled.append(one)
        return step


def test_a_closed_group_cancels_what_waits_and_what_runs() -> None:
    queue = Queue(GroupRules(wanted={"p": 2}), 5)
    for _ in range(4):
        queue.start()
    assert queue.end("t/p/3", 1.0).cancel == ()
    assert queue.end("t/p/1", None).cancel == (), "a failure is no reward"
    assert sorted(queue.end("t/p/0", 0.0).cancel) == ["t/p/2", "t/p/4"]
    assert len(queue.groups) == 0


def test_samples_that_a_group_has_elsewhere_count() -> None:
    groups = Groups(GroupRules(wanted={"p": 3}))
    groups.admit("t/p", "p", ["t/p/3", "t/p/4"], rewarded=2)
    assert groups.ended("t/p", "t/p/3", 1.0).cancel == ["t/p/4"]


def test_a_group_without_signal_is_dropped() -> None:
    queue = Queue(GroupRules(signal_after=2), 5)
    assert queue.later == set(queue.ids[2:])
    for _ in range(2):
        queue.end(queue.start(), 0.0)
    assert queue.cancelled == queue.ids[2:]


def test_a_group_whose_rewards_differ_runs_whole_and_stands_back_no_more() -> None:
    queue = Queue(GroupRules(signal_after=2), 5)
    queue.end(queue.start(), 0.0)
    queue.end(queue.start(), 1.0)
    assert (queue.later, queue.waiting, queue.cancelled) == (set(), queue.ids[2:], [])


def test_nothing_is_known_of_groups_where_no_rule_asks_for_it() -> None:
    groups = Groups(GroupRules())
    assert groups.admit("t/p", "p", ["t/p/0"]) == set()
    assert len(groups) == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_sample_ends_or_is_cancelled(data: st.DataObject) -> None:
    rules = GroupRules(
        wanted={"p": data.draw(st.integers(1, 6))} if data.draw(st.booleans()) else {},
        signal_after=data.draw(st.sampled_from([0, 2, 3])),
    )
    queue = Queue(rules, data.draw(st.integers(1, 14)))
    while queue.waiting or queue.running:
        if queue.waiting and (not queue.running or data.draw(st.booleans())):
            queue.start()
            continue
        rollout = data.draw(st.sampled_from(queue.running))
        if data.draw(st.integers(0, 5)) == 5:  # tried again
            queue.running.remove(rollout)
            queue.waiting.insert(0, rollout)
            queue.groups.requeued("t/p", rollout)
        else:
            queue.end(rollout, data.draw(st.sampled_from([None, 0.0, 1.0])))
    assert sorted(queue.ended + queue.cancelled) == sorted(queue.ids)
    assert len(queue.groups) == 0
