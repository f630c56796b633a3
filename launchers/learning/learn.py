"""Plans the campaign of the learning curve, follows it while it trains, and draws what became of it.

Called by launchers/learn, which has made what it stands on: in the working directory lie campaign.yaml, the modules
beside this one and the model, such as models/tiny-1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import curve

STEPS = {1: 40, 2: 80, 3: 80}
"""Number of turns → default number of steps of the tiny model."""
TASKS = {1: "ShellTask", 2: "TwoTurns", 3: "ThreeTurns"}
"""Number of turns → class of the tasks in shell_tasks.py."""
CONTEXT = {"tiny": 256, "smollm2": 512}
"""Model → maximum length of a conversation in tokens."""
LARGER: Mapping[str, Any] = {
    "steps": 15,
    "samples": 6,
    "batch": 8,
    "optimizer": {"lr": 2.0e-5, "warmup": 5},
    "dtype": "bfloat16",
    "microbatch": 2048,
    "servers": {"mem": "4G"},
    "trainer": {"mem": "6G"},
}
"""Settings of a model with 135 million parameters that differ from those of the tiny one."""
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of engine and trainer unless set otherwise: so small a model gains nothing by more threads, and sandboxes
need the cores. The last one lets vLLM for CPUs run its model in the process that schedules (``uni`` in campaign.yaml):
a process of its own spins for a second after each step (vllm/distributed/device_communicators/shm_broadcast.py)."""
COMPARED = 5
"""Steps at the beginning and at the end whose mean rewards are told."""


def number(least: int) -> Callable[[str], int]:
    """Reads a whole number that is not too small."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}")
        return int(text)

    return read


def read(words: Sequence[str]) -> argparse.Namespace:
    """Reads the words of launchers/learn; ``--check`` only prints the model and the number of turns."""
    parser = argparse.ArgumentParser(prog="launchers/learn", add_help=False, epilog="see launchers/learn --help")
    parser.add_argument("--seed", type=number(0), default=0)
    parser.add_argument("--turns", type=int, choices=TASKS, default=1)
    parser.add_argument("--model", choices=CONTEXT, default="tiny")
    parser.add_argument("--steps", type=number(1))
    parser.add_argument("--shuffle-rewards", action="store_true")
    parser.add_argument("--staleness", type=number(0), default=0)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.model != "tiny" and asked.turns == 1:
        parser.error(f"--model {asked.model} has no task of one turn; use --turns 2 or --turns 3")
    asked.steps = asked.steps or (STEPS[asked.turns] if asked.model == "tiny" else LARGER["steps"])
    return asked


def base(arguments: argparse.Namespace) -> str:
    """Returns the name of the model directory that training starts from, below ``models``."""
    return f"{arguments.model}-{arguments.turns}"


def fields(arguments: argparse.Namespace, text: str, image: str, site: Mapping[str, str]) -> dict[str, Any]:
    """Returns the campaign file of a run.

    Args:
        text: campaign.yaml.
        image: the tasks' image.
        site: partition by its name on the lab; empty: left to Slurm.
    """
    import yaml

    campaign: dict[str, Any] = yaml.safe_load(text)
    campaign["seed"] = arguments.seed
    campaign["environment"]["images"] = {"megaflow-base": image}
    campaign["tasks"] = [f"shell_tasks:{TASKS[arguments.turns]}"]
    campaign["agent"] |= {"max_turns": arguments.turns, "args": {"turns": arguments.turns}}
    campaign["model"]["path"] = f"models/{base(arguments)}"
    campaign["model"]["args"]["max-model-len"] = CONTEXT[arguments.model]
    training = campaign["training"]
    training |= {"steps": arguments.steps, "staleness": arguments.staleness}
    policy = training["policies"]["default"]
    if arguments.model != "tiny":
        campaign["samples"] = LARGER["samples"]
        campaign["model"]["args"]["dtype"] = LARGER["dtype"]
        training["batch"] = LARGER["batch"]
        policy |= {name: LARGER[name] for name in ("dtype", "microbatch")}
        policy["optimizer"] |= LARGER["optimizer"]
        for job in ("servers", "trainer"):
            campaign["slurm"][job] |= LARGER[job]
    policy["optimizer"]["warmup"] = min(policy["optimizer"]["warmup"], arguments.steps // 2)
    if arguments.shuffle_rewards:
        training["data"] = ["megaflow_hpc.training.recipes:shuffled"]
    for job in campaign["slurm"].values():
        if job["partition"] in site:
            job["partition"] = site[job["partition"]] or None
    return campaign


class Steps:
    """The trainer's steps, printed as they are done."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0
        self.metrics: dict[int, dict[str, float]] = {}
        """By step; a step that was done twice counts as it was done last."""

    def look(self) -> None:
        """Reads and prints what is new."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        new = new[: new.rfind(b"\n") + 1]  # a line may be half written
        self._read += len(new)
        for line in new.splitlines():
            found = json.loads(line)
            self.metrics[int(found["step"])] = found
            print(_told(found), flush=True)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step's rollouts, in the order of steps."""
        return [self.metrics[step]["reward"] for step in sorted(self.metrics)]


