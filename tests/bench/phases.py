"""Where the seconds of a rollout without a model go: its parts one by one, and the processor time of all of it.

    python -m tests.bench.phases --rollouts 40 --slots 1

A task whose test writes a reward, the agent ``nop``, in this process: what a worker does, without MPI and journal. A
part's time is its own: what it waits for inside another part is that one's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import table
from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout import rollout as attempt
from megaflow_hpc.pod.rollout.rollout import AgentRun
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.harbor import verifier
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.types import Rollout
from tests.bench.arguments import add_count, add_image, image_of
from tests.support.harbor_tasks import write_files

TASK = {
    "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "base"\nworkdir = "/app"\n',
    "instruction.md": "Do nothing.\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("sandbox started", ApptainerProvider, "start"),
    ("directories made, checkout looked for", attempt, "prepare"),
    ("agent", AgentRun, "_run_agent"),
    ("the agent's processes ended", ApptainerSandbox, "end_processes"),
    ("patch", checkout, "difference"),
    ("artifacts looked for", verifier, "collect"),
    ("verifier's container started", ApptainerSandbox, "restart"),
    ("tests laid out, run and read", verifier, "_judge"),
    ("stopped, layer removed", ApptainerSandbox, "stop"),
)

_inner: ContextVar[list[float] | None] = ContextVar("inner", default=None)
"""Seconds of the parts inside the one that is under way."""


def watch(spent: dict[str, list[float]]) -> None:
    """Makes each of :data:`PARTS` add its own seconds to ``spent``."""
    for name, owner, function in PARTS:
        setattr(owner, function, _timed(name, getattr(owner, function), spent))


def _timed(name: str, work: Callable[..., Awaitable[Any]], spent: dict[str, list[float]]) -> Callable[..., Any]:
    async def timed(*args: Any, **kwargs: Any) -> Any:
        outer, inner = _inner.get(), [0.0]
        mark, began = _inner.set(inner), time.monotonic()
        try:
            return await work(*args, **kwargs)
        finally:
            took = time.monotonic() - began
            _inner.reset(mark)
            spent[name].append(took - inner[0])
            if outer is not None:
                outer[0] += took

    return timed


async def measure(folder: Path, image: str, count: int, slots: int) -> str:
    """The table of ``count`` rollouts, ``slots`` at once, after one that stages the image."""
    spent: dict[str, list[float]] = defaultdict(list)
    watch(spent)
    task = read_harbor_task(write_files(folder / "task", TASK))
    config = CampaignConfig.model_validate(
        {"name": "phases", "tasks": str(folder), "agent": "nop", "environment": {"network": "none"}}
    )
    totals: list[float] = []
    async with ApptainerProvider() as provider:
        services = Services(
            config, {"nop": Policy(agents=(AgentConfig(name="nop"),))}, {"base": image}, provider, ModelGateway()
        )

        async def one(number: int) -> None:
            began = time.monotonic()
            done = await attempt.run_attempt(services, Rollout(task.id, "nop", number, "nop"), task, 0)
            assert done.trajectory.reward == 1, done.trajectory.error
            totals.append(time.monotonic() - began)

        await one(0)
        spent.clear()
        totals.clear()
        numbers = iter(range(count))

        async def slot() -> None:
            for number in numbers:
                await one(number)

        before = _processor_s()
        await asyncio.gather(*(slot() for _ in range(slots)))
    # Now those are counted, too, that ended with the provider: what sandboxes were cloned of.
    own, children = (after - was for after, was in zip(_processor_s(), before, strict=True))
    rows = [(name, f"{1000 * sum(spent[name]) / count:.1f}") for name, _, _ in PARTS]
    parts = sum(sum(times) for times in spent.values()) / count
    mean = sum(totals) / count
    rows += [
        ("the rest", f"{1000 * (mean - parts):.1f}"),
        ("a rollout, mean", f"{1000 * mean:.1f}"),
        ("a rollout, median", f"{1000 * statistics.median(totals):.1f}"),
        ("processor time, this process", f"{1000 * own / count:.1f}"),
        ("processor time, sandboxes and what starts them", f"{1000 * children / count:.1f}"),
    ]
    return table(("part", "ms"), rows)


def _processor_s() -> tuple[float, float]:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return used[0].ru_utime + used[0].ru_stime, used[1].ru_utime + used[1].ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_image(parser)
    add_count(parser, "--rollouts", 40, "rollouts")
    add_count(parser, "--slots", 1, "at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"megaflow-phases-{os.getpid()}-") as place:
        print(asyncio.run(measure(Path(place), image_of(given), given.rollouts, given.slots)))
