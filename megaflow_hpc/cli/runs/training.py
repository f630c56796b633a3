"""``training fit`` predicts the memory use of training. ``training skip`` and ``training set`` change steps not yet
committed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_result, table
from megaflow_hpc.cli.verb import Subparsers, above_zero, add_group, add_run, add_verb, whole, zero_or_more
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import amendments
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run

if TYPE_CHECKING:
    from megaflow_hpc.campaign.planning.gpus import Fit

SETTINGS = {"lr": zero_or_more, "microbatch": whole(1), "steps": whole(1)}
"""Maps each setting to the parser of its value."""


def register(subparsers: Subparsers) -> None:
    """Registers ``training`` with ``fit``, ``skip`` and ``set``."""
    verbs = add_group(
        subparsers,
        "training",
        "predict the memory that training needs, leave a step out, or change settings",
        examples=["training fit campaign.yaml", "training skip RUN 12", "training set RUN lr=5e-7"],
    )
    fit = add_verb(
        verbs,
        "fit",
        _fit,
        "predict the memory and time that training needs",
        examples=["training fit campaign.yaml", "training fit campaign.yaml --gpus 8 --gpu-memory 80 --json"],
        description="Predicts the peak memory of each GPU by its parts, the memory of a node, and the sizes of "
        "checkpoints and weight versions, and names changes that make the training fit. Reads only the headers of the "
        "model's files. Add some GB for the CUDA context, NCCL and fragmentation, and more if experts get unequal "
        "numbers of tokens. The time of a million tokens assumes a quarter of the peak of slurm.trainer.gpu_type.",
    )
    fit.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML) with a section training")
    fit.add_argument("--gpus", type=whole(1), metavar="N", help="GPUs on each node; default: slurm.trainer.gpus")
    fit.add_argument("--nodes", type=whole(1), metavar="N", help="nodes; default: slurm.trainer.nodes")
    fit.add_argument(
        "--gpu-memory",
        type=above_zero,
        metavar="GB",
        help="memory of a GPU; default: that of slurm.trainer.gpu_type, if known",
    )
    skip = add_verb(
        verbs,
        "skip",
        _skip,
        "leave a step, or one of its rollouts, out of the training",
        examples=["training skip RUN 12", "training skip RUN 12 fix-17/default/3 --cause 'wrong reward'"],
        description="Commits the step without training on it, or trains it without one rollout. Rollouts stay in the "
        "run and are gathered. A committed step cannot be skipped. A restarted trainer skips the same "
        "(RUN/training/POLICY/amendments).",
    )
    add_run(skip)
    skip.add_argument("step", metavar="STEP", type=whole(1), help="number of the step, as in status")
    skip.add_argument("rollout", metavar="ROLLOUT", nargs="?", help="id of one rollout; default: the whole step")
    change = add_verb(
        verbs,
        "set",
        _set,
        "change settings of the steps that start from now on",
        examples=["training set RUN lr=5e-7", "training set RUN microbatch=16384 steps=200 --policy student"],
        description="Changes the learning rate (lr, before the schedule), the tokens of one forward pass (microbatch) "
        "or the number of steps. The next step that the trainer starts uses the new values, without a restart. "
        "Committed steps keep their settings when they are repeated after a crash.",
    )
    add_run(change)
    change.add_argument(
        "settings", metavar="NAME=VALUE", nargs="+", type=_setting, help="lr=…, microbatch=… or steps=…"
    )
    for parser in (skip, change):
        parser.add_argument("--policy", help="trained policy, if there are several")
        parser.add_argument("--cause", default="", help="reason, stored with the amendment")


def _setting(text: str) -> tuple[str, float | int]:
    name, _, value = text.partition("=")
    if name not in SETTINGS or not value:
        raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(f'{name}=…' for name in SETTINGS)}")
    return name, SETTINGS[name](value)


def _fit(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.campaign.planning.gpus import fit_of, model_of

    campaign = Campaign.from_yaml(arguments.campaign)
    config = campaign.config
    if config.training is None:
        raise ConfigError(f"{arguments.campaign}: has no section training; add one, or name another file")
    fits = []
    for name in config.training.policies:
        fit = fit_of(config, name, model_of(config, name, campaign.base), arguments.gpus, arguments.nodes)
        fits.append(replace(fit, gpu_gb=arguments.gpu_memory) if arguments.gpu_memory else fit)
    print_result(arguments.json, [_fit_facts(fit) for fit in fits], "\n\n".join(map(_fit_page, fits)))
    return 0


def _fit_facts(fit: Fit) -> dict[str, Any]:
    prediction = fit.predict()
    return {
        "policy": fit.policy,
        "model": fit.model.name,
        "parameters": fit.model.total,
        "vision_parameters": fit.model.vision,
        "trained": prediction.trained,
        "nodes": fit.nodes,
        "gpus": fit.gpus,
        "microbatch": fit.settings.microbatch,
        "gpu_bytes": prediction.peak,
        "moment": prediction.moment,
        "moments": prediction.moments,
        "node_bytes": {"load": prediction.load, "training": prediction.node},
        "checkpoint_bytes": prediction.checkpoint,
        "version_bytes": prediction.version,
        "seconds_per_million_tokens": prediction.seconds,
        "fits": fit.fits,
        "remedies": fit.remedies() if fit.fits is False else [],
    }


def _fit_page(fit: Fit) -> str:
    prediction = fit.predict()
    moments = prediction.moments.values()
    parts = dict.fromkeys(part for moment in moments for part in moment if moment[part])
    rows = [(part, *(f"{moment.get(part, 0) / 1e9:.1f}" for moment in moments)) for part in parts]
    rows.append(("together", *(f"{sum(moment.values()) / 1e9:.1f}" for moment in moments)))
    where = f"{fit.nodes} × {fit.gpus} GPUs" if fit.gpus else "a CPU"
    lines = [
        f"{fit.policy}: {fit.model.name}, {fit.model.total / 1e9:.2f} billion parameters, rows of "
        f"{fit.settings.microbatch} tokens, {where}\n",
        table(("GB of a GPU" if fit.gpus else "GB", *prediction.moments), rows),
        "",
        f"node while loading: {prediction.load / 1e9:.1f} GB; while training: {prediction.node / 1e9:.1f} GB",
        f"checkpoint: {prediction.checkpoint / 1e9:.1f} GB; version: {prediction.version / 1e9:.1f} GB",
    ]
    if prediction.seconds:
        lines.append(f"a million tokens, forward and backward: about {prediction.seconds:.2g} s")
    if fit.model.vision:
        lines.append(
            f"vision part: {fit.model.vision / 1e9:.2f} billion parameters, {fit.settings.vision}; its activations, "
            "which depend on the images of a row, are not counted"
        )
    peak = f"peak of a GPU: {prediction.peak / 1e9:.1f} GB ({prediction.moment})"
    if fit.fits is None:
        verdict = "; its memory is unknown (--gpu-memory)"
    elif fit.fits:
        verdict = f": fits {fit.gpu_gb:g} GB"
    else:
        enough = "; ".join(fit.remedies()) or "more GPUs, or larger ones"
        verdict = f": does not fit {fit.gpu_gb:g} GB; any one of these is enough: {enough}"
    return "\n".join([*lines, peak + verdict])


def _skip(arguments: argparse.Namespace) -> int:
    run, policy = _training(arguments)
    number, planned = amendments.skip(run, policy, arguments.step, arguments.rollout, arguments.cause)
    what = f"rollout {arguments.rollout} of step {arguments.step}" if arguments.rollout else f"step {arguments.step}"
    amendment = {"amendment": number, "policy": policy, "step": arguments.step, "rollout": arguments.rollout}
    print_result(arguments.json, amendment, number, f"policy {policy}: {what} will be left out")
    if planned:
        note(
            "the step is planned: if the trainer is training it now, that attempt is not interrupted and may commit it"
        )
    return 0


def _set(arguments: argparse.Namespace) -> int:
    run, policy = _training(arguments)
    changes = dict(arguments.settings)
    number = amendments.change(run, policy, changes, arguments.cause)
    changed = ", ".join(f"{name} {value:g}" for name, value in changes.items())
    hint = f"policy {policy}: {changed} from the next step on"
    print_result(arguments.json, {"amendment": number, "policy": policy, **changes}, number, hint)
    return 0


def _training(arguments: argparse.Namespace) -> tuple[RunDir, str]:
    """Returns the run, and the policy whose training the command changes.

    Raises:
        ConfigError: The run is finished, or does not train this policy.
    """
    run = RunDir(arguments.run_dir)
    record = read_run(run)
    training = record.config.training if record.campaign else None
    trained = list(training.policies) if training else []
    policy = arguments.policy or (trained[0] if len(trained) == 1 else None)
    if policy not in trained:
        if not trained:
            raise ConfigError(f"{run}: its campaign trains nothing; name a run of a campaign with a section training")
        reason = f"policy {policy!r} is not trained" if policy else "several policies are trained"
        raise ConfigError(f"{run}: {reason}; give --policy: {', '.join(trained)}")
    if Marks(run).finished:
        raise ConfigError(f"{run}: is finished, so no trainer will start; train its weights in a new campaign")
    assert policy is not None
    return run, policy
