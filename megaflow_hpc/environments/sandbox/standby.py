"""Sandboxes that stand by for mode ``persistent``: started ahead, per image and spec, never used before.

The paper's persistent environments are reset between tasks. What a hostile rollout leaves in a living container cannot
be proved clean from outside: its processes can hide, and a mounted overlay must not be emptied under it. So the
container is what is given up, and the wait for the next is what is spared: the next one starts while the rollout
runs. A sandbox that stands by must show that it is clean before it is handed out (no command ever, the runner's
processes alone, an empty layer); one that cannot goes, and a fresh one is started.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import MegaflowError

MOST = 16
"""Standing by at once, over all images; each is some 6 MB. The image unused for longest gives way."""

SHARE = 4
"""One stands by for so many in use, at least one."""


class StandbyPool:
    """The sandboxes of one provider that stand by.

    Args:
        make: starts a fresh sandbox that counts for nobody yet.
    """

    def __init__(self, make: Callable[[SandboxSpec], Awaitable[ApptainerSandbox]]) -> None:
        self._make = make
        self._ready: OrderedDict[str, list[ApptainerSandbox]] = OrderedDict()
        self._starting: Counter[str] = Counter()
        self._in_use: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self, spec: SandboxSpec) -> ApptainerSandbox | None:
        """Returns a clean sandbox at once, or ``None``: then the caller starts a fresh one. The next is started
        meanwhile."""
        key = _key(spec)
        found = None
        ready = self._ready.setdefault(key, [])
        self._ready.move_to_end(key)
        while ready and found is None:
            candidate = ready.pop()
            if candidate.used():
                self._run(candidate.stop())
            else:
                found = candidate
        self._fill(key, spec)
        return found

    async def standing_by(self, spec: SandboxSpec) -> bool:
        """Waits for what starts in the background; returns whether one stands by for ``spec`` then."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return bool(self._ready.get(_key(spec)))

    def began(self, spec: SandboxSpec) -> None:
        """Counts a sandbox of this spec as in use from now on."""
        self._in_use[_key(spec)] += 1

    def ended(self, spec: SandboxSpec) -> None:
        """Counts a sandbox of this spec as in use no more."""
        self._in_use[_key(spec)] -= 1

    def _fill(self, key: str, spec: SandboxSpec) -> None:
        wanted = max(1, (self._in_use[key] + SHARE - 1) // SHARE)
        while not self._closed and len(self._ready[key]) + self._starting[key] < wanted:
            self._starting[key] += 1
            self._run(self._start(key, spec))

    async def _start(self, key: str, spec: SandboxSpec) -> None:
        sandbox = None
        try:
            sandbox = await self._make(spec)
            await sandbox.settled()
        except (MegaflowError, OSError):  # who asks next starts one, and hears why it fails
            if sandbox is not None:
                await sandbox.stop()
            return
        finally:
            self._starting[key] -= 1
        if self._closed:
            await sandbox.stop()
            return
        self._ready.setdefault(key, []).append(sandbox)
        while sum(map(len, self._ready.values())) > MOST:
            oldest = next(name for name, ready in self._ready.items() if ready)
            await self._ready[oldest].pop().stop()

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all that stand by."""
        self._closed = True
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        left = [sandbox for ready in self._ready.values() for sandbox in ready]
        self._ready.clear()
        await asyncio.gather(*(sandbox.stop() for sandbox in left), return_exceptions=True)


def _key(spec: SandboxSpec) -> str:
    return json.dumps(asdict(spec), sort_keys=True, default=str)
