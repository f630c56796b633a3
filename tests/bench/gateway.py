"""The model gateway beside LiteLLM's proxy and vllm-router: what it adds to a call, and how many calls it takes.

Engine, gateway (or peer) and load generator are a process each. The engine answers after a fixed time from memory and
takes 40 µs of CPU for a call; 64 clients keep one call in flight each. The gateway asks it for token ids and
log-probabilities, records them, and compares every recorded id with what the engine sampled; peers and the direct calls
ask for the text alone, which is to their advantage. Latency added is the median (or 99th percentile) of the calls
through the gateway less that of the direct calls of the same round.

Rounds go through direct, gateway and peers in turn, so that a busy machine is busy for all. CPU time of a call does not
depend on what else runs nearly as much as the rest: it stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import gateway_peers
from tests.bench.arguments import above_zero, add_count
from tests.bench.command import main
from tests.bench.figures import Figure, median, quantile
from tests.bench.fixed_engine import prompt_text
from tests.bench.load import Load, closed_loop, run_fast
from tests.support.places import ROOT

CALLS = 8
"""Calls of a rollout. Then its client opens the next."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """One kind of load: ``prompt`` and ``sampled`` tokens, an engine that takes ``delay_s``.

    ``goals`` are latency added in ms, p50 and p99, or completions a second alone.
    """

    name: str
    prompt: int
    sampled: int
    delay_s: float
    goals: tuple[float, ...]


SHAPES = {
    "2k": Shape("prompts of 2k tokens, 200 sampled, engine of 500 ms", 2_000, 200, 0.5, (1.5, 8.0)),
    "30k": Shape("prompts of 30k tokens, 200 sampled, engine of 500 ms", 30_000, 200, 0.5, (10.0, 30.0)),
    "instant": Shape("prompts of 256 tokens, 200 sampled, instant engine", 256, 200, 0.0, (1_500.0,)),
}
LITELLM_TIMES = 15.0
"""The goal for completions a second is this many times LiteLLM's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="kinds of load (all)")
    parser.add_argument(
        "--seconds", type=above_zero, default=5.0, metavar="S", help="seconds of each load (%(default)s)"
    )
    add_count(parser, "--rounds", 3, "times that each way to the engine is measured")
    add_count(parser, "--clients", 64, "calls in flight")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures every shape of load."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        for name in arguments.shapes:
            figures += _shape(SHAPES[name], arguments, Path(folder), note)
    return figures


@dataclass
class Rounds:
    """Latencies, rates and CPU time of one way to the engine, round by round."""

    name: str
    version: str = ""
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    calls: int = 0

    def add(self, load: Load, cpu_s: float | None) -> None:
        """Adds one round; ``cpu_s`` is the CPU time that the way took for it.

        Raises:
            RuntimeError: a call failed, or none was answered.
        """
        if load.failures:
            raise RuntimeError(f"{self.name}: {len(load.failures)} calls failed; the first: {load.failures[0]}")
        if not load.latencies:
            raise RuntimeError(f"{self.name}: no call was answered in {load.seconds:g} s; use more --seconds")
        self.p50_ms.append(quantile(load.latencies, 0.5) * 1e3)
        self.p99_ms.append(quantile(load.latencies, 0.99) * 1e3)
        self.rate.append(load.rate)
        self.calls += len(load.latencies)
        if cpu_s is not None:
            self.cpu_ms.append(cpu_s * 1e3 / load.answered)


def _shape(shape: Shape, arguments: argparse.Namespace, folder: Path, note: Note) -> list[Figure]:
    engine = _Child("fixed_engine", *_words(prompt=shape.prompt, sampled=shape.sampled, delay_s=shape.delay_s))
    peers: list[Any] = []
    try:
        address = f"http://127.0.0.1:{engine.answer()['port']}"
        rank = _Rank(address, arguments.clients)
        try:
            if arguments.peers:
                peers = gateway_peers.start(address, folder, note)
            direct, ours = Rounds("direct"), Rounds("gateway")
            theirs = [(peer, Rounds(peer.name, peer.version)) for peer in peers]
            for number in range(arguments.rounds):
                note(f"{shape.name}: round {number + 1} of {arguments.rounds}")
                direct.add(_load(shape, arguments, partial(_same, (f"{address}/v1", "k"))), None)
                before = rank.cpu_s()
                load = _load(shape, arguments, rank.address)
                ours.add(load, rank.cpu_s() - before)
                for peer, rounds in list(theirs):
                    before, place = peer.cpu_s(), peer.address
                    load = _load(shape, arguments, partial(_same, place))
                    try:
                        rounds.add(load, peer.cpu_s() - before)
                    except RuntimeError as error:  # a peer may fail in any way; the others are measured all the same
                        note(f"left out: {error}")
                        theirs.remove((peer, rounds))
            checked = rank.end()
        finally:
            rank.stop()
    finally:
        for peer in peers:
            peer.stop()
        engine.stop()
    return _figures(shape, direct, ours, [rounds for _, rounds in theirs], checked)


