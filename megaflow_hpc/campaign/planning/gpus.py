"""Checks GPU requests before any job is queued.

Trained policies must fit into the trainer's GPU memory. Trainer and engine must be able to share GPUs if the campaign
asks for it (``slurm.trainer.share: sleep``). GPU types must be consistent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.training.layout import Layout
from megaflow_hpc.training.memory import ModelShape, Prediction, gpu_memory, predict

SUSPICIOUS_GB = 80
"""A predicted peak above this many GB causes a warning if the GPU's memory is unknown."""
MAX_REMEDIES = 4
MIN_ROW = 1024
"""Minimum ``microbatch`` to suggest, in tokens."""


@dataclass(frozen=True)
class Fit:
    """A trained policy and the GPUs that it trains on."""

    policy: str
    model: ModelShape
    settings: PolicyTraining
    nodes: int
    gpus: int
    """Number of GPUs per node. 0 means a single process on CPUs."""
    gpu_gb: float | None
    """Memory per GPU in GB (10^9 bytes). ``None`` if unknown."""
    gpu_type: str | None = None

    def predict(self, tokens: int | None = None) -> Prediction:
        """Predicts the memory use, for rows of ``tokens`` tokens. Default: ``microbatch``.

        Raises:
            ConfigError: ``parallel`` does not divide the ranks or the model's heads.
        """
        return predict(self.model, self.settings, self.gpus, self.nodes, tokens, self.gpu_type)

    @property
    def fits(self) -> bool | None:
        """True if the policy fits into memory. ``None`` if the memory per GPU is unknown."""
        return None if self.gpu_gb is None else self.predict().peak <= self.gpu_gb * 1e9

    def remedies(self) -> list[str]:
        """Returns changes to the campaign file, each of which would make the policy fit."""
        fitting = []
        for family in self._changes():
            for words, changes in family:
                try:
                    if self._with(changes).fits:
                        fitting.append(words)
                        break
                except ConfigError:
                    continue  # impossible with this model or these ranks
        return fitting[:MAX_REMEDIES]

    def _changes(self) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Yields lists of possible changes, each as (text, changed settings). The smallest change of a list comes
        first."""
        settings, powers = self.settings, [2**n for n in range(1, 8)]
        expert = {"expert": min(self.gpus, self.model.experts)} if self.model.experts and self.gpus > 1 else {}
        wider = [{"context": n} for n in powers if settings.parallel.context < n <= self.nodes * self.gpus]
        offload = {"optimizer": {"offload": True}}
        yield [("recompute: true", {"recompute": True})]
        if expert:
            yield [(f"parallel.{_words(expert)}", {"parallel": expert})]
        yield [(f"parallel.{_words(change)}", {"parallel": change}) for change in wider]
        yield [("optimizer.offload: true", offload)]
        both = [change | expert for change in wider]
        yield [
            (f"parallel: {{{_words(change)}}} and optimizer.offload: true", {"parallel": change} | offload)
            for change in both
        ]
        yield [(f"slurm.trainer.nodes: {n}", {"nodes": n}) for n in powers if n > self.nodes]
        parts = [settings.microbatch // n for n in powers]
        yield [(f"microbatch: {n}", {"microbatch": n}) for n in parts if n >= MIN_ROW]
        if not settings.lora:
            yield [("lora: 32", {"lora": 32})]

    def _with(self, changes: Mapping[str, Any]) -> Fit:
        """Returns a copy with changed settings. Merges sections."""
        settings = self.settings.model_dump()
        changes = dict(changes)
        nodes = changes.pop("nodes", self.nodes)
        for key, value in changes.items():
            settings[key] = settings[key] | value if isinstance(settings[key], dict) else value
        try:
            return replace(self, settings=PolicyTraining.model_validate(settings), nodes=nodes)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def fit_of(config: CampaignConfig, name: str, model: Path, gpus: int | None = None, nodes: int | None = None) -> Fit:
    """Builds the :class:`Fit` of a trained policy.

    Args:
        model: Directory of the model from which training starts.
        gpus: Number of GPUs on each node. Default: ``slurm.trainer.gpus``.
        nodes: Number of nodes. Default: ``slurm.trainer.nodes``.

    Raises:
        ConfigError: The model's sizes cannot be read, or another trainer is configured.
    """
    assert config.training
    trainer = config.slurm.trainer
    if config.training.trainer != "own":
        raise ConfigError(
            f"training.trainer: {config.training.trainer}: memory is predicted for this package's own trainer only; "
            "write own"
        )
    settings, memory = config.training.policies[name], gpu_memory(trainer.gpu_type)
    shape = ModelShape.read(model)
    gpus = trainer.gpus if gpus is None else gpus
    return Fit(name, shape, settings, nodes or trainer.nodes, gpus, memory, trainer.gpu_type)


def model_of(config: CampaignConfig, name: str, base: Path) -> Path:
    """Returns the directory of the model from which a policy's training starts.

    Raises:
        ConfigError: The campaign does not name such a directory.
    """
    assert config.training
    policy = config.policies().get(name)
    path = config.training.policies[name].base or (policy.model.path if policy and policy.model else None)
    if not path:
        raise ConfigError(f"policy {name!r} has no model path; set training.policies.{name}.base")
    return (base / os.path.expanduser(os.path.expandvars(path))).absolute()


def check_memory(config: CampaignConfig, base: Path, where: Where) -> list[str]:
    """Checks the parallel layout and memory use of trained policies. Returns warnings.

    Skips models that are not available on this machine or whose config lacks sizes.

    Args:
        base: Directory of the campaign file.

    Raises:
        Mistakes: A layout is impossible, or a policy does not fit. Each message suggests changes that would fit.
    """
    mistakes, warnings, training = list[str](), list[str](), config.training
    if training is None or isinstance(training.trainer, Method):
        return warnings  # the user's own function trains
    trainer = config.slurm.trainer
    for name, settings in training.policies.items():
        key = f"training.policies.{name}"
        fit = prediction = None
        try:
            Layout(trainer.nodes * max(trainer.gpus, 1), **settings.parallel.model_dump())
            with contextlib.suppress(ConfigError):  # whether the model can be loaded is checked elsewhere
                fit = fit_of(config, name, model_of(config, name, base))
            prediction = fit.predict() if fit else None
        except ConfigError as error:
            mistakes.append(f"{where(f'{key}.parallel')}: {key}.{error}")
            continue
        if fit and prediction and not fit.fits and trainer.gpus:
            needs = f"{where(f'{key}.microbatch')}: {key}: {_needs(fit, prediction, settings.microbatch)}"
            if fit.gpu_gb is not None:
                mistakes.append(f"{needs}; {_enough(fit)}")
            elif prediction.peak > SUSPICIOUS_GB * 1e9:
                warnings.append(f"{needs}; megaflow-hpc training fit shows its parts and remedies")
        memory_mb = config.slurm.memory_mb(trainer)
        if prediction and memory_mb and (most := max(prediction.load, prediction.node) >> 20) > memory_mb:
            warnings.append(
                f"{where('slurm.trainer.mem')}: slurm.trainer.mem: {memory_mb / 1024:.4g}G: policy {name!r} needs "
                f"about {most / 1024:.0f}G of a node, with the copy of a checkpoint that is being written; raise it"
            )
        warnings += _long_rows(config, name, fit, where)
    if mistakes:
        raise Mistakes(mistakes)
    return list(dict.fromkeys(warnings))


def _long_rows(config: CampaignConfig, name: str, fit: Fit | None, where: Where) -> Iterator[str]:
    """Warns if a server's longest sequence may need more memory for training than ``microbatch`` allows."""
    training, policy = config.training, config.policies().get(name)
    model = policy.model if policy else None
    assert training
    settings = training.policies[name]
    for kind in model.kinds() if model else ():
        given = {str(key).replace("_", "-"): value for key, value in kind.args.items()}
        longest = given.get("max-model-len", given.get("context-length"))  # vLLM's name, then SGLang's
        if longest is None and kind.engine in ("vllm", "sglang") and fit:
            longest = fit.model.limit  # both engines default to the model's maximum length
        if training.over_length and isinstance(longest, int):
            longest = min(longest, training.over_length.longest)
        if not isinstance(longest, int) or longest <= settings.microbatch:
            continue
        memory = "it needs more memory than a GPU has"
        if fit and fit.gpu_gb is not None:
            prediction = fit.predict(longest)
            if prediction.peak <= fit.gpu_gb * 1e9:
                continue
            memory = f"it does not fit: {_needs(fit, prediction, longest)}"
        yield (
            f"{where(f'training.policies.{name}.microbatch')}: {settings.microbatch} tokens, but the servers allow "
            f"sequences of {longest}: a longer sequence is trained in a row of its own, and skipped if {memory}; "
            "write max-model-len or training.data: over_length"
        )


