"""The load that a server reports."""

from __future__ import annotations

import asyncio

import pytest

from megaflow_hpc.model.server.proxy import QUEUE_METRIC
from megaflow_hpc.slurm.accounting import JobState
from tests.support.serving import Servers, chat

QUICKLY = ("--poll-s", "0.2", "--beat-s", "1")


def test_queues_are_read_from_the_engines_own_metrics() -> None:
    text = (
        "# HELP vllm:num_requests_waiting Number of requests waiting.\n"
        'vllm:num_requests_waiting{engine="0",model_name="default"} 3.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="default"} 2.0\n'
        'vllm:num_requests_running{engine="0",model_name="default"} 8.0\n'
    )
    assert sum(float(n) for n in QUEUE_METRIC.findall(text)) == 5


@pytest.mark.slow
def test_a_server_tells_how_many_wait_for_it(servers: Servers) -> None:
    """The engine gives one answer at a time: of six requests, one is answered and five wait."""
    servers.script({"default": [{"text": "slow", "delay_s": 0.5}]}, "default", *QUICKLY, slots=1)
    record = servers.record(0)

    async def scenario() -> dict[str, float]:
        over = asyncio.Event()

        async def keep_asking() -> None:
            while not over.is_set():
                assert await chat(record, record["key"]) == 200

        asking = [asyncio.create_task(keep_asking()) for _ in range(6)]
        found = await asyncio.to_thread(servers.await_load, 0, 5)
        over.set()
        await asyncio.gather(*asking)
        return found

    found = asyncio.run(scenario())
    assert found["in_flight"] >= 5
    assert found["waiting"] == found["in_flight"] - 1
    assert found["wait_s"] > 1


def test_elements_that_wait_to_be_let_go_are_told_from_others() -> None:
    assert JobState("1_0", "PENDING", "JobHeldUser").held
    assert JobState("1_0", "PENDING", "JobHeldAdmin").held
    assert not JobState("1_0", "PENDING", "Resources").held
    assert not JobState("1_0", "RUNNING", "None").held
