"""``python -m tests.model.gateway.conversation_trees --trees N``: random conversation trees, compared in every format.

A tree is named by its seed and number: ``--seed S --first N --trees 1`` repeats it. LiteLLM is a client where Harbor's
environment is named (``--litellm PYTHON``).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectories import gather, open_trajectories, validate
from megaflow_hpc.trajectory import Trajectory
from tests.model.gateway.trees.agents import Tree
from tests.model.gateway.trees.clients import Clients, LiteLLM, native_clients
from tests.model.gateway.trees.engine import Engine, served
from tests.model.gateway.trees.oracle import Oracle
from tests.support.places import ROOT
from tests.support.samples import commit, run_dir

LONGEST = 2000
"""Characters reported of one tree."""
BATCH = 50
"""Trees per file."""


class Outcome:
    """The number of comparisons, and the trees that failed."""

    def __init__(self) -> None:
        self.trees = self.calls = 0
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        """Failed trees, with the differences."""


async def grow(seed: int, first: int, trees: int, litellm: Path | None = None, log: bool = False) -> Outcome:
    """Grows trees and compares everything stored about them with what the engine knows.

    Args:
        seed: Seed of all trees.
        first: Number of the first tree.
        trees: Number of trees.
        litellm: Interpreter of an environment that has LiteLLM.
        log: Prints a line per batch.
    """
    outcome, began, said = Outcome(), time.monotonic(), 0
    process = LiteLLM(litellm, ROOT / "tests" / "support" / "litellm_process.py") if litellm else None
    try:
        if process:
            await process.start()
        async with served() as (gateway, engine), native_clients() as native:
            clients = Clients(*native, process)
            for start in range(first, first + trees, BATCH):
                numbers = range(start, min(start + BATCH, first + trees))
                await _batch(seed, numbers, gateway, clients, engine, outcome)
                if log:
                    spent = time.monotonic() - began
                    print(f"trees {numbers[0]} to {numbers[-1]}: {outcome.calls} calls, {spent:.0f} s", flush=True)
                    for wrong in outcome.wrong[said:]:
                        print(f"wrong: {wrong[:LONGEST]}", flush=True)
                    said = len(outcome.wrong)
    finally:
        if process:
            process.stop()
    return outcome


async def _batch(
    seed: int, numbers: range, gateway: ModelGateway, clients: Clients, engine: Engine, outcome: Outcome
) -> None:
    """Grows some trees, stores them in a campaign's file, and compares it."""
    made: dict[str, tuple[int, Trajectory, Oracle]] = {}
    for number in numbers:
        name = f"{seed}/{number}"
        engine.begin(name)
        tree = Tree(name, gateway, clients, engine)
        outcome.trees += 1
        try:
            trajectory = await tree.grow(number)
            oracle = Oracle(engine.given, tree.exchanges, tree.policy)
            oracle.check_calls()
            made[trajectory.id] = number, trajectory, oracle
        except Exception as error:
            _note(outcome, seed, number, error)
        outcome.calls += len(tree.exchanges)
        outcome.did += tree.did
    with tempfile.TemporaryDirectory() as folder:
        run = run_dir(Path(folder) / "run")
        commit(run, "a", *((0, 0, trajectory) for _, trajectory, _ in made.values()))
        gather(run)
        outcome.wrong += [str(found) for found in validate(run.trajectories)]
        with open_trajectories(run.path) as store:
            assert len(store) == len(made)
            for name, (number, trajectory, oracle) in made.items():
                try:
                    oracle.check(store[name], trajectory)
                except Exception as error:
                    _note(outcome, seed, number, error)


def _note(outcome: Outcome, seed: int, number: int, error: Exception) -> None:
    where = traceback.extract_tb(error.__traceback__)
    frames = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(where[-4:]))
    outcome.wrong.append(f"--seed {seed} --first {number} --trees 1: {type(error).__name__}: {error} ({frames})")


def main() -> None:
    parser = argparse.ArgumentParser(description="compares random conversation trees in every format")
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--litellm", type=Path, help="interpreter of an environment with LiteLLM")
    asked = parser.parse_args()
    began = time.monotonic()
    outcome = asyncio.run(grow(asked.seed, asked.first, asked.trees, asked.litellm, log=True))
    for what, count in sorted(outcome.did.items()):
        print(f"  {what:28} {count:7}")
    last = asked.first + asked.trees - 1
    spent, wrong = time.monotonic() - began, len(outcome.wrong)
    print(f"seed {asked.seed}, trees {asked.first} to {last}: {outcome.calls} calls in {spent:.0f} s, {wrong} wrong")
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
