"""Fair turns over virtual time: slot-seconds follow the shares, whatever each user asks for."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.model.server.tenants import FairQueue
from tests.support.serving import in_loop


class Engine:
    """Serves each holder of a slot for the requested time. Only the ends of turns advance its clock."""

    def __init__(self, places: int) -> None:
        self.now = 0.0
        self.turns = FairQueue(places, lambda: self.now)
        self.had: Counter[str] = Counter()
        """Slot-seconds of each user."""
        self.begun: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._ends: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = count()
        self.tasks: list[asyncio.Task[None]] = []

    def ask(
        self, user: str, lengths: Iterator[float], at_once: int, share: float = 1.0, most: int | None = None
    ) -> None:
        """Makes ``at_once`` requests of a user. Each is followed by another as long as there are lengths."""
        self.tasks += [asyncio.create_task(self._ask(user, lengths, share, most)) for _ in range(at_once)]

    async def _ask(self, user: str, lengths: Iterator[float], share: float, most: int | None) -> None:
        for seconds in lengths:
            async with self.turns.turn(user, share, most):
                self.begun[user] += 1
                self.held[user] += 1
                self.most[user] = max(self.most[user], self.held[user])
                began, end = self.now, asyncio.Event()
                heapq.heappush(self._ends, (began + seconds, next(self._numbers), end))
                await end.wait()
                self.held[user] -= 1
                self.had[user] += self.now - began

    async def until(self, when: float) -> None:
        await _settle()
        while self._ends and self._ends[0][0] <= when:
            self.now, _, end = heapq.heappop(self._ends)
            end.set()
            await _settle()
        self.now = when

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.turns.waiting, self.turns._held) == (0, 0)


async def _settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def portions(had: Mapping[str, float]) -> dict[str, float]:
    return {user: seconds / sum(had.values()) for user, seconds in had.items()}


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0.25, 4), st.floats(0.2, 5), st.integers(9, 30)), min_size=2, max_size=5),
)
def test_users_who_always_ask_have_their_shares_of_the_time(places: int, users: list[tuple[float, float, int]]) -> None:
    """This also holds with fewer slots than users, and if one user's requests take much longer than another's."""

    async def scenario() -> None:
        engine = Engine(places)
        for number, (share, seconds, at_once) in enumerate(users):
            engine.ask(str(number), repeat(seconds), at_once, share)
        await engine.until(400)
        total, found = sum(share for share, _, _ in users), portions(engine.had)
        for number, (share, _, _) in enumerate(users):
            assert found[str(number)] == pytest.approx(share / total, rel=0.15, abs=0.02)
        await engine.stop()

    asyncio.run(scenario())


@in_loop
async def test_one_who_asks_now_and_then_is_let_in_next_while_another_floods() -> None:
    engine = Engine(3)
    engine.ask("flood", repeat(1.0), 300)
    await engine.until(100)
    for number in range(1, 11):
        engine.ask("rare", iter([0.3]), 1)
        await engine.until(engine.now + 1)  # each place has become free once
        assert engine.begun["rare"] == number
        await engine.until(engine.now + 0.7)
    await engine.stop()


@in_loop
async def test_nobody_is_owed_for_having_been_away() -> None:
    engine = Engine(4)
    engine.ask("early", repeat(1.0), 20)
    await engine.until(500)
    engine.ask("late", repeat(1.0), 20)
    engine.had.clear()
    await engine.until(540)
    assert portions(engine.had)["early"] == pytest.approx(0.5, abs=0.1)
    await engine.stop()


@in_loop
async def test_what_a_cap_withheld_is_not_owed_either() -> None:
    """A user that was long held to one of eight slots gets no more than its share later."""
    engine = Engine(8)
    engine.ask("capped", repeat(1.0), 20, most=1)
    engine.ask("other", repeat(1.0), 20)
    await engine.until(500)
    assert engine.most["capped"] == 1
    assert portions(engine.had)["capped"] == pytest.approx(1 / 8, abs=0.01)
    engine.turns.resize(1)
    await engine.until(510)
    engine.had.clear()
    await engine.until(550)
    assert portions(engine.had)["capped"] == pytest.approx(0.5, abs=0.1)
    await engine.stop()


@in_loop
async def test_more_places_are_given_at_once_and_fewer_as_turns_end() -> None:
    engine = Engine(2)
    engine.ask("a", repeat(1.0), 50)
    await engine.until(0.5)
    assert engine.held["a"] == 2
    engine.turns.resize(5)
    await engine.until(0.6)
    assert engine.held["a"] == 5
    engine.turns.resize(1)
    await engine.until(3)
    assert engine.held["a"] == 1
    await engine.stop()


@in_loop
async def test_who_is_cancelled_while_a_place_becomes_free_leaves_it_to_the_next() -> None:
    """The holder leaves and the waiting call is cancelled in the same instant, in either order. No slot is lost."""
    for first in (True, False):
        turns, leave, done = FairQueue(1), asyncio.Event(), []

        async def ask(turns: FairQueue = turns, leave: asyncio.Event = leave, done: list[int] = done) -> None:
            async with turns.turn("a"):
                await leave.wait()
                done.append(1)

        tasks = [asyncio.create_task(ask()) for _ in range(3)]
        await _settle()
        if first:
            tasks[1].cancel()
        leave.set()
        await asyncio.sleep(0)
        if not first:
            tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError)
        assert (len(done), turns._held, turns.waiting) == (2, 0, 0)
