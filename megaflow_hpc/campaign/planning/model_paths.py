"""Makes the model paths of a campaign file absolute, and checks that the models can be loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.config import CampaignConfig, ModelConfig, Policy
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.private import open_to_others
from megaflow_hpc.model.engines.offline import weights_of, why_no_engine, why_not_loaded
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.safetensors import read_directory
from megaflow_hpc.rundir.weight_source import why_not_served

Where = Callable[[str], str]
"""Function that maps a dotted key to ``file:line``, for error messages."""
ELSEWHERE = "; if only the nodes of the jobs have it, write slurm.check: false"


def absolute(policy: Policy, base: Path, where: Where, name: str, named: bool) -> Policy:
    """Resolves the paths of a policy's model against the campaign file's directory. Keeps names that are not paths.

    Args:
        base: Directory of the campaign file.
        named: True if the model is listed in ``models`` under its policy's name.

    Raises:
        ConfigError: A file does not exist. The message names file, line and key.
    """
    model = policy.model
    if model is None:
        return policy
    changes: dict[str, Any] = {}
    if model.pool:
        pool = (base / os.path.expanduser(os.path.expandvars(model.pool))).absolute()
        try:
            EnginePool(pool).policy(name)
        except ConfigError as error:
            raise ConfigError(f"{where(f'models.{name}.pool' if named else 'model.pool')}: {error}") from None
        changes["pool"] = str(pool)
    for field in ("path", "script", "api_key_file", "python", "image"):
        value = getattr(model, field)
        names_model = field == "path" and model.engine == "external"
        if value is not None and not names_model:
            may_be_name = field == "python" or (field == "path" and _looks_like_name(value))
            key = f"models.{name}.{field}" if named else f"model.{field}"
            changes[field] = _existing(value, base, where, key, may_be_name)
            if field == "api_key_file" and (others := open_to_others(Path(changes[field]))):
                raise ConfigError(f"{where(key)}: {key}: {value}: {others}")
    changes["binds"] = [os.path.expanduser(os.path.expandvars(bind)) for bind in model.binds]
    resolved = ModelConfig.model_validate({**model.model_dump(), **changes})
    return policy.model_copy(update={"model": resolved})


def check_models(policies: Mapping[str, Policy], config: CampaignConfig, where: Where) -> list[str]:
    """Returns a message for each reason why engines or trainers cannot load their model on a node.

    A missing engine is acceptable if ``slurm.setup`` or ``slurm.servers.setup`` may install it.

    Args:
        policies: Policies with absolute paths. Paths in ``config.training`` must be absolute too.
    """
    reasons: dict[str, str] = {}
    for name, policy in policies.items():
        section = f"models.{name}" if config.models else "model"
        for kind in policy.model.kinds() if policy.model and not policy.model.pool else ():
            fields = kind.model_dump()
            if why := _why_not_loaded(fields):
                reasons.setdefault(why, f"{where(f'{section}.path')}: {section}.path: {why}{ELSEWHERE}")
            if not (config.slurm.setup or config.slurm.servers.setup) and (why := why_no_engine(fields)):
                reasons.setdefault(why, f"{where(f'{section}.engine')}: {section}: {why}{ELSEWHERE}")
    for name, trained in config.training.policies.items() if config.training else ():
        why = _why_not_loaded({"engine": "transformers", "path": trained.base})
        model = policies[name].model if name in policies else None
        if not why and trained.base and model and model.path:
            why = why_not_served(Path(trained.base), Path(model.path))
        if why:
            key = f"training.policies.{name}.base"
            reasons.setdefault(why, f"{where(key)}: {key}: {why}{ELSEWHERE}")
    return list(reasons.values())


def _why_not_loaded(model: Mapping[str, Any]) -> str:
    """Explains why an engine cannot load its model, or returns an empty string. Reads only headers of weight files,
    a few kilobytes each."""
    if why := why_not_loaded(model):
        return why
    try:
        if weights := weights_of(model):
            read_directory(weights)
    except ConfigError as error:
        return str(error)
    return ""


def absolute_training(training: TrainingConfig, base: Path, where: Where) -> TrainingConfig:
    """Resolves the paths of the models from which training starts."""
    policies = {
        name: policy.model_copy(
            update={
                "base": policy.base
                and _existing(policy.base, base, where, f"training.policies.{name}.base", _looks_like_name(policy.base))
            }
        )
        for name, policy in training.policies.items()
    }
    return training.model_copy(update={"policies": policies})


def _looks_like_name(value: str) -> bool:
    """Returns whether a model may be a Hugging Face repository id, ``owner/name``."""
    return not value.startswith((".", "/", "~", "$")) and "/" in value


def _existing(value: str, base: Path, where: Where, key: str, may_be_name: bool) -> str:
    path = (base / os.path.expanduser(os.path.expandvars(value))).absolute()
    if path.exists():
        return str(path)
    if may_be_name:
        return value
    raise ConfigError(f"{where(key)}: {key}: {value!r} does not exist (looked for {path}); give an existing path")
