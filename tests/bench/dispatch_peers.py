"""The peers of dispatch: the same empty tasks through Parsl, mpi4py.futures, executorlib and submitit, with defaults.

None of them journals a result before it counts. mpi4py.futures alternates with the pod under the same MPI. The others
have a virtual environment (:func:`environment`). Each runs as a program that prints its seconds, without its start and
first task. submitit needs Slurm and is timed from the submission of an array to its last result, for which its users
wait.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gateway_peers import environment

PACKAGES = ("parsl", "mpi4py", "mpich", "executorlib", "submitit")
NAME = "dispatch-peers"
LIMIT_S = 300.0

_BEGIN = """
import json, sys, time
from importlib.metadata import version
count, workers = int(sys.argv[-2]), int(sys.argv[-1])
def empty(n=0):
    return n
def say(package, seconds):
    print(json.dumps({"version": version(package), "seconds": seconds}), flush=True)
"""

_PARSL = """
if __name__ == "__main__":
    import parsl
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider
    provider = LocalProvider(init_blocks=1, max_blocks=1)
    executor = HighThroughputExecutor(max_workers_per_node=workers, provider=provider, address="127.0.0.1")
    with parsl.load(Config(executors=[executor])):
        task = parsl.python_app(empty)
        task(0).result()
        began = time.monotonic()
        for future in [task(n) for n in range(count)]:
            future.result()
        say("parsl", time.monotonic() - began)
"""

_MPI4PY = """
if __name__ == "__main__":
    from mpi4py.futures import MPIPoolExecutor
    with MPIPoolExecutor() as pool:
        pool.submit(empty).result()
        began = time.monotonic()
        for future in [pool.submit(empty, n) for n in range(count)]:
            future.result()
        say("mpi4py", time.monotonic() - began)
"""

_EXECUTORLIB = """
if __name__ == "__main__":
    from executorlib import SingleNodeExecutor
    with SingleNodeExecutor(max_workers=workers, block_allocation=True) as pool:
        pool.submit(empty).result()
        began = time.monotonic()
        for future in [pool.submit(empty, n) for n in range(count)]:
            future.result()
        say("executorlib", time.monotonic() - began)
"""

_SUBMITIT = """
if __name__ == "__main__":
    import submitit
    executor = submitit.AutoExecutor(folder="logs")
    executor.update_parameters(timeout_min=5, mem_gb=0.1, cpus_per_task=1)
    began = time.monotonic()
    for job in executor.map_array(empty, range(count)):
        job.result()
    say("submitit", time.monotonic() - began)
"""


@dataclass(frozen=True)
class Kind:
    """A peer, its program, and its number of tasks, which take some seconds."""

    name: str
    program: str
    count: int
    needs: str = ""
    """Command that it needs."""


FUTURES = Kind("mpi4py.futures, no journal", _MPI4PY, 10_000, "mpiexec")
KINDS = (
    Kind("executorlib, no journal", _EXECUTORLIB, 5_000),
    Kind("Parsl HTEX, no journal", _PARSL, 3_000),
    Kind("submitit array, no journal", _SUBMITIT, 40, "sbatch"),
)


def measure(workers: int, note: Callable[[str], None]) -> list[tuple[str, str, float]]:
    """Returns name, version and empty tasks per second of every peer that runs here. ``note`` reports the others.

    Args:
        workers: processes that run tasks, without the one that dispatches them.
    """
    place = environment(note, NAME, PACKAGES)
    if place is None:
        return []
    rates = []
    for kind in KINDS:
        try:
            version, seconds = _run(kind, place, workers)
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            note(f"{kind.name}: left out: {str(error)[-300:]}")
        else:
            rates.append((kind.name, version, kind.count / seconds))
    return rates


def futures(workers: int) -> tuple[str, float]:
    """Runs mpi4py.futures with the mpi4py and MPI of this interpreter; returns its name, and empty tasks a second."""
    version, seconds = _run(FUTURES, Path(sys.prefix), workers)
    return f"mpi4py.futures {version} without a journal", FUTURES.count / seconds


def _run(kind: Kind, place: Path, workers: int) -> tuple[str, float]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if kind.needs and shutil.which(kind.needs, path=path) is None:
        raise OSError(f"there is no {kind.needs}")
    home = Path.home()  # a Slurm job must see it
    with tempfile.TemporaryDirectory(prefix=".megaflow-bench-", dir=home if kind.needs == "sbatch" else None) as folder:
        script = Path(folder) / "peer.py"
        script.write_text(_BEGIN + kind.program)
        command = [str(place / "bin" / "python"), str(script), str(kind.count), str(workers)]
        if kind.needs == "mpiexec":
            command = [str(place / "bin" / "mpiexec"), "-n", str(workers + 1), command[0], "-m", "mpi4py.futures"]
            command += [str(script), str(kind.count), str(workers)]
        environ = {**os.environ, "PATH": path}
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
        if not lines:
            raise OSError(f"ended with {done.returncode}: {done.stderr.strip()[-250:]}")
        printed = json.loads(lines[-1])
        return str(printed["version"]), float(printed["seconds"])
