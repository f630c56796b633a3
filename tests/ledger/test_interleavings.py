"""The ledger's rules hold in every interleaving of two pods and a reader. Each rule is needed: breaking it is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megaflow_hpc.ledger.blocks import add
from megaflow_hpc.ledger.calls import Clock, Do, Length, Link, Names, Publish, Remove, Steps, There, Touch
from megaflow_hpc.ledger.lease import Times
from megaflow_hpc.ledger.names import (
    DONE,
    GONE,
    LEASES,
    RELEASED,
    TASKS,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    done_path,
    earlier,
    task_path,
)
from megaflow_hpc.ledger.rules import LedgerRules
from megaflow_hpc.rundir.marks import FINISHED
from tests.ledger.model import TIMES, Adding, Broken, Model, adder, pod, pruner, reader

Make = Callable[..., LedgerRules]


def two(make: Make = LedgerRules, **more: Any) -> Model:
    """Two pods, one block of one rollout."""
    return Model({name: partial(pod, name, make) for name in ("a.0", "b.0")}, {0: 1}, **more)


def paused(
    make: Make = LedgerRules, who: str = "a.0", times: Times = TIMES, size: int = 1, units: int = 7, **more: Any
) -> Model:
    """The same for longer than a lease. ``who`` may pause anywhere for any time."""
    programs = {name: partial(pod, name, make, times=times) for name in ("a.0", "b.0")}
    return Model(programs, {0: size}, units, prompt=("b.0" if who == "a.0" else "a.0",), **more)


def crashed(make: Make = LedgerRules) -> Model:
    """One pod dies anywhere, and Slurm reports it at once. Without a report, death is a pause for ever."""
    return two(make, units=0, may_crash=("a.0",), told=True, fixed=(RELEASED, TASKS))


def requeued(make: Make = LedgerRules) -> Model:
    """The element's next start follows its crash, and a second pod claims too. No time passes, so no lease expires."""
    programs = {name: partial(pod, name, make) for name in ("a.0", "a.1", "b.0")}
    return Model(programs, {0: 1}, units=0, may_crash=("a.0",), later={"a.1": "a.0"}, prompt=("a.1",))


def drained(make: Make = LedgerRules) -> Model:
    programs = {"a.0": partial(pod, "a.0", make, drains=True), "b.0": partial(pod, "b.0", make)}
    return Model(programs, {0: 2}, units=1, fixed=(GONE, TASKS), prompt=("b.0",))


def living(make: Make = LedgerRules, pauses: str = "a.0") -> Model:
    """The element's next start takes over from an earlier one that is alive: only Slurm has lost its node."""
    programs = {name: partial(pod, name, make) for name in ("a.0", "a.1")}
    prompt = tuple(programs.keys() - {pauses})
    return Model(programs, {0: 2}, units=1, fixed=(GONE, RELEASED, TASKS), deceived=True, prompt=prompt)


def mistaken(make: Make = LedgerRules) -> Model:
    """A living pod is marked as gone, and another pod claims too."""
    programs = {name: partial(pod, name, make) for name in ("a.0", "b.0")}
    return Model(programs, {0: 2}, units=0, gone=("a.0",), deceived=True)


def read() -> Model:
    """A reader follows while a pod dies and the other takes over."""
    programs = {"a.0": partial(pod, "a.0"), "b.0": partial(pod, "b.0"), "reader": reader}
    return Model(programs, {0: 1}, 0, ("a.0",), told=True, stale=0, fixed=(RELEASED, TASKS))


Z = {claim_path(0, 0): {"owner": "z.0"}, f"{GONE}/z.0": {}}
"""A block whose holder is gone and has no lease any more."""
Y = {
    claim_path(0, 1): {"owner": "y.0", "predecessor": "z.0", "sealed": 0, "left": None},
    f"{GONE}/y.0": {},
}
"""Another one that had taken it over and is gone, too."""
SHORTEST = Times(renew_s=1, commit_s=1, lease_s=1)
AT_ONCE = Times(lease_s=-1)
"""For a coordinator that removes what it finds at the first look."""


def pruned(times: Times = SHORTEST, units: int = 4, looks: int = 2) -> Model:
    """Two pods take over a block. One releases it and takes it back, the other may pause anywhere. Meanwhile a
    coordinator removes the claims that later ones replace."""
    programs = {
        "a.0": partial(pod, "a.0", times=SHORTEST),
        "b.0": partial(pod, "b.0", times=SHORTEST, lingers=3),
        "coordinator": partial(pruner, looks, 2, times=times),
    }
    return Model(programs, {0: 2}, units, stale=0, prompt=("b.0", "coordinator"), fixed=(TASKS, GONE), before=Z)


def read_while_pruned() -> Model:
    """A reader follows while a pod takes over and a coordinator removes earlier claims at once."""
    programs = {"a.0": partial(pod, "a.0"), "reader": reader, "coordinator": partial(pruner, 1, times=AT_ONCE)}
    return Model(programs, {0: 1}, 0, stale=0, fixed=(TASKS,), before={**Z, **Y})


