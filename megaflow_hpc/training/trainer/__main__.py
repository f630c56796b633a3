"""Trains one policy of a campaign while its rollouts arrive.

Run it in an environment with torch and transformers, on one GPU, or on several GPUs by torchrun:

    python -m megaflow_hpc.training.trainer RUN
    torchrun --standalone --nproc-per-node 4 -m megaflow_hpc.training.trainer RUN --policy default

RUN is a campaign that was planned with a section `training`. Start pods and engines as usual. The trainer requests
rollouts, takes a step as soon as enough of them are complete, and publishes weights. The engines load new weights
automatically. The trainer writes:

    RUN/training/POLICY/metrics.jsonl    a line for each step
    RUN/training/POLICY/checkpoints/     the next start continues from the last one
    RUN/weights/                         versions of the weights

It may be killed at any time and restarted with the same command: no rollout is lost or used twice. After SIGTERM it
ends the current step, writes a checkpoint and exits with 75. A second trainer of the same policy ends the first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megaflow_hpc.config.sections import Method
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.texts import printable

if TYPE_CHECKING:
    from megaflow_hpc.training.dataflow import Dataflow

EXIT_RESTART = 75
"""Exit status after SIGTERM. It asks for another start of the trainer (EX_TEMPFAIL in sysexits.h)."""
EXIT_AMENDED = 76
"""Exit status of a trainer on several ranks that amended a step. It asks for another start immediately."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megaflow_hpc.training.trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all steps are done; 75 stopped by SIGTERM, start it again; 76 one of several ranks "
        "amended a step, start it again immediately; 1 another trainer has taken over, or the run directory fails; 2 "
        "the campaign or the model is invalid; 69 no pod runs and none is queued",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, as megaflow-hpc plan printed it")
    parser.add_argument("--policy", help="policy to train; optional if only one is trained")
    parser.add_argument("--json", action="store_true", help="print each step's metrics as one line of JSON")
    arguments = parser.parse_args(argv)
    try:
        status = None
        while status is None:  # None: a step was amended
            status = _train(arguments)
        return status
    except MegaflowError as error:
        print(printable(f"trainer: {error}"), file=sys.stderr)
        return error.exit_status


def _train(arguments: argparse.Namespace) -> int | None:
    """Trains the policy. Returns the exit status, or ``None`` if training must restart from the last checkpoint."""
    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.rundir.record import read_run

    campaign = read_run(RunDir(arguments.run)).config
    trainer = campaign.training.trainer if campaign.training else "own"
    return _train_here(arguments, trainer) if isinstance(trainer, str) else _train_by(trainer, arguments)


def _train_by(method: Method, arguments: argparse.Namespace) -> int:
    """Calls the user's training function, ``training.trainer``.

    The function is called as ``function(flow, **args)`` on each rank with the policy's dataflow, and returns when
    ``flow.steps()`` ends. After SIGTERM it may raise ``SystemExit(75)`` to request a restart. If it raises any other
    exception or exits with another status, all ranks end.
    """
    from megaflow_hpc.training.methods import resolve

    def train(*ranks: Any) -> None:
        flow = _dataflow(arguments, *ranks)
        try:
            resolve(method)(flow)
        finally:
            flow.leave()

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # a single rank, which needs no torch
        train()
        return 0
    from megaflow_hpc.training.trainer.model import Meeting

    meeting = Meeting()
    try:
        train(meeting.rank, meeting.count, meeting.broadcast)
    except SystemExit as end:
        if end.code in (None, 0, EXIT_RESTART):  # the other ranks end on their own
            raise
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        meeting.end(end.code if isinstance(end.code, int) else 1)
    except Exception as error:
        meeting.end(_status_of(error))
    return 0


def _dataflow(
    arguments: argparse.Namespace, rank: int = 0, ranks: int = 1, agree: Callable[[Any], Any] = lambda value: value
) -> Dataflow:
    from megaflow_hpc.training.dataflow import Dataflow

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return Dataflow(arguments.run, arguments.policy, rank=rank, ranks=ranks, say=say, agree=agree)


def _train_here(arguments: argparse.Namespace, kind: str) -> int | None:
    # Import torch only after parsing the arguments, because it takes seconds, which would slow down --help.
    from megaflow_hpc.training.trainer.loop import StepAmended, TrainingLoop, TrainingStopped
    from megaflow_hpc.training.trainer.model import Reader, join

    read: Reader | None = None
    if kind == "veomni":
        from megaflow_hpc.training.trainer import veomni

        read = veomni.read
    ranks = join()
    flow = None
    try:
        flow = _dataflow(arguments, ranks.rank, ranks.count, ranks.broadcast)
        trainer = TrainingLoop(flow, ranks, read)
        signal.signal(signal.SIGTERM, trainer.stop)
        for metrics in trainer.steps():
            if ranks.first:
                print(json.dumps(metrics) if arguments.json else _line(metrics, flow.config.steps), flush=True)
    except TrainingStopped:
        pass
    except StepAmended as amended:
        print(f"trainer: {amended}; training continues from the last checkpoint", file=sys.stderr, flush=True)
        if ranks.count == 1:
            return None
        ranks.end(EXIT_AMENDED)
    except Exception as error:
        if ranks.count == 1:
            raise
        if flow is not None:
            flow.leave()
        ranks.end(_status_of(error))
    finally:
        if flow is not None:
            flow.leave()
    if trainer.stopping and ranks.count > 1:
        sys.stdout.flush()
        os._exit(EXIT_RESTART)  # do not synchronise, because ranks may get the signal in different steps
    if trainer.stopping:
        return EXIT_RESTART
    ranks.leave()
    return 0


def _status_of(error: Exception) -> int:
    """Reports an error that ends all ranks. Returns their exit status."""
    if isinstance(error, MegaflowError):
        print(printable(f"trainer: {error}"), file=sys.stderr)
        return error.exit_status
    traceback.print_exception(error)
    return 1


def _line(metrics: dict[str, float], steps: int) -> str:
    shared = ("sleep", "move", "wake") if "seconds/sleep" in metrics else ()
    spent = {name: metrics.get(f"seconds/{name}", 0.0) for name in ("wait", *shared, "checkpoint", "publish")}
    shares = ", ".join(f"{name} {seconds / metrics['seconds']:.0%}" for name, seconds in spent.items())
    return (
        f"step {metrics['step']:.0f}/{steps}: reward {metrics['reward']:.3f}, passed {metrics['pass_rate']:.0%}, "
        f"staleness {metrics['staleness']:.1f}, entropy {metrics.get('entropy', 0.0):.2f}, "
        f"clipped {metrics.get('clipped', 0.0):.1%}, mismatch {metrics.get('mismatch', 0.0):.1e}, "
        f"{metrics['tokens_per_s']:,.0f} tokens/s, {metrics['seconds']:.1f} s ({shares})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
