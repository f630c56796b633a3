"""The command line that the benchmarks share: ``python -m tests.bench.NAME [--peers] [--json]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.errors import MegaflowError
from tests.bench.figures import Figure, report

Run = Callable[[argparse.Namespace, Callable[[str], None]], list[Figure]]


def main(
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Run,
    words: Sequence[str] | None = None,
) -> int:
    """Measures and prints the figures, as a table or as JSON with machine, load and date.

    Args:
        description: the docstring of the benchmark's module.
        add_arguments: adds the benchmark's own options.
        run: measures; its second argument prints progress.
        words: the command line; by default that of this process.

    Returns:
        The exit status: 2 if an argument or the site does not serve.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").replace("``", ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
    parser.add_argument("--peers", action="store_true", help="measure peers too; those not installed are named")
    add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        figures = run(arguments, note)
    except MegaflowError as error:
        note(f"{parser.prog}: {error}")
        return 2
    if arguments.json:
        print_json(report(figures))
    else:
        say(page(figures))
    return 0


def page(figures: Sequence[Figure]) -> str:
    """Returns a table with a line for each figure, and under it one for each of its peers."""
    rows: list[tuple[Any, ...]] = []
    for figure in figures:
        spread = "" if figure.spread is None else f"{figure.spread[0]:.4g} – {figure.spread[1]:.4g}"
        goal = "" if figure.goal is None else f"{'≤' if figure.better == 'lower' else '≥'} {figure.goal:g}"
        verdict = {None: "", True: "met", False: "missed"}[figure.passed]
        rows.append((figure.name, f"{figure.value:.4g}", figure.unit, spread, figure.n, goal, verdict))
        for peer in figure.peers:
            rows.append(
                (f"  {peer.name} {peer.version}", f"{peer.value:.4g}", figure.unit, f"{peer.ratio:.3g} ×", "", "", "")
            )
    return table(("figure", "value", "unit", "10–90 %, or ratio", "n", "goal", ""), rows)
