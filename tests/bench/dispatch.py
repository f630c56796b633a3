"""Measures how fast one pod dispatches and journals rollouts, and how long campaigns take in virtual time.

Without --simulate the pod is real (MPI ranks, ledger, journal with fsync) and its rollouts are empty: the ranks answer
at once. With --simulate a campaign of the given shape runs in virtual time through the real scheduler, so that pods and
slots can be sized before anything is queued. --durations takes a file with one duration in seconds a line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.mpi import mpiexec
from tests.bench import dispatch_peers
from tests.bench.arguments import above_zero, add_count
from tests.bench.command import main
from tests.bench.figures import Figure, median, multiple, quantile

ROUNDS = 5
"""Rounds of a pod and its nearest peer, alternating."""
DECISION_S = 50e-6
"""Time of rank 0 for one decision, including journalling, as measured without ``--simulate``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_count(parser, "--rollouts", 100_000, "rollouts of the pod, or of each simulated campaign")
    add_count(parser, "--ranks", 2, "worker ranks of the real pod")
    parser.add_argument("--simulate", action="store_true", help="run campaigns in virtual time; nothing is started")
    add_count(parser, "--slots", 10_000, "simulated: slots of all pods")
    add_count(parser, "--pods", 64, "simulated: pods")
    add_count(parser, "--seeds", 5, "simulated: campaigns that each median is taken of")
    parser.add_argument("--durations", metavar="FILE", help="simulated: draw from these seconds, one number a line")
    parser.add_argument("--policies", action="store_true", help="simulated: what each policy does to the makespan too")


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Measures a real pod, or a campaign's shape in virtual time with ``--simulate``."""
    if arguments.simulate:
        return simulated(arguments, note)
    nearest = dispatch_peers.futures if arguments.peers else None
    figures = real(arguments.rollouts, arguments.ranks, note, nearest)
    for name, version, per_s in dispatch_peers.measure(arguments.ranks, note) if arguments.peers else ():
        figures[0] = figures[0].beside(name, version, round(per_s, 1))
    return figures


# --- virtual time ---------------------------------------------------------------------------------------------------


