"""What a campaign of very many tasks takes of memory: to plan it, in rank 0 of its pods, and to look at it.

``python -m tests.bench.many_tasks [--tasks 125000]`` plans a campaign of tasks like SWE-bench's, each with 2.5 kB of
text, twenty tests and an image of its own, and measures in a process each

* planning: peak memory with the tasks, and beyond the tasks; seconds to write the run directory; its bytes,
* rank 0: the real one over MPI, with one worker that answers at once, from its start to the end of the campaign,
* ``megaflow-hpc status``.

Processor time counts, and resident memory as Linux has it for the whole life of a process. The images are names alone:
the worker starts no sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megaflow_hpc.host.mpi import mpiexec
from tests.bench.figures import Figure

GOAL_MB = 100.0
"""Of rank 0."""


def peak_mb() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def plan(path: Path, count: int) -> dict[str, float]:
    """Plans the campaign."""
    from megaflow_hpc.campaign.plan import write
    from megaflow_hpc.campaign.planning.draft import Draft
    from megaflow_hpc.config import parse
    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.types import Rollout, Task

    config = parse({"name": "many", "tasks": "many.jsonl", "agent": "nop", "slurm": {"pods": {"count": 8}}})
    tasks = []
    for n in range(count):
        name = f"repo__project-{n:06d}"
        text = f"Issue {n}: " + "it does not do what it says. " * 86
        tests = [f"tests/test_a.py::test_{n}_{k}" for k in range(20)]
        metadata = {"repo": "repo/project", "version": "1", "tests": tests}
        image = f"swebench/sweb.eval.x86_64.{name}:latest"
        tasks.append(Task(name, text, image, f"/data/{name}.jsonl", "swebench", "/testbed", metadata=metadata))
    rollouts = [Rollout(task.id, "default", 0, "nop") for task in tasks]
    images = {task.image: f"/images/{n:06d}/image.sif" for n, task in enumerate(tasks)}
    before, began, cpu = peak_mb(), time.monotonic(), time.process_time()
    draft = Draft(
        config, path.parent, config.policies(), tasks, rollouts=rollouts, image_files=images, source="name: x\n"
    )
    write(draft, RunDir(path))
    cpu = time.process_time() - cpu
    files = [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 1e6
    seconds = time.monotonic() - began
    return {"tasks_mb": before, "peak_mb": peak_mb(), "s": seconds, "cpu_s": cpu, "mb": size, "files": len(files)}


def rank(path: Path) -> None:
    """One rank of the pod; rank 0 leaves its figures in the run directory."""
    from megaflow_hpc.host.atomic import write_json
    from megaflow_hpc.pod.comm import MpiComm, world_hint
    from megaflow_hpc.pod.master.assembly import lead
    from megaflow_hpc.rundir.layout import RunDir
    from tests.bench.dispatch_ranks import follow

    said = path / "report" / "rank0.json"
    if world_hint()[0] > 0:
        follow(256)
        while not said.exists():  # the first rank that leaves without MPI_Finalize takes the others with it
            time.sleep(0.05)
        os._exit(0)
    began, cpu = time.monotonic(), time.process_time()
    comm = MpiComm()
    alone = peak_mb()
    state = lead(RunDir(path), comm)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    told = {"state": state, "before_mb": alone, "peak_mb": peak_mb(), "s": seconds, "cpu_s": cpu}
    comm.flush(5.0)
    write_json(said, told)
    os._exit(0)


def figures(count: int, folder: Path) -> list[Figure]:
    """Plans, runs and looks."""
    run, me = folder / "run", [sys.executable, "-m", "tests.bench.many_tasks"]
    done = subprocess.run([*me, "--plan", str(run), "--tasks", str(count)], stdout=subprocess.PIPE, check=True)
    planned: dict[str, Any] = json.loads(done.stdout)
    seen_mb, seen_s = _child([sys.executable, "-m", "megaflow_hpc", "status", str(run), "--json"])
    subprocess.run([*mpiexec(2), *me, "--rank", str(run)], check=False, timeout=900)
    led: dict[str, Any] = json.loads((run / "report" / "rank0.json").read_text())
    if led["state"] != "done":
        raise RuntimeError(f"the pod ended {led['state']}")
    return [
        Figure(f"planning {count} tasks: memory with the tasks", "MB", round(planned["peak_mb"]), 1),
        Figure("beyond the tasks", "MB", round(planned["peak_mb"] - planned["tasks_mb"]), 1),
        Figure("CPU to write the run directory", "s", round(planned["cpu_s"], 1), 1),
        Figure(f"its {planned['files']} files outside of rooms", "MB", round(planned["mb"]), 1),
        Figure("rank 0, memory", "MB", round(led["peak_mb"]), 1, goal=GOAL_MB, better="lower"),
        Figure("rank 0 before it reads anything", "MB", round(led["before_mb"]), 1),
        Figure(f"rank 0, CPU for {count} empty rollouts", "s", round(led["cpu_s"], 1), 1),
        Figure("status, memory", "MB", round(seen_mb), 1),
        Figure("status, CPU", "s", round(seen_s, 1), 1),
    ]


def _child(command: list[str]) -> tuple[float, float]:
    """Returns peak memory in MB and CPU seconds of a command."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return used.ru_maxrss / 1000, used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=125_000)
    parser.add_argument("--directory", type=Path, help="on the file system to be measured")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.plan:
        print(json.dumps(plan(given.plan, given.tasks)))
        return 0
    if given.rank:
        rank(given.rank)
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", dir=given.directory) as folder:
        for figure in figures(given.tasks, Path(folder)):
            goal = f" (goal {figure.goal:g})" if figure.goal else ""
            print(f"{figure.name}: {figure.value} {figure.unit}{goal}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
