"""``python -m tests.security.fuzz [TARGET…]``: a long run, and a table of what it found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.security.fuzz.targets import TARGETS
from tests.security.fuzz.watch import Outcome, fuzzed


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a fault was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.fuzz", description="feeds readers with hostile bytes"
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all targets together; default %(default)g")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-out"), help="corpus and failing inputs; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="where chance begins; default: the time")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    chosen = arguments.targets or list(TARGETS)
    if unknown := sorted(set(chosen) - set(TARGETS)):
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    seconds = int(arguments.minutes * 60 / len(chosen))
    outcomes = []
    for name in chosen:
        print(f"{name}: {seconds} s", file=sys.stderr, flush=True)
        outcome = fuzzed(name, arguments.out / name, seconds=seconds, seed=arguments.seed)
        print(_line(outcome), file=sys.stderr, flush=True)
        outcomes.append(outcome)
    if arguments.json:
        print(json.dumps([{**asdict(outcome), "rate": outcome.rate} for outcome in outcomes], indent=1))
    else:
        print(f"{'target':<14} {'runs':>9} {'per s':>7} {'s':>6}  faults", *map(_line, outcomes), sep="\n")
    return int(any(outcome.faults for outcome in outcomes))


def _line(outcome: Outcome) -> str:
    faults = ", ".join(outcome.faults) or "none"
    return f"{outcome.target:<14} {outcome.runs:>9} {outcome.rate:>7.0f} {outcome.seconds:>6.0f}  {faults}"


if __name__ == "__main__":
    sys.exit(main())
