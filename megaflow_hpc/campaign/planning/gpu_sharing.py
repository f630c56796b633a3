"""Checks requests for GPUs: GPU types, and GPUs shared by trainer and engine (``slurm.trainer.share: sleep``)."""

from __future__ import annotations

from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import Mistakes
from megaflow_hpc.slurm.script import option_name

SLEEPING = ("vllm", "scripted")
"""Engines that support sleeping."""


def sleeping(config: CampaignConfig) -> dict[str, int]:
    """Returns the sleep level of each policy whose engine sleeps while its trainer runs a step.

    At level 1, an engine keeps its weights in the node's memory. At level 2, vLLM drops them, because it will load
    the trainer's next version anyway. Level 1 is used for LoRA adapters, whose base model is not published, and for
    engines that cannot reload weights.
    """
    if config.training is None or config.slurm.trainer.share != "sleep":
        return {}
    levels = {}
    policies = config.policies()
    for name, learner in config.training.policies.items():
        model = policies[name].model if name in policies else None
        reloads = model is not None and model.engine == "vllm" and learner.lora is None
        levels[name] = 2 if reloads else 1
    return levels


def check_sharing(config: CampaignConfig, where: Where) -> None:
    """Checks that trainer and engine can take turns on shared GPUs.

    Raises:
        Mistakes: A key prevents it. Each message names key, value and remedy.
    """
    if not sleeping(config):
        return
    training, trainer, conflicts = config.training, config.slurm.trainer, list[str]()
    assert training

    def conflict(key: str, value: object, remedy: str) -> None:
        conflicts.append(f"{where(key)}: {key}: {value}: slurm.trainer.share: sleep: {remedy}")

    if training.staleness != 0:
        conflict("training.staleness", training.staleness, "nothing is sampled during a step: write 0")
    if len(training.policies) > 1:
        conflict("training.policies", ", ".join(training.policies), "one trainer takes turns: train one policy")
    if trainer.nodes > 1:
        conflict("slurm.trainer.nodes", trainer.nodes, "both are on one node: leave it out")
    if config.slurm.together:
        conflict("slurm.together", True, "the engine is in the trainer's job: leave it out")
    for name in training.policies:
        policy = config.policies().get(name)
        if policy is None or policy.model is None:
            continue  # reported elsewhere
        key, kinds = f"models.{name}" if config.models else "model", policy.model.kinds()
        engines = {kind.engine for kind in kinds}
        if engines - {*SLEEPING}:
            conflict(f"{key}.engine", ", ".join(sorted(engines)), "only vLLM can be sent to sleep: write vllm")
        if (servers := sum(kind.servers.max for kind in kinds)) != 1:
            conflict(f"{key}.servers", servers, "one server sleeps in the trainer's job: write 1")
        if any(kind.nodes > 1 for kind in kinds):
            conflict(f"{key}.nodes", max(kind.nodes for kind in kinds), "both are on one node: leave it out")
        if any(kind.gpu_type != trainer.gpu_type for kind in kinds):
            types = ", ".join(str(kind.gpu_type) for kind in kinds)
            remedy = f"slurm.trainer.gpu_type is {trainer.gpu_type}: write the same in both"
            conflict(f"{key}.gpu_type", types, remedy)
        if any(kind.gpus != trainer.gpus for kind in kinds):
            gpus = ", ".join(str(kind.gpus) for kind in kinds)
            conflict(f"{key}.gpus", gpus, f"slurm.trainer.gpus is {trainer.gpus}: write the same in both")
    if conflicts:
        raise Mistakes(conflicts)


GPU_OPTIONS = ("gres", "gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
"""sbatch options that request GPUs. In ``extra``, they override ``gpus`` and ``gpu_type``."""


def check_gpu_types(config: CampaignConfig, where: Where) -> None:
    """Checks that no sbatch option in an ``extra`` section overrides a ``gpu_type``.

    Raises:
        Mistakes: An option would override the requested type.
    """
    slurm, conflicts = config.slurm, list[str]()
    typed = [
        (f"models.{name}" if config.models else "model", kind.gpu_type, "servers", slurm.servers.extra)
        for name, policy in config.policies().items()
        for kind in (policy.model.kinds() if policy.model and not policy.model.pool else ())
    ]
    if config.training:
        typed.append(("slurm.trainer", slurm.trainer.gpu_type, "trainer", slurm.trainer.extra))
    for key, gpu_type, role, extra in typed:
        if not gpu_type:
            continue
        for section, options in (("slurm.extra", slurm.extra), (f"slurm.{role}.extra", extra)):
            for name, value in options.items():
                if option_name(name) in GPU_OPTIONS:
                    conflicts.append(
                        f"{where(section)}: {section}: {name}: {value}: replaces {key}.gpu_type: {gpu_type}; write "
                        "gpus and gpu_type, or this option alone"
                    )
    if conflicts:
        raise Mistakes(conflicts)
