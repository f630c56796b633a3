"""A learning run in which the trainer and then the pod are killed, beside one that nothing interrupts.

    cd FOLDER; python -m tests.bench.killed_learning [--steps 6] [--staleness 2]

FOLDER is what ``launchers/learn`` works in: ``launchers/learning`` with ``models/base``. Real vLLM, real sandboxes,
without Slurm. The trainer gets a SIGKILL after a third of the steps and is started again by itself; the pod gets one
after two thirds, which ends ``run``, and ``resume`` goes on. Then a trainer alone makes all steps anew, of the same
plans, without an interruption. Printed are what was counted, and whether the parameters are the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from megaflow_hpc.campaign.job_environment import trainer_python
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.report import process_here
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit, Trainer, TrainingView
from megaflow_hpc.training.plan import TrainingFiles
from tests.support.training import trained_on

SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Of engine and trainer, as ``launchers/learning/learn.py`` sets them."""


def until(found: Callable[[], object], process: subprocess.Popen[str], what: str) -> None:
    """Waits while a process runs.

    Raises:
        RuntimeError: it ended first.
    """
    while not found():
        if process.poll() is not None:
            raise RuntimeError(f"ended with {process.returncode} before {what}")
        time.sleep(0.2)


def learn(steps: int, staleness: str) -> RunDir:
    """Runs the campaign, and kills trainer and pod on the way; returns it when all steps are done."""
    environment = {**os.environ, **SMALL}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "learn.py", "--local", "--steps", str(steps), "--staleness", staleness]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        said = next(line for line in running.stdout if line.startswith("run directory: "))
        run = RunDir(said.removeprefix("run directory: ").strip())
        files = TrainingFiles(run, "default")
        until(lambda: len(files.numbers(Commit)) >= steps // 3, running, "a third of the steps")
        first = files.read(Trainer, 1)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: len(files.numbers(Commit)) >= 2 * steps // 3, running, "two thirds of the steps")
        (pod,) = [process for lease in Ledger(run).leases().values() if (process := process_here(lease))]
        os.kill(pod.pid, signal.SIGKILL)
        running.stdout.read()
    done = [sys.executable, "-m", "megaflow_hpc", "resume", str(run), "--launcher", "local"]
    subprocess.run(done, env=environment, check=True, stdout=subprocess.DEVNULL)
    return run


def alone(run: RunDir) -> RunDir:
    """Makes every step anew in a copy of the run, by a trainer that nobody interrupts; returns the copy."""
    copy = RunDir(run.path.with_name(f"{run.path.name}-alone"))
    shutil.copytree(run.path, copy.path, symlinks=True)
    files = TrainingFiles(copy, "default")
    for folder in ("commits", "checkpoints", "trainers"):
        shutil.rmtree(files.path / folder)
    path = os.pathsep.join([str(copy.training / ".package"), os.environ.get("PYTHONPATH", "")])
    command = [trainer_python(), "-m", "megaflow_hpc.training.trainer", str(copy.path)]
    subprocess.run(command, env={**os.environ, **SMALL, "PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
    return copy


def tensors(run: RunDir, step: int) -> dict[str, bytes]:
    """Returns what a step's checkpoint holds of the model and the optimizer."""
    (shard,) = (TrainingFiles(run, "default").checkpoints / str(step)).glob("*.safetensors")
    data = shard.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    about = json.loads(data[8:size])
    places = {name: tensor["data_offsets"] for name, tensor in about.items() if name != "__metadata__"}
    return {name: data[size + begin : size + end] for name, (begin, end) in places.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="a learning run with kills, and the same without")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", default="2")
    arguments = parser.parse_args()
    run = learn(arguments.steps, arguments.staleness)
    taken = trained_on(TrainingFiles(run, "default"))
    killed, whole = tensors(run, arguments.steps), tensors(alone(run), arguments.steps)
    pods = len(list(Ledger(run).leases()))
    print(
        f"{arguments.steps} steps, {len(TrainingView(run, 'default').trainers())} starts of the trainer, {pods} of the "
        f"pod; {len(taken)} rollouts trained on, {len(taken) - len(set(taken))} twice; {len(whole)} tensors, "
        f"{sum(killed[name] != whole[name] for name in whole)} differ from those without an interruption; {run}"
    )
    return int(killed != whole or len(taken) != len(set(taken)))


if __name__ == "__main__":
    raise SystemExit(main())