def living_while_pruned() -> Model:
    """The element's next start removes the lease of an earlier one that is alive, and so does a coordinator."""
    programs = {name: partial(pod, name) for name in ("a.0", "a.1")}
    programs["coordinator"] = partial(pruner, 1, times=AT_ONCE)
    return Model(programs, {0: 1}, 0, stale=0, fixed=(GONE, RELEASED, TASKS), deceived=True)


def added(make: Make = LedgerRules, how: Adding = add, units: int = 0) -> Model:
    """Two blocks are added, without an open lease, while the last pod finishes. The pod may have left."""
    programs = {"a.0": partial(pod, "a.0", make), "adder": partial(adder, "adder", "x", 7, 2, how=how)}
    return Model(programs, {0: 1}, units, fixed=(GONE, RELEASED), stale=1, cached=TASKS, adds=True)


def adding(how: Adding = add) -> Model:
    """An adder of three blocks dies anywhere, another with its token follows, and a third adds a block of its own."""
    adders = {name: partial(adder, name, "x", 7, 3, how=how) for name in ("x.0", "x.1")}
    programs = {**adders, "y.0": partial(adder, "y.0", "y", 8)}
    return Model(programs, {0: 1}, 0, ("x.0",), later={"x.1": "x.0"}, stale=0, fixed=())


def together(how: Adding = add) -> Model:
    """Two adders add the same at the same time, because one was taken for dead. A third adds a block of its own."""
    adders = {name: partial(adder, name, "x", 7, 2, how=how) for name in ("x.0", "x.1")}
    return Model({**adders, "y.0": partial(adder, "y.0", "y", 8)}, {0: 1}, 0, stale=0, fixed=())


def consumed(make: Make = LedgerRules) -> Model:
    """A consumer keeps the campaign open, adds a block and closes it, while the last pod finishes and waits."""
    programs = {"a.0": partial(pod, "a.0", make), "c": partial(adder, "c", "x", 7, closes="c")}
    return Model(programs, {0: 1}, units=1, fixed=(GONE, RELEASED), stale=0, opened=("c",))


