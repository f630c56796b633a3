"""Runs rollouts concurrently in the runner, a child process of a worker rank. It has the gateway, agents and sandboxes.

The rank starts it as ``python -m megaflow_hpc.pod.rollout.runner FD``, where FD is a socket. End-of-file on the socket
stops the runner and all sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from megaflow_hpc.config import CampaignConfig, Policy, resolved
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.process import node_name, raise_descriptor_limit
from megaflow_hpc.host.wire import Message, frame, pack, read_parcel, unpack_all
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.comm import STOP
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import AttemptResult, blank, run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.rundir.endpoints import SERVICE
from megaflow_hpc.texts import end_of, printable
from megaflow_hpc.trajectory import Attempt
from megaflow_hpc.types import Rollout, Task

LOG_INTERVAL_S = 60.0
ACTIVITY_INTERVAL_S = 3.0
"""Seconds between progress reports to rank 0."""


class Runner:
    """Runs rollouts at the request of rank 0, and sends their outcomes back over the same socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._opened: Services | None = None
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        self._reported: dict[str, tuple[int, int, bool]] = {}
        """Activity of each rollout, as last reported to rank 0."""
        self._reported_use = (0, 0.0)
        """Number of sampled tokens and their cost in US dollars, both as last reported to rank 0."""

    @property
    def _services(self) -> Services:
        assert self._opened is not None, "rank 0 sends init first"
        return self._opened

    async def serve(self) -> None:
        """Handles messages until the socket closes or ``STOP`` arrives, then stops all rollouts."""
        reporting = asyncio.create_task(self._report_activity())
        try:
            while (parcel := await read_parcel(self._reader)) is not None and parcel != STOP:
                for message in unpack_all(parcel):
                    await getattr(self, f"_on_{message['op']}")(message)
        finally:
            reporting.cancel()
            for task in self._rollouts.values():
                task.cancel()
            await asyncio.gather(*self._rollouts.values(), return_exceptions=True)
            if self._opened:
                await self._opened.close()

    async def _send(self, message: Message) -> None:
        self._writer.write(frame(pack(message)))
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    # --- messages ---

    async def _on_init(self, message: Message) -> None:
        config = resolved(CampaignConfig, message["campaign"])
        policies = {name: resolved(Policy, p) for name, p in message["policies"].items()}
        code_places = (message["code"], message["beside"])
        try:
            services = await Services.open(
                config, policies, Path(message["partial"]), code_places, message["sandboxes"]
            )
        except MegaflowError as error:  # this node lacks something, which rank 0 must report
            print(printable(f"runner: {error}"), file=sys.stderr)
            await self._send({"op": "left", "why": f"{node_name()}: {error}"})
            raise SystemExit(error.exit_status) from None
        self._opened = services
        # Slurm signals every process of a step that it preempts or cancels. If a process dies then, it has not failed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, services.preemption.preempt)
        await self._send({"op": "ready", "slots": message["slots"], "node": node_name()})

    async def _on_start(self, message: Message) -> None:
        rollout = Rollout(**message["rollout"])
        self._services.images.update(message["images"])
        self._rollouts[rollout.id] = asyncio.create_task(self._run(rollout, message))

    async def _on_suspend(self, message: Message) -> None:
        """Suspends agents because the allocation ends. Aborts pending model calls after ``patience_s`` seconds."""
        preemption, patience_s = self._services.preemption, message["patience_s"]
        preemption.suspend(now=patience_s <= 0)
        asyncio.get_running_loop().call_later(patience_s, preemption.suspend, True)

    async def _on_cancel(self, message: Message) -> None:
        """Cancels a rollout that is no longer needed. Its result has the status ``cancelled``."""
        await asyncio.sleep(0)  # a task cancelled before it starts could not return a result
        task = self._rollouts.get(message["id"])
        if task is not None:
            task.cancel()

    async def _on_endpoints(self, message: Message) -> None:
        servers, services = list[Message](), dict[str, Message]()
        for endpoint in message["endpoints"]:
            policy = endpoint["policy"]
            if policy.startswith(SERVICE):
                services[policy.removeprefix(SERVICE)] = endpoint
            else:
                servers.append(endpoint)
        self._services.gateway.update_endpoints(servers)
        self._services.remote.update(services)

    async def _on_images(self, message: Message) -> None:
        if self._services.provider is not None:
            self._services.provider.prefetch(message["order"])

    async def _on_mirror(self, message: Message) -> None:
        """Sends rank 0 the last part of a conversation for viewers. Sends nothing if ``calls`` shows that rank 0
        already has it."""
        gateway, rollout = self._services.gateway, message["id"]
        calls, *_ = gateway.activity().get(rollout, (-1,))
        if calls in (-1, message["calls"]):
            return
        messages, left_out = end_of(gateway.conversation(rollout), gateway.image_labels(rollout))
        await self._send(
            {"op": "transcript", "id": rollout, "calls": calls, "messages": messages, "left_out": left_out}
        )

    async def _report_activity(self) -> None:
        """Periodically reports rollouts whose status has changed to rank 0. The reports omit conversations, because
        these may be long."""
        while True:
            await asyncio.sleep(ACTIVITY_INTERVAL_S)
            if self._opened is not None:
                await self._send_activity(self._opened.gateway)

    async def _send_activity(self, gateway: ModelGateway) -> None:
        use, activity = (gateway.tokens, gateway.usd), gateway.activity()
        changed = {rollout: status for rollout, status in activity.items() if self._reported.get(rollout) != status}
        if changed or use != self._reported_use:
            self._reported_use, self._reported = use, activity
            await self._send({"op": "activity", "tokens": use[0], "usd": use[1], "rollouts": changed})

    async def _on_beat(self, message: Message) -> None:
        pass

    async def _run(self, rollout: Rollout, start: Message) -> None:
        self._services.preemption.owner = f"{start['job_id'] or 0}.{start['rank']}"
        attempts = [Attempt(**attempt) for attempt in start["attempts"]]
        try:
            try:
                task = Task.from_dict(start["task"])
                ended = await run_attempt(self._services, rollout, task, start["attempt"], start["checkpoint"])
                outcome = self._outcome(ended, start, attempts)
            except Exception as error:  # rank 0 waits for a result, regardless of what the task and the agent return
                failed = blank(rollout, start["attempt"])
                failed.error_kind, failed.error = "user", f"the task cannot be read, or the result not sent: {error!r}"
                outcome = self._outcome(AttemptResult(failed), start, attempts)
            await self._send_activity(self._services.gateway)  # so that rank 0 learns the rollout's cost before its end
            await self._send(outcome.to_message())
        finally:
            self._rollouts.pop(rollout.id, None)

    @staticmethod
    def _outcome(ended: AttemptResult, start: Message, attempts: list[Attempt]) -> Outcome:
        """Packs a result. Epoch, job id and rank come from rank 0's ``start`` message."""
        trajectory = ended.trajectory
        trajectory.epoch, trajectory.job_id, trajectory.rank = start["epoch"], start["job_id"], start["rank"]
        return Outcome.of(trajectory, attempts, ended.cause, ended.checkpoint)


def log_briefly(loop: asyncio.AbstractEventLoop) -> None:
    """Logs at most one callback exception per minute, because a sandbox may cause any number of them."""
    failures, due = 0, 0.0

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal failures, due
        failures += 1
        if loop.time() >= due:
            error = context.get("exception")
            location = traceback.extract_tb(error.__traceback__)[-1:] if error else ""
            text = f"{context.get('message')}: {error!r:.500} at {location} ({failures} since the last such line)"
            print(printable(text), file=sys.stderr)
            failures, due = 0, loop.time() + LOG_INTERVAL_S

    loop.set_exception_handler(failed)


async def _main(descriptor: int) -> None:
    # Slurm signals every process of a step. Only rank 0 decides when to drain.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    raise_descriptor_limit()
    log_briefly(asyncio.get_running_loop())
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    await Runner(reader, writer).serve()


if __name__ == "__main__":
    gc.freeze()  # exclude the imported modules from garbage collection
    asyncio.run(_main(int(sys.argv[1])))
