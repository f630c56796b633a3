"""The runner of a worker rank: an event loop that owns gateway, agents and sandboxes, and runs rollouts side by side.

``python -m megaflow_hpc.pod.rollout.runner FD``. It knows neither MPI nor Slurm; end-of-file on its socket ends it and
with it every sandbox.
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
from megaflow_hpc.host.descriptors import raise_limit
from megaflow_hpc.host.process import node_name
from megaflow_hpc.host.wire import Message, frame, pack, read_parcel, unpack_all
from megaflow_hpc.pod.messages import STOP
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import AttemptResult, blank, run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.texts import end_of, printable
from megaflow_hpc.trajectory import Attempt
from megaflow_hpc.types import Rollout, Task

LOG_PERIOD_S = 60.0
ACTIVITY_S = 3.0
"""How often rank 0 is told how far the rollouts are."""


class Runner:
    """Serves one socket until it closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._services: Services | None = None
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        self._said: tuple[int, dict[str, tuple[int, int, bool]]] = 0, {}
        """Tokens, and what :meth:`ModelGateway.activity` returned, as rank 0 knows them."""

    async def serve(self) -> None:
        """Answers messages until the socket closes or ``STOP`` comes, then ends every rollout."""
        speaking = asyncio.create_task(self._speak_of_activity())
        try:
            while (parcel := await read_parcel(self._reader)) is not None and parcel != STOP:
                for message in unpack_all(parcel):
                    await getattr(self, f"_on_{message['op']}")(message)
        finally:
            speaking.cancel()
            for task in self._rollouts.values():
                task.cancel()
            await asyncio.gather(*self._rollouts.values(), return_exceptions=True)
            if self._services:
                await self._services.close()

    async def _send(self, message: Message) -> None:
        self._writer.write(frame(pack(message)))
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    # --- messages ---

    async def _on_init(self, message: Message) -> None:
        config = resolved(CampaignConfig, message["campaign"])
        policies = {name: resolved(Policy, p) for name, p in message["policies"].items()}
        partials, places = Path(message["partial"]), (message["code"], message["beside"])
        self._services = await Services.open(config, policies, partials, places)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._preempted)
        await self._send({"op": "ready", "slots": message["slots"], "node": node_name()})

    def _preempted(self) -> None:
        """Preemption and cancelling reach every process of a step; what dies of it is nobody's failure."""
        assert self._services is not None
        self._services.suspension.preempt()

    async def _on_start(self, message: Message) -> None:
        assert self._services is not None, "rank 0 sends init first"
        rollout = Rollout(**message["rollout"])
        self._services.images.update(message["images"])
        self._rollouts[rollout.id] = asyncio.create_task(self._run(rollout, message))

    async def _on_suspend(self, message: Message) -> None:
        """The allocation ends: agents that can go on elsewhere finish their turn, those that wait for the model for
        longer than ``patience_s`` do not."""
        assert self._services is not None, "rank 0 sends init first"
        suspension = self._services.suspension
        suspension.suspend(now=message["patience_s"] <= 0)
        asyncio.get_running_loop().call_later(message["patience_s"], suspension.suspend, True)

    async def _on_cancel(self, message: Message) -> None:
        """Nobody waits for this rollout any more; its result will say ``cancelled``."""
        await asyncio.sleep(0)  # one that has not begun could not say how it ended
        task = self._rollouts.get(message["id"])
        if task is not None:
            task.cancel()

    async def _on_endpoints(self, message: Message) -> None:
        assert self._services is not None, "rank 0 sends init first"
        self._services.gateway.update_endpoints(message["endpoints"])

    async def _on_images(self, message: Message) -> None:
        assert self._services is not None, "rank 0 sends init first"
        self._services.provider.prefetch(message["order"])

    async def _on_mirror(self, message: Message) -> None:
        """Somebody looks at this rollout: rank 0 is told how its conversation ends, unless it knows that already."""
        assert self._services is not None, "rank 0 sends init first"
        gateway, rollout = self._services.gateway, message["id"]
        calls, *_ = gateway.activity().get(rollout, (-1,))
        if calls not in (-1, message["calls"]):
            messages, left_out = end_of(gateway.conversation(rollout))
            told = {"id": rollout, "calls": calls, "messages": messages, "left_out": left_out}
            await self._send({"op": "transcript", **told})

    async def _speak_of_activity(self) -> None:
        """Says every few seconds what has changed: a heartbeat's worth, however long the conversations are."""
        while True:
            await asyncio.sleep(ACTIVITY_S)
            if self._services is None:
                continue
            gateway = self._services.gateway
            tokens, known = self._said
            self._said = gateway.tokens, gateway.activity()
            changed = {rollout: said for rollout, said in self._said[1].items() if known.get(rollout) != said}
            if changed or gateway.tokens != tokens:
                await self._send({"op": "activity", "tokens": gateway.tokens, "rollouts": changed})

    async def _on_beat(self, message: Message) -> None:
        pass

    async def _run(self, rollout: Rollout, start: Message) -> None:
        assert self._services is not None, "rank 0 sends init first"
        self._services.suspension.owner = f"{start['job_id'] or 0}.{start['rank']}"
        attempts = [Attempt(**attempt) for attempt in start["attempts"]]
        try:
            task = Task.from_dict(start["task"])
            ended = await run_attempt(self._services, rollout, task, start["attempt"], start["partial"])
            try:
                outcome = self._outcome(ended, start, attempts)
            except (TypeError, ValueError, OverflowError) as error:
                failed = blank(rollout, start["attempt"])
                failed.error_kind, failed.error = "user", f"the result cannot be sent: {error!r}"
                outcome = self._outcome(AttemptResult(failed), start, attempts)
            await self._send(outcome.to_message())
        finally:
            self._rollouts.pop(rollout.id, None)

    @staticmethod
    def _outcome(ended: AttemptResult, start: Message, attempts: list[Attempt]) -> Outcome:
        """With what only rank 0 knew when it started the rollout."""
        trajectory = ended.trajectory
        trajectory.epoch, trajectory.job_id, trajectory.rank = start["epoch"], start["job_id"], start["rank"]
        return Outcome.of(trajectory, attempts, ended.cause, ended.partial)


def log_briefly(loop: asyncio.AbstractEventLoop) -> None:
    """Logs failing callbacks at most once a minute, because a sandbox may cause any number of failures."""
    failures, due = 0, 0.0

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal failures, due
        failures += 1
        if loop.time() >= due:
            error = context.get("exception")
            place = traceback.extract_tb(error.__traceback__)[-1:] if error else ""
            text = f"{context.get('message')}: {error!r:.500} at {place} ({failures} since the last such line)"
            print(printable(text), file=sys.stderr)
            failures, due = 0, loop.time() + LOG_PERIOD_S

    loop.set_exception_handler(failed)


async def _main(descriptor: int) -> None:
    # Slurm signals every process of a step; draining is the master's decision, not ours.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    raise_limit()
    log_briefly(asyncio.get_running_loop())
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    await Runner(reader, writer).serve()


if __name__ == "__main__":
    gc.freeze()  # what was imported is not looked through at every large request
    asyncio.run(_main(int(sys.argv[1])))
