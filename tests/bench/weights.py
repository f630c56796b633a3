"""How long new weights take from their publishing to the first token that they sample, with a real vLLM.

    python -m tests.bench.weights MODEL [--python ENGINE_VENV/bin/python] [--poll-s 0.2] [--publishes 20]
        [--readers 7 [--number 7] [--apart]]

MODEL is a small model directory (``launchers/tiny_model.py`` makes one). One server with ``running: continue``; one
rollout after the other samples a token through a gateway, which records its version; weights are published at random
instants. The time runs from the call of ``publish`` to the answer, as its client has it.

With ``--readers`` further servers of the policy, each as if on a node of its own, notice and read each version without
an engine (:mod:`tests.support.weight_readers`). The real server has the number ``--number``: 0 reads the shared files,
the last one is at the end of the tree. ``--apart`` publishes no checksums, so that servers pass nothing on. inotify
counts how often the published tensors are opened, after the publisher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server.weight_updates import TRAINED_POLL_INTERVAL_S
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, read_run, write_run
from tests.bench.figures import Figure, median, quantile
from tests.support.serving import Servers, call
from tests.support.waiting import until
from tests.support.weight_readers import opens

TENSORS = "model.safetensors"
GOAL_S = 0.32
"""Seconds from publishing to the first token, p50."""


def measure(folder: Path, model: Path, interpreter: str, options: argparse.Namespace) -> list[Figure]:
    """Publishes nearly the same weights again and again."""
    section: dict[str, Any] = {"engine": "vllm", "path": str(model), "gpus": 0, "python": interpreter}
    section |= {"args": {"max-model-len": 2048}, "weights": "continue"}
    # One thread computes: as many as cores leave none to what asks and answers, and the model is tiny.
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "SLURMD_NODENAME": f"node{options.number}"}
    others = [n for n in range(options.readers + 1) if n != options.number]
    processes: list[subprocess.Popen[str]] = []
    with Servers(folder) as servers:
        record = RunRecord(campaign={"name": "bench"}, policies={"default": PolicyRecord(model=section)})
        record.servers = [ServerRecord("default", section) for _ in range(options.readers + 1)]
        write_run(servers.run, record)
        try:
            servers.entries = record.servers
            servers.serve(options.number, "--poll-s", str(options.poll_s), **env)
            for number in others:
                words = [str(servers.run), str(number), f"node{number}", str(folder / f"scratch{number}")]
                command = [sys.executable, "-m", "tests.support.weight_readers", *words, str(options.poll_s)]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            until(servers.file(options.number).exists, "the real server serves", 600)
            if options.apart:  # a policy of one server has no checksums
                record.servers = record.servers[:1]
                write_run(servers.run, record)
            rounds = asyncio.run(_rounds(servers, model, options, processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    way = "" if not options.readers else f", server {options.number} of {options.readers + 1}"
    way += ", apart" if options.apart else ""
    name = f"publish to first token of the new version, poll_s {options.poll_s:g}{way}"
    figures = [
        median(f"{name}, p50", "s", rounds.first, GOAL_S),
        Figure(f"{name}, p95", "s", quantile(rounds.first, 0.95), len(rounds.first)),
        median("publish alone, p50", "s", rounds.published),
        median("a call of one token, p50", "s", rounds.calls),
    ]
    if options.readers:
        figures += [
            median("publish to the last reader, p50", "s", rounds.last),
            median("published tensors opened by servers, times a version", "", rounds.opened),
            median("bytes that readers read from the shared directory, in sizes of the tensors", "", rounds.shared),
            median("bytes that readers read from servers, in sizes of the tensors", "", rounds.passed),
        ]
    return figures


@dataclass
class _Rounds:
    """Seconds of each publishing, from it to its first token and to its last reader, and of each call; counts and bytes
    of each version."""

    published: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)


async def _rounds(
    servers: Servers, model: Path, options: argparse.Namespace, readers: list[subprocess.Popen[str]]
) -> _Rounds:
    draw, rounds = random.Random(0), _Rounds()
    body = {"messages": [{"role": "user", "content": "Begin."}], "max_tokens": 1}
    async with ModelGateway(wait_s=60) as gateway:
        gateway.update_endpoints([servers.record(options.number)])
        for reader in readers:
            await asyncio.to_thread(_line, reader)  # it is registered

        async def sample() -> int:
            """The version that samples one token now."""
            began = time.monotonic()
            endpoint = await gateway.open(f"t/default/{len(rounds.calls)}", "default")
            status, answer = await call(endpoint, body)
            assert status == 200, answer
            recording = await gateway.close(f"t/default/{len(rounds.calls)}")
            rounds.calls.append(time.monotonic() - began)
            return max(recording.sequences[-1].weight_versions)

        for _ in range(3):
            await sample()
        rounds.calls.clear()
        own = _opened_by_publisher(servers, model) if readers else 0
        for number in range(options.publishes):
            await asyncio.sleep(draw.uniform(0, options.poll_s))
            source = servers.run.path / f"step{number}"
            await asyncio.to_thread(shutil.copytree, model, source)
            with open(source / TENSORS, "r+b") as file:  # other weights, or servers would link the file they have
                file.seek(-1, os.SEEK_END)
                file.write(bytes([number % 64]))
            with opens(source) as opened:  # the directory, whatever its name becomes
                at, began = time.time(), time.monotonic()
                publishing = asyncio.create_task(asyncio.to_thread(_publish, servers, source))
                while not publishing.done():
                    await sample()
                version, took = await publishing
                while await sample() < version:
                    pass
                rounds.published.append(took)
                rounds.first.append(time.monotonic() - began)
                lines = [await asyncio.to_thread(_line, reader) for reader in readers]
                assert {line["version"] for line in lines} <= {version}
            if readers:
                size = (model / TENSORS).stat().st_size
                rounds.last.append(max(line["at"] for line in lines) - at)
                rounds.opened.append(opened[TENSORS] - own)
                rounds.shared.append(sum(line["shared_bytes"] for line in lines) / size)
                rounds.passed.append(sum(line["peer_bytes"] for line in lines) / size)
    return rounds


def _opened_by_publisher(servers: Servers, model: Path) -> int:
    """Returns how often publishing itself opens the tensors, measured in a run that no server sees."""
    run = RunDir(servers.run.path.with_name("unseen"))
    run.create()
    write_run(run, read_run(servers.run))
    source = run.path / "step"
    shutil.copytree(model, source)
    with opens(source) as opened:
        weights.publish(run, source, "default", move=True)
    return opened[TENSORS]


def _line(reader: subprocess.Popen[str]) -> dict[str, Any]:
    assert reader.stdout is not None
    found: dict[str, Any] = json.loads(reader.stdout.readline())
    return found


def _publish(servers: Servers, source: Path) -> tuple[int, float]:
    began = time.monotonic()
    return weights.publish(servers.run, source, move=True, keep=2).version, time.monotonic() - began


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model directory, as vLLM reads it")
    engines = Path(os.environ.get("MEGAFLOW_ENGINE_VENV", "engine"))
    parser.add_argument("--python", default=str(engines / "bin" / "python"), help="interpreter that has vLLM")
    parser.add_argument("--poll-s", type=float, default=TRAINED_POLL_INTERVAL_S, help="seconds between polls")
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--readers", type=int, default=0, help="further servers, without engines")
    parser.add_argument("--number", type=int, default=0, help="number of the real server")
    parser.add_argument("--apart", action="store_true", help="servers pass nothing on to each other")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        for figure in measure(Path(folder), arguments.model.absolute(), arguments.python, arguments):
            spread = "" if figure.spread is None else " ({:.3f} – {:.3f})".format(*figure.spread)
            goal = "" if figure.goal is None else f", goal {figure.goal:g}: {'met' if figure.passed else 'missed'}"
            print(f"{figure.name}: {figure.value:.3f} {figure.unit}{spread}, n {figure.n}{goal}")


if __name__ == "__main__":
    main()
