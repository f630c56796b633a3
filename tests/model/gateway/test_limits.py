"""Limits of calls: rates over virtual time, requests in flight, shares that add up to the whole."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.model.gateway import limits
from megaflow_hpc.model.gateway.limits import Bucket, CallLimits, Quotas
from tests.support.serving import in_loop


class Clock:
    """Virtual time, which advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_the_shares_of_all_gateways_are_no_more_than_the_whole(flying: int, gateways: int) -> None:
    whole = Quotas(requests_per_s=7.5, tokens_per_s=1e6, in_flight=max(flying, gateways))
    assert whole.in_flight is not None
    parts = [whole.share(gateways)] * gateways
    assert whole.in_flight - gateways < sum(part.in_flight or 0 for part in parts) <= whole.in_flight
    assert sum(part.requests_per_s or 0 for part in parts) == pytest.approx(7.5)
    assert sum(part.tokens_per_s or 0 for part in parts) == pytest.approx(1e6)
    assert Quotas().share(gateways) == Quotas()


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 50)), min_size=1, max_size=60), st.floats(0.5, 100))
def test_no_stretch_of_time_gives_more_than_the_rate_and_one_burst(
    steps: list[tuple[float, float]], rate: float
) -> None:
    clock = Clock()
    bucket = Bucket(rate, clock)
    taken = 0.0
    for pause, amount in steps:
        clock.now += pause
        clock.now += bucket.wait_s(amount)
        amount = min(amount, max(rate, 1.0))
        bucket.take(amount)
        taken += amount
        assert taken <= rate * clock.now + max(rate, 1.0) + 1e-6 * (1 + taken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(limits, "_sleep", found.sleep)
    return found


def test_requests_keep_to_their_rate(clock: Clock) -> None:
    async def scenario() -> None:
        held = CallLimits(Quotas(requests_per_s=5), clock)
        for _ in range(55):
            async with held.turn():
                pass
        assert clock.now == pytest.approx(10.0, abs=0.01)  # the first five at once

    asyncio.run(scenario())


def test_tokens_are_paid_after_the_answer_and_by_those_who_come_next(clock: Clock) -> None:
    async def scenario() -> None:
        held = CallLimits(Quotas(tokens_per_s=1000), clock)
        async with held.turn():
            assert clock.now == 0.0
        held.charge(31_000)  # a second's allowance was there: thirty seconds of debt
        async with held.turn():
            assert clock.now == pytest.approx(30.0, abs=0.01)

    asyncio.run(scenario())


@in_loop
async def test_no_more_are_in_flight_than_allowed_and_those_who_wait_come_in_order() -> None:
    held, inside, most, order = CallLimits(Quotas(in_flight=3)), 0, 0, []

    async def one(number: int) -> None:
        nonlocal inside, most
        async with held.turn():
            order.append(number)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    await asyncio.gather(*(one(n) for n in range(30)))
    assert (most, order) == (3, list(range(30)))


@in_loop
async def test_a_call_that_is_cancelled_while_it_waits_or_works_gives_its_place_back() -> None:
    held = CallLimits(Quotas(in_flight=1))
    for _ in range(3):
        async with held.turn():
            waiting = asyncio.create_task(_hold(held))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        working = asyncio.create_task(_hold(held))
        await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    async with asyncio.timeout(5), held.turn():
        pass


async def _hold(held: CallLimits) -> None:
    async with held.turn():
        await asyncio.sleep(60)
