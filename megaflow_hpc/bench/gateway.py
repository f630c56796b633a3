"""The model gateway beside LiteLLM's proxy and vllm-router: what it adds to a call, and how many calls it takes.

Engine, gateway (or peer) and load generator are a process each. The engine answers after a fixed time from memory and
takes 40 µs of CPU for a call; 64 clients keep one call in flight each. The gateway asks it for token ids and
log-probabilities, records them, and compares every recorded id with what the engine sampled; peers and the direct calls
ask for the text alone, which is to their advantage. Latency added is the median (or 99th percentile) of the calls
through the gateway less that of the direct calls of the same round.

Rounds go through direct, gateway and peers in turn, so that a busy machine is busy for all. CPU time of a call does not
depend on what else runs nearly as much as the rest: it stands beside.

With --conversations random agents of every dialect hold conversations with tools over a scripted engine, and what was
recorded is compared with what the engine sampled.

All of it comes with the sources (``tests/bench/gateway.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megaflow_hpc.bench.arguments import above_zero, add_count
from megaflow_hpc.bench.checkout import from_checkout
from megaflow_hpc.bench.figures import Figure

HELP = "the model gateway: latency added, completions a second, beside LiteLLM and vllm-router"
EXAMPLES = ("bench gateway", "bench gateway --clients 256 --seconds 10")
SHAPES = ("2k", "30k", "instant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="kinds of load (all)")
    parser.add_argument(
        "--seconds", type=above_zero, default=5.0, metavar="S", help="seconds of each load (%(default)s)"
    )
    add_count(parser, "--rounds", 3, "times that each way to the engine is measured")
    add_count(parser, "--clients", 64, "calls in flight")
    add_count(parser, "--conversations", 0, "hold N random conversations too", least=0)


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Measures every shape of load, then the random conversations where they are asked for."""
    option = "--peers" if arguments.peers else "--conversations" if arguments.conversations else "bench gateway"
    figures: list[Figure] = from_checkout("gateway", option).measure(arguments, note)
    return figures
