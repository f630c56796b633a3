"""Pool of reusable processes for agents of rollouts without a sandbox. Each process runs several agents at once.

An agent that awaits its model shares its process with other agents. An agent that blocks while waiting, for example in
a synchronous client, has a process to itself. A process receives another job only once it responds. The pool grows
while jobs are waiting and processes are blocked.

If a process ends, each of its unfinished rollouts runs again in its own process. A rollout fails only if that process
ends too, so a bug in one rollout does not make the others fail.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from megaflow_hpc.agents.remote import AgentJob, AgentProcess, Zygote
from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.host.process import stat_fields
from megaflow_hpc.types import AgentResult

MAX_AGENTS = 256
"""Maximum number of agents that share a process."""
MAX_JOBS = 2000
"""Replace a process after this many jobs, because agents may leak memory."""
MAX_CORES = 8
"""Maximum number of non-blocked processes, regardless of the number of cores."""
GROW_S = 0.05
"""A sleeping process that has not responded for this many seconds counts as blocked by its agent."""
STALL_S = 20.0
"""Kill a shared process if an agent blocks it for this many seconds, or has not ended this long after its cancellation.
A process that lacks CPU time does not count as blocked.
"""


class AgentPool:
    """Runs agents in shared processes. Bound to one event loop."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._cores = min(MAX_CORES, len(os.sched_getaffinity(0)))
        self._processes: list[AgentProcess] = []
        self._forking: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[AgentProcess]] = deque()
        self._unanswered: dict[AgentProcess, int] = {}
        """Maps each process that had not responded at the latest :meth:`_look` to its number of jobs at that time."""
        self._checked: dict[AgentProcess, tuple[int, frozenset[int], float]] = {}
        """State of each process at the latest :meth:`_check`: number of jobs, cancelled jobs, and CPU seconds."""
        self._blocking: set[str] = set()
        """Agents that blocked a process while others shared it. They now run in their own processes."""
        self._looking: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None

    async def run(self, job: AgentJob) -> AgentResult:
        """Runs one agent to completion. Cancelling the call cancels the agent.

        Raises:
            MegaflowError: Raised by the agent.
            UserCodeError: The agent raised another exception.
            ProcessLostError: The process ended, perhaps because of another agent. Use :meth:`run_alone`.
        """
        if job.agent.name in self._blocking:
            return await self.run_alone(job)
        if self._checking is None:
            self._checking = asyncio.get_running_loop().call_later(STALL_S, self._check)
        process = self._next()
        if process is None:
            process = await self._wait()
        return await process.run(job)

    async def run_alone(self, job: AgentJob) -> AgentResult:
        """Runs one agent in its own process, with the resource limits of a shared process. Raises the same errors as
        :meth:`run`."""
        return await self._zygote.run(job, limited=True)

    def close(self) -> None:
        """Kills all processes."""
        self._waiting.clear()
        for timer in (self._looking, self._checking):
            if timer is not None:
                timer.cancel()
        for task in self._forking:
            task.cancel()
        for process in self._processes:
            process.kill()

    def _next(self) -> AgentProcess | None:
        """Returns the ready process with the fewest agents, and reserves it for one job."""
        free = [process for process in self._processes if process.ready and _may_take(process)]
        process = min(free, key=lambda process: process.running, default=None)
        if (process is None or process.running) and len(self._processes) + len(self._forking) < self._cores:
            self._fork(1)
        if process is not None:
            process.ready = False
        return process

    async def _wait(self) -> AgentProcess:
        waiter: asyncio.Future[AgentProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._look_soon()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().send({"ping": True})  # makes the process ready for another job
            raise

    # --- processes ---

    def _fork(self, count: int) -> None:
        for _ in range(count):
            task = asyncio.create_task(self._forked())
            self._forking.add(task)
            task.add_done_callback(self._forking.discard)

    async def _forked(self) -> None:
        try:
            process = await self._zygote.fork("agents", limited=True)
        except UserCodeError as error:
            while self._waiting:
                if not (waiter := self._waiting.popleft()).done():
                    waiter.set_exception(error)
            return
        process.changed = self._changed
        self._processes.append(process)

    def _changed(self, process: AgentProcess) -> None:
        """Gives a process its next job. Removes the process if it has ended or has run :data:`MAX_JOBS` jobs."""
        if process.lost or (process.taken >= MAX_JOBS and not process.running):
            self._remove(process)
        if process in self._processes and process.ready and _may_take(process):
            while self._waiting:
                if not (waiter := self._waiting.popleft()).done():
                    process.ready = False
                    waiter.set_result(process)
                    return

    def _remove(self, process: AgentProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)
        process.kill()

    # --- processes that do not respond ---

    def _look_soon(self) -> None:
        if self._looking is None:
            loop = asyncio.get_running_loop()
            # Runs one step later, so that responses that arrived while the loop was busy are handled first.
            self._looking = loop.call_later(GROW_S, loop.call_soon, self._look)

    def _look(self) -> None:
        """Forks processes if jobs are waiting while agents block the existing processes."""
        self._looking = None
        if not self._waiting:
            self._unanswered.clear()
            return
        # Require two checks in a row, because a response may have arrived that this loop has not read yet.
        unanswered = {process: process.taken for process in self._processes if not process.ready and process.pid}
        blocked = sum(self._unanswered.get(p) == taken and _asleep(p) for p, taken in unanswered.items())
        full = sum(not _may_take(process) for process in self._processes)
        self._unanswered = unanswered
        if len(self._processes) + len(self._forking) - blocked - full < self._cores:
            self._fork(min(len(self._waiting), max(self._cores, blocked)))
        self._look_soon()

    def _check(self) -> None:
        """Kills shared processes that one agent blocks, and processes that are no longer needed."""
        before, self._checked = self._checked, {}
        for process in list(self._processes):
            cancelled, cpu_s, asleep = process.cancelled(), _cpu_s(process), _asleep(process)
            taken, jobs, cpu_s_before = before.get(process, (-1, frozenset(), 0.0))
            stalled = process.running > 1 and not process.ready and process.taken == taken
            stalled = stalled and (asleep or cpu_s - cpu_s_before > STALL_S / 2)
            if stalled or cancelled & jobs:
                if stalled and asleep:
                    self._blocking |= process.agents()
                self._remove(process)
            elif not process.running and len(self._processes) > self._cores:
                self._remove(process)
            else:
                self._checked[process] = process.taken, cancelled, cpu_s
                if process.ready:
                    process.send({"ping": True})
        self._checking = asyncio.get_running_loop().call_later(STALL_S, self._check) if self._processes else None


def _may_take(process: AgentProcess) -> bool:
    return not process.lost and process.running < MAX_AGENTS and process.taken < MAX_JOBS


def _asleep(process: AgentProcess) -> bool:
    """Returns whether an unresponsive process is waiting rather than computing."""
    fields = stat_fields(process.pid)
    return not fields or fields[0] in "SD"


def _cpu_s(process: AgentProcess) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = stat_fields(process.pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