SCENES = {
    "two pods": (partial(two, units=1), {"done"}, {0}),
    "one that pauses, holder or observer": (paused, {"done", "fenced", "taken over"}, {0, 1}),
    "one that pauses, seen through an old cache": (
        partial(paused, units=5, stale=3, cached=LEASES),
        {"done", "fenced"},
        {0, 1},
    ),
    "a holder that crashes": (crashed, {"done"}, {0, 1}),
    "a requeued element": (requeued, {"done"}, {0, 1}),
    "an earlier start that lives on": (living, {"done", "taken over", "fenced"}, {0, 1}),
    "an earlier start that lives on while the next one pauses": (
        partial(living, pauses="a.1"),
        {"done", "taken over", "fenced"},
        {0, 1},
    ),
    "a mark that a living pod is gone": (mistaken, {"done", "taken over"}, {0, 1}),
    "claims are removed": (pruned, {"done", "fenced", "taken over", "pruned"}, {1, 2}),
    "claims are removed while a reader reads": (read_while_pruned, {"done", "read", "pruned"}, {2}),
    "leases are removed, and an earlier start lives on": (
        living_while_pruned,
        {"done", "taken over", "pruned"},
        {0, 1},
    ),
    "draining": (drained, {"done", "drained"}, {0, 1}),
    "a reader": (read, {"done", "read"}, {0, 1}),
    "adding while the last pod finishes": (added, {"done", "added"}, {0}),
    "an adder that crashes": (adding, {"added"}, set()),
    "two adders with one token": (together, {"added"}, set()),
    "a consumer": (consumed, {"done", "added"}, {0}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_interleaving_keeps_every_rollout_once(scene: str) -> None:
    make, ends, epochs = SCENES[scene]
    model = make().explore()
    print(f"{scene}: {model.states} states")
    # Paths that lead to the same are one: the scene of a single block and one adder is the smallest.
    assert model.states > (350 if scene == "adding while the last pod finishes" else 1000)
    assert model.ends >= ends  # a model in which nothing happens proves nothing
    assert model.epochs == epochs


# --- rules broken on purpose ------------------------------------------------------------------------------------------


class SealsAtFirstSight(LedgerRules):
    """Measures a journal when its pod's lease is read, not when the pod is known to be gone."""

    def _look_after(self, owners: Any) -> Steps[set[str]]:
        for owner in sorted(owners):
            self.__dict__.setdefault("measured", {}).setdefault(owner, (yield Length(owner)))
        return (yield from super()._look_after(owners))

    def _succeed(self, block: int, epoch: int, owner: str, seal: Any) -> Steps[Any]:
        measured = self.__dict__["measured"].get(owner, seal["sealed"])
        return (yield from super()._succeed(block, epoch, owner, {**seal, "sealed": measured}))


class CommitsWithoutLooking(LedgerRules):
    """Assumes that a commit that began in time also ended in time."""

    def committed(self, commit: Any) -> Steps[bool]:
        if not (yield from self.may_commit()):
            return False
        yield Do(commit)
        return True


class RenewsTooLate(LedgerRules):
    """Renews a lease that other pods may have seen expire."""

    def renew(self, force: bool = False) -> Steps[None]:
        now = yield Clock()
        if now - self.lease.renewed_at >= self.times.renew_s:
            yield from (self.lease.rewrite if self.lease.counter else self.lease.publish)(now, {})


class ReadsTheClockAfterwards(LedgerRules):
    """Counts its lease from after it was written. A pause in between makes it look too young."""

    def renew(self, force: bool = False) -> Steps[None]:
        now, lease = (yield Clock()), self.lease
        if lease.counter and (not self.open_at(now) or (not force and now - lease.renewed_at < self.times.renew_s)):
            return
        yield from (lease.rewrite if lease.counter else lease.publish)(now, {})
        yield There(FINISHED)  # the model lets no process pause right before a clock is read
        lease.renewed_at = yield Clock()


class TakesOverAtOnce(LedgerRules):
    """Assumes that every pod with a lease is gone."""

    def _look_after(self, owners: Any) -> Steps[set[str]]:
        yield Names(GONE)
        return set(owners) if self.identity.pod == "b" else set()


class MarksWithoutClaiming(LedgerRules):
    """Checks whether the block was taken over, then marks it done. It may be taken over in between."""

    def _end(self, block: int, epoch: int) -> Steps[bool]:
        if (yield There(claim_path(block, epoch))):
            return False
        yield Touch(done_path(block, epoch))
        return True


class MarksForAllTime(LedgerRules):
    """Writes a finished mark without the number of blocks."""

    def _finish(self) -> Steps[bool]:
        done = done_blocks((yield Names(DONE)))
        if not all_done(done, block_numbers((yield Names(TASKS)))):
            return False
        yield Publish(FINISHED, {})
        return True


class LeavesBeforeItLooks(LedgerRules):
    """Looks for blocks, then for consumers, but not for blocks again."""

    def _finish(self) -> Steps[bool]:
        yield from super()._finish()
        return True


def without_record(blocks: Any, token: str, private: str) -> Steps[list[int]]:
    """Adds blocks at the first free numbers, without a record."""
    placed: list[int] = []
    number = 0
    for n, block in enumerate(blocks):
        content = {"rollouts": [vars(rollout) for rollout in block]}
        while not (yield Link(task_path(number), content, f"{private}.{n}")):
            number += 1
        placed.append(number)
    return placed


def withdrawing(blocks: Any, token: str, private: str) -> Steps[list[int]]:
    """Removes the finished mark when it adds blocks, although the mark may count them."""
    placed = yield from without_record(blocks, token, private)
    yield Remove(FINISHED)
    return placed


EQUAL = Times(renew_s=1, commit_s=2, lease_s=2)

MUTATIONS: dict[str, tuple[Callable[[], Model], str]] = {
    "the seal is taken before the claim is due": (partial(paused, SealsAtFirstSight), "lost"),
    "a lease as long as the fence": (
        partial(paused, LedgerRules, times=EQUAL, size=2, units=3, stale=3, cached=LEASES),
        "lost|taken over",
    ),
    "no look at the fence after the commit": (partial(paused, CommitsWithoutLooking), "lost|taken over|lease of"),
    "a late lease is renewed": (partial(paused, RenewsTooLate), "lost|taken over"),
    "the clock is read after the lease": (partial(paused, ReadsTheClockAfterwards), "lost|taken over"),
    "takeover without a lease's end": (partial(two, TakesOverAtOnce, units=1), "lost|taken over"),
    "a done mark that excludes no successor of a living start": (partial(living, MarksWithoutClaiming), "finished"),
    "a done mark that excludes no successor of a mistaken mark": (partial(mistaken, MarksWithoutClaiming), "finished"),
    "claims are removed at once": (partial(pruned, AT_ONCE, 1, 1), "taken over"),
    "a finished mark without a number": (partial(added, MarksForAllTime), "finished"),
    "a finished mark is removed": (partial(added, LedgerRules, withdrawing), "left no mark"),
    "blocks are added without a record": (partial(adding, without_record), "twice"),
    "blocks are added without a record, by two": (partial(together, without_record), "twice"),
    "a pod leaves by an old look": (partial(consumed, LeavesBeforeItLooks), "left no mark"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_rule_that_is_broken_on_purpose_is_found(mutation: str) -> None:
    make, what = MUTATIONS[mutation]
    with pytest.raises(Broken, match=what):
        make().explore()


def test_an_earlier_start_never_takes_from_a_later_one() -> None:
    assert earlier("0", "1")
    assert not earlier("2", "1")
    assert not earlier("1", "1")
    assert earlier("x1f3", "b2c4")  # starts that are not numbers: the other one counts as earlier
