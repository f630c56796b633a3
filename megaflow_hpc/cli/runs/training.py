"""``training skip`` and ``training set``: amend the steps of a training that are not committed yet."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.values import whole, zero_or_more
from megaflow_hpc.cli.verb import Subparsers, add_group, add_run, add_verb
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import amendments
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run

SETTINGS = {"lr": zero_or_more, "microbatch": whole(1), "steps": whole(1)}
"""Name of each setting that can be changed → function that parses its value."""


def register(subparsers: Subparsers) -> None:
    """Adds ``training`` with skip and set."""
    verbs = add_group(
        subparsers,
        "training",
        "skip a step of a training, or change its learning rate, row size or length",
        examples=["training skip RUN 12", "training set RUN lr=5e-7"],
    )
    skip = add_verb(
        verbs,
        "skip",
        _skip,
        "leave a step, or one of its rollouts, out of the training",
        examples=["training skip RUN 12", "training skip RUN 12 fix-17/default/3 --cause 'wrong reward'"],
        description="The step is committed without being trained on, or without the rollout. Rollouts are never lost: "
        "they stay in the run and are gathered. A step that is committed cannot be skipped. The record "
        "(RUN/training/POLICY/amendments) never changes, so a restarted trainer skips the same.",
    )
    add_run(skip)
    skip.add_argument("step", metavar="STEP", type=whole(1), help="number of the step, as in status")
    skip.add_argument("rollout", metavar="ROLLOUT", nargs="?", help="id of one rollout; default: the whole step")
    change = add_verb(
        verbs,
        "set",
        _set,
        "change settings of all steps that start later",
        examples=["training set RUN lr=5e-7", "training set RUN microbatch=16384 steps=200 --policy student"],
        description="Changes the learning rate (lr, before the schedule), the tokens of one forward pass (microbatch) "
        "or the number of steps. It takes effect with the next step that the trainer starts, without a restart. "
        "Committed steps keep their settings when they are repeated after a crash.",
    )
    add_run(change)
    change.add_argument(
        "settings", metavar="NAME=VALUE", nargs="+", type=_setting, help="lr=…, microbatch=… or steps=…"
    )
    for parser in (skip, change):
        parser.add_argument("--policy", help="policy that is trained, if there are several")
        parser.add_argument("--cause", default="", help="reason, stored with the amendment")


def _setting(text: str) -> tuple[str, float | int]:
    name, _, value = text.partition("=")
    if name not in SETTINGS or not value:
        raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(f'{name}=…' for name in SETTINGS)}")
    return name, SETTINGS[name](value)


def _skip(arguments: argparse.Namespace) -> int:
    run, policy = _training(arguments)
    number, planned = amendments.skip(run, policy, arguments.step, arguments.rollout, arguments.cause)
    what = f"rollout {arguments.rollout} of step {arguments.step}" if arguments.rollout else f"step {arguments.step}"
    if arguments.json:
        print_json({"amendment": number, "policy": policy, "step": arguments.step, "rollout": arguments.rollout})
    else:
        say(number)
        note(f"policy {policy}: {what} will be left out")
    if planned:
        note(
            "the step is planned: if the trainer is training it now, that attempt is not interrupted and may commit it"
        )
    return 0


def _set(arguments: argparse.Namespace) -> int:
    run, policy = _training(arguments)
    changes = dict(arguments.settings)
    number = amendments.change(run, policy, changes, arguments.cause)
    if arguments.json:
        print_json({"amendment": number, "policy": policy, **changes})
    else:
        say(number)
        changed = ", ".join(f"{name} {value:g}" for name, value in changes.items())
        note(f"policy {policy}: {changed} from the next step on")
    return 0


def _training(arguments: argparse.Namespace) -> tuple[RunDir, str]:
    """Returns the run and the policy to amend.

    Raises:
        ConfigError: the run is finished or trains no such policy.
    """
    run = RunDir(arguments.run_dir)
    record = read_run(run)
    training = record.config.training if record.campaign else None
    trained = list(training.policies) if training else []
    policy = arguments.policy or (trained[0] if len(trained) == 1 else None)
    if policy not in trained:
        reason = f"policy {policy!r} is not trained" if policy or not trained else "several policies are trained"
        raise ConfigError(f"{run}: {reason}; give --policy: {', '.join(trained) or 'the campaign trains none'}")
    if Marks(run).finished:
        raise ConfigError(f"{run}: is finished, so no trainer will start; train its weights in a new campaign")
    assert policy is not None
    return run, policy
