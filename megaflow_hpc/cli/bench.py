"""Measures sandboxes, commands, images, dispatch, gateway, store and whole campaigns on this machine."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.verb import Subparsers, add_group, add_verb

if TYPE_CHECKING:
    from megaflow_hpc.bench.figures import Figure


def register(subparsers: Subparsers) -> None:
    """Adds ``bench`` with a verb for each benchmark."""
    from megaflow_hpc.bench import BENCHMARKS

    verbs = add_group(
        subparsers,
        "bench",
        "measure this site, beside peers where asked to",
        examples=["bench sandbox --image base.sif", "bench dispatch --simulate --json"],
        description=__doc__ or "",
    )
    for name in BENCHMARKS:
        module = importlib.import_module(f"megaflow_hpc.bench.{name}")
        description = (module.__doc__ or "").replace("``", "")
        verb = add_verb(verbs, name, _bench, module.HELP, examples=module.EXAMPLES, description=description)
        verb.add_argument(
            "--peers", action="store_true", help="measure peers too, from a checkout; those not installed are named"
        )
        module.add_arguments(verb)
        verb.set_defaults(benchmark=name)


def _bench(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.bench.figures import report

    module = importlib.import_module(f"megaflow_hpc.bench.{arguments.benchmark}")
    figures = module.run(arguments, note)
    if arguments.json:
        print_json(report(figures))
    else:
        say(page(figures))
    return 0


def page(figures: Sequence[Figure]) -> str:
    """A table with a line for each figure, and under it one for each of its peers."""
    rows: list[tuple[Any, ...]] = []
    for figure in figures:
        spread = "" if figure.spread is None else f"{figure.spread[0]:.4g} – {figure.spread[1]:.4g}"
        goal = "" if figure.goal is None else f"{'≤' if figure.better == 'lower' else '≥'} {figure.goal:g}"
        verdict = {None: "", True: "met", False: "missed"}[figure.passed]
        rows.append((figure.name, f"{figure.value:.4g}", figure.unit, spread, figure.n, goal, verdict))
        rows += [
            (f"  {peer.name} {peer.version}", f"{peer.value:.4g}", figure.unit, f"{peer.ratio:.3g} ×", "", "", "")
            for peer in figure.peers
        ]
    return table(("figure", "value", "unit", "10–90 %, or ratio", "n", "goal", ""), rows)
