"""Headless Chromium, driven through its DevTools protocol, which reports everything that a page does."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.requirements import REMEDY

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--remote-debugging-port=0")
LONG_S = 60.0


def browser() -> str:
    """Return the path of the browser. The test fails with the remedy if none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(f"none of {', '.join(NAMES)} is on PATH; {REMEDY}")
    return found


class Page:
    """A page in a browser: its console output, its requests, and the results of scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.console: list[str] = []
        """Messages of scripts and of the browser, including errors and refusals by the page's policy."""
        self.asked_for: list[str] = []
        """Addresses of everything that was loaded or tried."""
        self.dialogs: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and record the events that arrive meanwhile."""
        number = next(self._numbers)
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads((await self._socket.receive(LONG_S)).data)
            if said.get("id") == number:
                assert "error" not in said, said
                return dict(said["result"])
            self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or the value of the promise that it returns."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(LONG_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def visiting(address: str, scratch: Path) -> AsyncIterator[Page]:
    """Open an address in a new browser whose files are in ``scratch``."""
    command = [browser(), *OPTIONS, f"--user-data-dir={scratch / 'profile'}", "--window-size=1280,2400", "about:blank"]
    # Start a new session, because the program may be a script whose children are the browser.
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(LONG_S):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "the browser has ended"
        host = line.decode().split("ws://")[1].split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{host}/json/list") as answer:
                target = next(one for one in json.loads(await answer.text()) if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                page = Page(socket)
                for domain in ("Network", "Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=address)
                await page.until("document.readyState === 'complete'")
                yield page
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