def _told(metrics: Mapping[str, float]) -> str:
    names = ("staleness", "entropy", "mismatch", "seconds", "seconds/wait")
    more = "  ".join(f"{name} {metrics[name]:.3g}" for name in names if name in metrics)
    return f"step {metrics['step']:3.0f}  reward {metrics.get('reward', math.nan):.3f}  {more}"


def main() -> int:
    arguments = read(sys.argv[1:])
    if arguments.check:
        print(arguments.model, arguments.turns)
        return 0
    from megaflow_hpc import Campaign
    from megaflow_hpc.errors import MegaflowError

    kinds = {kind: os.environ.get(f"MEGAFLOW_{kind.upper()}_PARTITION", "") for kind in ("cpu", "gpu")}
    site = kinds if os.environ.get("MEGAFLOW_SITE") == "1" else {}
    campaign = fields(arguments, Path("campaign.yaml").read_text(), os.environ["MEGAFLOW_TEST_BASE_SIF"], site)
    # Where tasks and agent are found, by workers and by the processes of agents.
    for name, value in SMALL.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    launcher = "local" if arguments.local else "slurm"
    began = time.monotonic()
    try:
        run = Campaign(**campaign).plan(launcher=launcher)
        print(f"run directory: {run.path}", flush=True)
        steps = Steps(run.path / "training" / "default" / "metrics.jsonl")
        try:
            run.start(launcher)
            run.wait(progress=lambda status: steps.look())
        except BaseException:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is asked for once more is under way
            if run.local is not None:
                run.local.stop()
            else:
                run.cancel()
            raise
    except MegaflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted: everything of it was ended", file=sys.stderr)
        return 130
    return report(run.path, steps.rewards, arguments, time.monotonic() - began)


def report(run: Path, rewards: Sequence[float], arguments: argparse.Namespace, seconds: float) -> int:
    """Draws the curve and prints the result; 1 if steps are missing."""
    if len(rewards) < arguments.steps:
        print(f"error: {len(rewards)} of {arguments.steps} steps were done: see {run}/logs", file=sys.stderr)
        return 1
    shutil.copyfile(f"models/{base(arguments)}/taught.json", run / "taught.json")
    first, last = curve.mean(rewards[:COMPARED]), curve.mean(rewards[-COMPARED:])
    what = f"seed {arguments.seed}, staleness {arguments.staleness}"
    if arguments.shuffle_rewards:
        what += ", rewards shuffled"
    title = (
        f"Mean reward of shell tasks of {arguments.turns} turn{'s' * (arguments.turns > 1)}, {arguments.model} model"
    )
    (run / "curve.svg").write_text(curve.svg({what: rewards}, title))
    result = {
        "seed": arguments.seed,
        "turns": arguments.turns,
        "model": arguments.model,
        "steps": arguments.steps,
        "staleness": arguments.staleness,
        "first": first,
        "last": last,
    }
    result |= {"shuffled": arguments.shuffle_rewards, "seconds": round(seconds, 1), "rewards": rewards}
    (run / "curve.json").write_text(json.dumps(result, indent=1) + "\n")
    print(curve.text(rewards))
    taught = json.loads((run / "taught.json").read_text())
    print(f"before: {taught['success']['mean']:.3f} right after {taught['rows']} answers of sloppy demonstrations")
    print(f"picture: {run}/curve.svg")
    print(
        f"reward: {first:.3f} -> {last:.3f} seed {arguments.seed} steps {arguments.steps} seconds {seconds:.0f} "
        f"results {run}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
