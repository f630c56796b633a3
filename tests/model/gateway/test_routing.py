"""The router's choice of a server: affinity, weights, and servers that fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.engine_call import retry_after_s
from megaflow_hpc.model.gateway.router import AFFINITY, ALL_FAILED_S, Router, Server
from megaflow_hpc.model.server.registration import Assignment
from tests.support.serving import in_loop


def routed(*weights: float, clock: Callable[[], float] = time.monotonic, **more: Any) -> Router:
    found = Router(clock)
    found.update(
        [
            {"server": f"p.{n}", "policy": "p", "url": f"http://h:{n}", "weight": weight, **more}
            for n, weight in enumerate(weights)
        ]
    )
    return found


def pick(found: Router, previous: str = "", group: str = "") -> Server:
    server = found.pick("p", previous, group)
    assert server is not None
    return server


def test_the_weight_of_a_server_is_its_number_of_gpus() -> None:
    models: list[dict[str, Any]] = [{"gpus": 4, "nodes": 2}, {"gpus": 2}, {"gpus": 0, "nodes": 1}, {}]
    assert [Assignment(0, "p", model).weight for model in models] == [8, 2, 1, 1]


def test_groups_begin_at_the_same_server_at_every_gateway_and_spread_by_weight() -> None:
    one, other = routed(1, 1, 2), routed(1, 1, 2)
    homes = [pick(one, group=f"task{n}/p").name for n in range(4000)]
    assert homes == [pick(other, group=f"task{n}/p").name for n in range(4000)]
    counts = Counter(homes)
    assert 850 < counts["p.0"] < 1150
    assert 850 < counts["p.1"] < 1150
    assert 1800 < counts["p.2"] < 2200


def test_a_server_that_leaves_moves_only_its_own_groups() -> None:
    before, after = routed(1, 1, 1), routed(1, 1, 1)
    after.update([{"server": f"p.{n}", "policy": "p", "url": "http://h:1"} for n in (0, 1)])
    for n in range(300):
        home = pick(before, group=f"g{n}").name
        assert home == "p.2" or pick(after, group=f"g{n}").name == home


def test_a_server_that_asks_to_be_left_alone_is_within_bounds() -> None:
    found = routed(1)
    (server,) = found.servers("p")
    server.failed(began=0.0, now=10.0, wait_s=3600.0)
    server.failed(began=9.0, now=11.0, wait_s=2.0)  # another call in flight, with another Retry-After
    server.succeeded()  # another call in flight, which was answered
    assert not server.available(69.9)
    assert server.available(70.0)
    assert [retry_after_s(value) for value in ("7", "1.5", "-1", "soon", "", "٣")] == [7, 1.5, 0, 0, 0, 0]
    assert retry_after_s("10000000000") == 1e10
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0  # a date in the past
    assert retry_after_s(formatdate(time.time() + 50, usegmt=True)) == pytest.approx(50, abs=5)


def test_affinity_holds_until_the_server_is_too_busy_and_then_the_least_busy_is_asked() -> None:
    found = routed(1, 1)
    first, second = found.servers("p")
    first.outstanding = AFFINITY
    assert pick(found, previous="p.0") is first
    first.outstanding = AFFINITY + 1
    assert pick(found, previous="p.0") is second


@pytest.mark.parametrize("lasting", [True, False])
@in_loop
async def test_nobody_waits_for_servers_that_would_fail_again(lasting: bool) -> None:
    now = 1000.0
    found = Router(lambda: now)
    records = [{"server": "p.0", "policy": "p", "cause": "no such option", "all_failed": True, "lasting": lasting}]
    found.update(records)
    waiting = asyncio.create_task(found.acquire("p", now + 60))

    async def wakened() -> None:
        found.update(records)
        for _ in range(5):
            await asyncio.sleep(0)

    await wakened()
    assert waiting.done() == lasting
    now += ALL_FAILED_S - 0.01
    await wakened()
    assert waiting.done() == lasting
    now += 0.02
    await wakened()
    assert waiting.done()
    with pytest.raises(ModelServiceError, match=r"p\.0: no such option"):
        await waiting


def test_requests_in_flight_follow_the_weights() -> None:
    found = routed(1, 3)
    for n in range(400):
        pick(found, group=f"g{n % 7}").outstanding += 1
    light, heavy = found.servers("p")
    assert 2.8 < heavy.outstanding / light.outstanding < 3.2


def test_a_failed_server_rests_longer_each_time_and_is_then_tried_by_one_call() -> None:
    now = 1000.0
    found = routed(1, 1, clock=lambda: now)
    first, second = found.servers("p")
    rests = []
    for _ in range(9):
        first.failed(began=now, now=now)
        rests.append(first.backoff_until - now)
        assert pick(found, previous="p.0") is second
        now = first.backoff_until + 0.01
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    second.outstanding = 50
    assert pick(found) is first
    first.outstanding = 1
    assert pick(found) is second, "one call tries it, no more"
    first.succeeded()
    assert pick(found) is first


def test_one_outage_seen_by_many_calls_is_one_failure() -> None:
    (server,) = routed(1).servers("p")
    for n in range(64):
        server.failed(began=1000.0, now=1005.0 + n)
    assert server.failures == 1


def test_a_server_that_goes_on_keeps_what_is_known_of_it_and_one_that_starts_anew_does_not() -> None:
    found = routed(1, start="a")
    (server,) = found.servers("p")
    server.outstanding, server.failures = 3, 2
    record = {"server": "p.0", "policy": "p", "url": "http://h:0", "start": "a"}
    found.update([{**record, "weight_version": 7, "weight": 4}])
    assert found.servers("p") == [server]
    assert (server.weight_version, server.weight, server.failures) == (7, 4.0, 2)
    found.update([{**record, "start": "b"}])
    assert found.servers("p") != [server]
    assert found.servers("p")[0].failures == 0
