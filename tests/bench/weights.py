"""How long new weights take from their publishing to the first token that they sample, with a real vLLM.

    python -m tests.bench.weights MODEL [--python ENGINE_VENV/bin/python] [--poll-s 0.5] [--publishes 20]

MODEL is a small model directory (``launchers/tiny_model.py`` makes one). One server with ``running: continue``; one
rollout after the other samples a token through a gateway, which records its version; weights are published at random
instants. The time runs from the call of ``publish`` to the answer, as its client has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir import weights
from tests.bench.figures import Figure, median, quantile
from tests.support.serving import Servers, call

GOAL_S = 1.5
"""Seconds from publishing to the first token, p50."""


def measure(folder: Path, model: Path, interpreter: str, poll_s: float, publishes: int) -> list[Figure]:
    """Publishes the same weights again and again; every version has a number of its own, whatever it holds."""
    section: dict[str, Any] = {"engine": "vllm", "path": str(model), "gpus": 0, "python": interpreter}
    section |= {"args": {"max-model-len": 2048}, "weights": {"running": "continue"}}
    with Servers(folder) as servers:
        # One thread computes: as many as cores leave none to what asks and answers, and the model is tiny.
        servers.start(
            section, "default", "--poll-s", str(poll_s), OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
        )
        servers.record(0, timeout_s=600)
        published, first, calls = asyncio.run(_rounds(servers, model, poll_s, publishes))
    until = f"publish to first token of the new version, poll_s {poll_s:g}"
    return [
        median(f"{until}, p50", "s", first, GOAL_S),
        Figure(f"{until}, p95", "s", quantile(first, 0.95), len(first)),
        median("publish alone, p50", "s", published),
        median("a call of one token, p50", "s", calls),
    ]


async def _rounds(
    servers: Servers, model: Path, poll_s: float, publishes: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each publishing, from it to its first token, and of each call."""
    draw, published, first, calls = random.Random(0), [], [], []
    body = {"messages": [{"role": "user", "content": "Begin."}], "max_tokens": 1}
    async with servers.gateway(wait_s=60) as gateway:

        async def sample() -> int:
            """The version that samples one token now."""
            began = time.monotonic()
            endpoint = await gateway.open(f"t/default/{len(calls)}", "default")
            status, answer = await call(endpoint, body)
            assert status == 200, answer
            recording = await gateway.close(f"t/default/{len(calls)}")
            calls.append(time.monotonic() - began)
            return max(recording.sequences[-1].weight_versions)

        for _ in range(3):
            await sample()
        calls.clear()
        for _ in range(publishes):
            await asyncio.sleep(draw.uniform(0, poll_s))
            began = time.monotonic()
            publishing = asyncio.create_task(asyncio.to_thread(_publish, servers, model))
            while not publishing.done():
                await sample()
            number, took = await publishing
            while await sample() < number:
                pass
            published.append(took)
            first.append(time.monotonic() - began)
    return published, first, calls


def _publish(servers: Servers, model: Path) -> tuple[int, float]:
    began = time.monotonic()
    return weights.publish(servers.run, model, keep=2).version, time.monotonic() - began


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model directory, as vLLM reads it")
    engines = Path(os.environ.get("MEGAFLOW_ENGINE_VENV", "engine"))
    parser.add_argument("--python", default=str(engines / "bin" / "python"), help="interpreter that has vLLM")
    parser.add_argument("--poll-s", type=float, default=0.5, help="seconds between two polls for new weights")
    parser.add_argument("--publishes", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        for figure in measure(
            Path(folder), arguments.model.absolute(), arguments.python, arguments.poll_s, arguments.publishes
        ):
            spread = "" if figure.spread is None else " ({:.3f} – {:.3f})".format(*figure.spread)
            goal = "" if figure.goal is None else f", goal {figure.goal:g}: {'met' if figure.passed else 'missed'}"
            print(f"{figure.name}: {figure.value:.3f} {figure.unit}{spread}, n {figure.n}{goal}")


if __name__ == "__main__":
    main()
