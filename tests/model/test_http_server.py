"""The HTTP server of gateway and proxy closes connections completely."""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from megaflow_hpc.model.http_server import HttpServer
from tests.support.serving import in_loop


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


@in_loop
async def test_the_number_of_a_listener_that_was_closed_may_be_anothers_at_once() -> None:
    loop = asyncio.get_running_loop()
    server = HttpServer(_answer, logging.getLogger(__name__), max_per_owner=8)
    listener = socket.create_server(("127.0.0.1", 0))
    server.listen(listener)
    await asyncio.sleep(0.01)  # it waits for a connection
    number = listener.fileno()
    server.unlisten(listener)
    ours, theirs = socket.socketpair()
    try:
        assert number in (ours.fileno(), theirs.fileno())
        if theirs.fileno() == number:
            ours, theirs = theirs, ours
        heard = asyncio.Event()
        loop.add_reader(ours, heard.set)
        await asyncio.sleep(0.01)  # what the server has still to do is done
        theirs.send(b"hello")
        await asyncio.wait_for(heard.wait(), 10)
        loop.remove_reader(ours)
    finally:
        ours.close()
        theirs.close()
        await server.stop()