def _figures(shape: Shape, direct: Rounds, ours: Rounds, theirs: list[Rounds], checked: dict[str, Any]) -> list[Figure]:
    def added(rounds: Rounds, which: str) -> list[float]:
        pairs = zip(getattr(rounds, which), getattr(direct, which), strict=True)
        return [mine - without for mine, without in pairs]

    figures = []
    if shape.delay_s:
        for which, label, goal in (("p50_ms", "p50", shape.goals[0]), ("p99_ms", "p99", shape.goals[1])):
            figure = median(f"latency added, {label}: {shape.name}", "ms", added(ours, which), goal)
            for rounds in theirs:
                figure = figure.beside(rounds.name, rounds.version, median("", "", added(rounds, which)).value)
            figures.append(figure)
    else:
        figure = median(f"completions, {shape.name}", "1/s", ours.rate, shape.goals[0], "higher")
        litellm = None
        for rounds in (*theirs, direct):
            value = median("", "", rounds.rate).value
            figure = figure.beside(rounds.name, rounds.version, value)
            if rounds.name.startswith("LiteLLM"):
                litellm = [mine / other for mine, other in zip(ours.rate, rounds.rate, strict=True)]
        figures.append(figure)
        if litellm:
            figures.append(median("completions over LiteLLM's", "×", litellm, LITELLM_TIMES, "higher"))
    cpu = median(f"CPU of the gateway a call: {shape.name}", "ms", ours.cpu_ms)
    for rounds in theirs:
        cpu = cpu.beside(rounds.name, rounds.version, median("", "", rounds.cpu_ms).value)
    share = 1.0 - checked["wrong"] / max(checked["turns"], 1)
    right = Figure(
        f"recorded ids that were sampled: {shape.name}", "of calls", share, checked["turns"], None, 1.0, "higher"
    )
    return [*figures, cpu, right]


def _load(shape: Shape, arguments: argparse.Namespace, address: Callable[[int], tuple[str, str]]) -> Load:
    return run_fast(
        closed_loop(
            address,
            prompt_text(shape.prompt),
            clients=arguments.clients,
            seconds=arguments.seconds,
            spread_s=shape.delay_s,
        )
    )


def _same(address: tuple[str, str], client: int) -> tuple[str, str]:
    return address


def _words(**options: object) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class _Child:
    """A program of the benchmark that communicates by lines of JSON."""

    def __init__(self, module: str, *words: str) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def answer(self) -> dict[str, Any]:
        """Returns the program's next line.

        Raises:
            RuntimeError: the program has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r}: ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **message: object) -> dict[str, Any]:
        """Sends a message and returns the answer.

        Raises:
            RuntimeError: the program has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """Closes its standard input, which ends the program. Kills it after 20 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Rank(_Child):
    """The gateway's process, and the open rollouts of its clients."""

    def __init__(self, engine: str, clients: int) -> None:
        super().__init__("gateway_rank")
        record = {"server": "default.0", "policy": "default", "url": engine, "key": "k", "model_name": "m"}
        self.ask(servers=[{**record, "protocol": "plain"}])
        self._places = {n: self._open(n) for n in range(clients)}
        self._calls = dict.fromkeys(range(clients), 0)

    def _open(self, client: int) -> tuple[str, str]:
        found = self.ask(open=client)
        return found["url"], found["key"]

    def address(self, client: int) -> tuple[str, str]:
        """Returns the address of this client's next call. After ``CALLS`` calls it belongs to another rollout."""
        self._calls[client] += 1
        if self._calls[client] % CALLS == 0:
            self._places[client] = self._open(client)
        return self._places[client]

    def cpu_s(self) -> float:
        """Returns the seconds of CPU that the process has taken so far."""
        return float(self.ask(cpu=True)["cpu_s"])

    def end(self) -> dict[str, Any]:
        """Closes every rollout, and returns how many turns were recorded and how many of them are ``wrong``."""
        return self.ask(end=True)


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
