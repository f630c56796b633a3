"""A gateway like that of a worker rank, for the benchmark: rollouts open and close while calls arrive.

``python -m tests.bench.gateway_rank``. Standard input has one JSON object a line: ``{servers: […]}``
(endpoint records), ``{open: SLOT}`` (ends the slot's rollout, checks its recording, and opens the next),
``{cpu: true}``, ``{end: true}``. Standard output answers each.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from tests.bench.fixed_engine import ANSWERS, sampled


class Checked:
    """Counts turns and tokens of recordings, and the turns whose ids no engine sampled."""

    def __init__(self) -> None:
        self.turns = self.tokens = self.wrong = 0
        self._answers: dict[int, set[tuple[int, ...]]] = {}

    def add(self, recording: Recording) -> None:
        """Compares one recording with what the engine samples."""
        for turn in recording.turns:
            sequence = recording.sequences[turn.sequence]
            found = tuple(sequence.tokens[turn.token_start : turn.token_end])
            known = self._answers.get(len(found))
            if known is None:
                known = self._answers[len(found)] = {tuple(sampled(n, len(found))) for n in range(ANSWERS)}
            self.turns += 1
            self.tokens += len(found)
            self.wrong += found not in known


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    checked, opened, counter = Checked(), dict[int, str](), 0

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    async with ModelGateway() as gateway:
        while line := await lines.readline():
            message = json.loads(line)
            if "servers" in message:
                gateway.update_endpoints(message["servers"])
                say({"servers": len(message["servers"])})
            elif "cpu" in message:
                say({"cpu_s": _cpu_s()})
            elif "open" in message:
                slot = message["open"]
                if slot in opened:
                    checked.add(await gateway.close(opened.pop(slot)))
                counter += 1
                opened[slot] = f"task-{slot}/default/{counter}"
                model = await gateway.open(opened[slot], "default")
                say({"slot": slot, "url": model.base_url, "key": model.api_key})
            else:
                for rollout in opened.values():
                    checked.add(await gateway.close(rollout))
                opened.clear()
                say({"turns": checked.turns, "tokens": checked.tokens, "wrong": checked.wrong, "cpu_s": _cpu_s()})
                checked = Checked()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Serves until standard input ends."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