def _needs(fit: Fit, prediction: Prediction, tokens: int) -> str:
    has = "unknown memory" if fit.gpu_gb is None else f"{fit.gpu_gb:g} GB"
    return f"a row of {tokens} tokens needs {prediction.peak / 1e9:.0f} GB of each GPU, which has {has}"


def _enough(fit: Fit) -> str:
    remedies = fit.remedies()
    return f"any one of these is enough: {'; '.join(remedies)}" if remedies else "use more GPUs, or larger ones"


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {size}" for name, size in sizes.items())


# --- shared GPUs and types --------------------------------------------------------------------------------------------

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


GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
"""sbatch options that request GPUs. In ``slurm``, they override ``gpus`` and ``gpu_type``."""


def check_gpu_types(config: CampaignConfig, where: Where) -> None:
    """Checks that no sbatch option overrides a ``gpu_type``.

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
        for section, options in (("slurm", slurm.extra), (f"slurm.{role}", extra)):
            for name, value in options.items():
                if name in GPU_OPTIONS:
                    option = f"{section}.{name}"
                    conflicts.append(
                        f"{where(option)}: {option}: {value}: replaces {key}.gpu_type: {gpu_type}; write gpus and "
                        "gpu_type, or this option alone"
                    )
    if conflicts:
        raise Mistakes(conflicts)