def simulated(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Returns makespans, busy slots and memory of campaigns in virtual time."""
    from tests.bench.simulation import pareto

    count = arguments.rollouts
    shapes: dict[str, list[list[float]]] = {}
    if arguments.durations:
        import random

        known = _durations(Path(arguments.durations))
        shapes["the given durations"] = [random.Random(seed).choices(known, k=count) for seed in range(arguments.seeds)]
    else:
        drawn = [pareto(count, 1.5, seed) for seed in range(arguments.seeds)]
        shapes["Pareto 1.5"] = drawn
        shapes["Pareto 1.5 cut at 900 s"] = [[min(900.0, s) for s in durations] for durations in drawn]
    figures = []
    for name, campaigns in shapes.items():
        note(f"{name}: {len(campaigns)} campaigns of {count} rollouts on {arguments.slots} slots")
        jobs = [(durations, arguments.pods, arguments.slots) for durations in campaigns]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(jobs), len(os.sched_getaffinity(0))), mp_context=context) as pool:
            outcomes = list(pool.map(_one, jobs))
        figures.append(simulated_figure(f"makespan over ideal, {name}", "ratio", [o[0] for o in outcomes]))
        figures.append(simulated_figure(f"slots busy, {name}", "%", [o[1] for o in outcomes], 98.0, "higher"))
    megabytes = max(outcome[2] for outcome in outcomes)
    size = f"{arguments.slots} slots, {arguments.pods} pods, {count} rollouts"
    figures.append(simulated_figure(f"peak memory, {size}", "MB", [megabytes], 2000.0))
    return [*figures, _flat(), *_policies(arguments, note)]


def _policies(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    if not arguments.policies:
        return []
    from tests.bench import policies  # imports this module

    return list(policies.figures(arguments.seeds, note))


def _durations(path: Path) -> list[float]:
    """Reads seconds, one number a line. Skips blank lines."""
    durations = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            durations.append(above_zero(line.strip()))
        except argparse.ArgumentTypeError:
            raise ConfigError(
                f"{path}:{number}: {line.strip()[:60]!r}: give seconds above 0, one number a line"
            ) from None
    if not durations:
        raise ConfigError(f"{path}: empty; give seconds above 0, one number a line")
    return durations


def _flat() -> Figure:
    """Compares one to ten thousand tasks on as many slots of one pod, with the measured time of a decision."""
    from tests.bench.simulation import Shape, simulate

    counts = (1, 10, 100, 1000, 10_000)
    spans = [simulate(Shape([60.0] * n, 1, n, dispatch_s=DECISION_S)).makespan_s for n in counts]
    name = "longest over shortest makespan of 1, 10, 100, 1,000 and 10,000 tasks of 60 s on as many slots"
    return simulated_figure(name, "ratio", [max(spans) / min(spans)], 1.05)


def simulated_figure(
    name: str, unit: str, samples: Sequence[float], goal: float | None = None, better: str = "lower"
) -> Figure:
    """Returns the median of ``samples``, marked as simulated."""
    figure = median(f"simulated: {name}", unit, samples, goal, "higher" if better == "higher" else "lower")
    return Figure(**{**figure.__dict__, "simulated": True})


def _one(job: tuple[list[float], int, int]) -> tuple[float, float, float]:
    """Returns makespan over ideal, per cent busy, and peak MB of this process."""
    from tests.bench.simulation import Shape, simulate

    durations, pods, slots = job
    outcome = simulate(Shape(durations, pods, slots))
    return outcome.ratio, 100 * outcome.busy, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


# --- a real pod with empty rollouts ----------------------------------------------------------------------------------


def real(
    count: int, ranks: int, note: Callable[[str], None], peer: Callable[[int], tuple[str, float]] | None = None
) -> list[Figure]:
    """Returns rate, CPU time, journal bytes and round trips of one pod under mpiexec whose workers answer at once.

    Args:
        count: empty rollouts.
        ranks: worker ranks, without rank 0.
        peer: runs a peer with this many workers, and returns its name and its tasks a second. It alternates with the
            pod :data:`ROUNDS` times, so that other load on the machine affects both.

    Raises:
        SiteError: mpiexec is missing, or the pod failed.
    """
    rates, cpus_us, peer_rates = [], [], []
    for number in range(ROUNDS if peer else 1):
        note(f"one pod, rank 0 and {ranks} workers of 256 slots, {count} empty rollouts")
        seconds, size, _, cpu = _pod(count, ranks, slots=256)
        rates.append(round(count / seconds, 1))
        cpus_us.append(round(1e6 * cpu / count, 1))
        if peer:
            peer_name, rate = peer(ranks)
            peer_rates.append(rate)
            note(f"round {number + 1}: {rates[-1]:.0f}/s, {cpus_us[-1]} µs of rank 0 each; {peer_name} {rate:.0f}/s")
    name = f"empty rollouts dispatched and journalled, one pod of {ranks} workers"
    ratios = [multiple(name, peer_name, rates, peer_rates, 1.3, "higher")] if peer_rates else []
    few = max(200, min(5000, count // 10))
    note(f"the same with one slot a worker, {few} empty rollouts")
    _, _, waits_ms, _ = _pod(few, ranks, slots=1)
    trip = "empty rollouts, one slot a worker: result out to next start in, at the worker"
    return [
        median(name, "1/s", rates, goal=20_000, better="higher"),
        *ratios,
        median("processor time of rank 0 per empty rollout", "µs", cpus_us),
        Figure("journal bytes per empty rollout", "bytes", round(size / count, 1), count),
        Figure(f"{trip}, p50", "ms", quantile(waits_ms, 0.5), len(waits_ms)),
        Figure(f"{trip}, p99", "ms", quantile(waits_ms, 0.99), len(waits_ms), goal=5.0),
    ]


def _pod(count: int, ranks: int, slots: int) -> tuple[float, int, list[float], float]:
    """Returns seconds, bytes of the journal, milliseconds from results to next starts, and CPU seconds of rank 0."""
    from tests.bench.dispatch_ranks import plan

    start = mpiexec(ranks + 1)
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        plan(run_dir, count)
        command = [*start, sys.executable, "-m", "tests.bench.dispatch_ranks"]
        words = [*command, str(run_dir), str(slots)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
        reports = [json.loads(file.read_text()) for file in (run_dir / "report").glob("*.json")]
        if len(reports) <= ranks:
            raise SiteError(f"the pod of the benchmark ended with {done.returncode}: {done.stderr[-2000:]}")
    waits = [wait for rank in reports for wait in rank.get("waits_ms", ())]
    (leader,) = (rank for rank in reports if "seconds" in rank)
    return leader["seconds"], leader["journal_bytes"], waits, leader["cpu_s"]


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
