"""An agent that hangs up in the middle of its answer is nobody's fault: nothing is logged that it could make grow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.model.gateway import stream
from megaflow_hpc.model.gateway.protocols import Answer
from tests.support.backends import proxy_of_script
from tests.support.serving import in_loop


@in_loop
async def _left(sent: list[web.StreamResponse]) -> None:
    async def answered(request: web.BaseRequest) -> web.StreamResponse:
        async def leave() -> Answer:
            assert request.transport is not None
            request.transport.close()  # as when the peer has gone
            return Answer({})

        sent.append(await stream.send(request, leave(), lambda _: iter([("", "x" * 100_000)]), lambda _: ("", "")))
        return sent[-1]

    runner = web.ServerRunner(web.Server(answered, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    finally:
        await runner.cleanup()


def test_hanging_up_before_a_stream_costs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[web.StreamResponse] = []
    _left(sent)
    assert len(sent) == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@in_loop
async def _left_at_the_proxy(folder: Path) -> None:
    async with proxy_of_script(folder) as (proxy, _):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {proxy.key}"}) as session:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(aiohttp.ClientError):
                await session.post(f"http://127.0.0.1:{proxy.port}/v1/chat/completions", json=body)


def test_hanging_up_before_a_proxys_answer_costs_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = web.StreamResponse.prepare

    async def left(self: web.StreamResponse, request: web.BaseRequest) -> Any:
        if type(self) is web.StreamResponse:
            assert request.transport is not None
            request.transport.close()  # as when the peer has gone
        return await prepare(self, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", left)
    _left_at_the_proxy(tmp_path)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
