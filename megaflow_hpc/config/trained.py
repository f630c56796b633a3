"""Checks the models and agents of trained policies.

A loss uses ratios of probabilities under the model's logits, divided by the ``sampling`` temperature. With top-p,
top-k or a penalty, the engine samples from a different distribution, so the ratios would be wrong. A trained policy
may therefore set only a temperature. Engines read sampling options from three sources:

- An agent's calls. The gateway checks them, and this module checks the agent's ``args``.
- The engine's own options (the model's ``args``). This module checks them.
- The model's ``generation_config.json``, by default. :func:`trained_model` disables it (vLLM:
  ``--generation-config``, ``ModelConfig.get_diff_sampling_param``; SGLang: ``--sampling-defaults``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaflow_hpc.config.model import ModelConfig, SamplingConfig
from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.types import NEUTRAL

DEFAULTS = {"vllm": ("generation-config", "vllm"), "sglang": ("sampling-defaults", "openai")}
"""Option and value that make an engine's sampling neutral unless a call overrides it, by engine."""

LOADS_WEIGHTS = ("vllm", "sglang", "transformers", "scripted")
"""Engines that the campaign starts and that can load new weights."""


def trained_model(model: ModelConfig) -> ModelConfig:
    """Returns the model of a trained policy, with engine options that ignore sampling defaults in the model's files."""
    kinds = [{"engine": model.engine, "args": model.args}, *model.also]
    args = [_neutral_args(str(kind.get("engine", model.engine)), kind.get("args")) for kind in kinds]
    also = []
    for kind, own in zip(model.also, args[1:], strict=True):
        also.append({**kind, "args": own} if own else kind)
    return model.model_copy(update={"args": args[0] or {}, "also": tuple(also)})


def _neutral_args(engine: str, args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if args is None or engine not in DEFAULTS:
        return None if args is None else dict(args)
    option, value = DEFAULTS[engine]
    given = {str(key).replace("_", "-") for key in args}
    return dict(args) if option in given else {**args, option: value}


def check_trained(
    training: TrainingConfig, policies: Mapping[str, tuple[ModelConfig | None, Sequence[AgentConfig], int]], key: str
) -> None:
    """Checks that each trained policy has a model that can load weights and is sampled without modifying its
    distribution.

    Args:
        training: The ``training`` section.
        policies: Model, agents and samples per task of each policy, by name.
        key: Path of a policy's model in the campaign file, with ``{}`` for the policy's name.

    Raises:
        ValueError: A policy cannot be trained. The message names the key.
    """
    for name, config in training.policies.items():
        where = key.format(name)
        model, agents, samples = policies.get(name, (None, (), 0))
        if model is None:
            with_models = ", ".join(other for other, (options, *_) in policies.items() if options) or "none"
            raise ValueError(
                f"training.policies: {name!r} is not a policy with a model; this campaign has: {with_models}"
            )
        if model.judge:
            raise ValueError(f"training.policies.{name}: {where} is a judge, whose tokens are not recorded")
        if model.engine not in LOADS_WEIGHTS:
            what = "an engine pool" if model.pool else f"engine {model.engine}"
            raise ValueError(f"training.policies.{name}: {where} is served by {what}, which loads no trained weights")
        if training.publish_delta and any(kind.nodes > 1 for kind in model.kinds()):
            raise ValueError(
                f"training.publish_delta: {where}.nodes: an engine over several nodes reads weights on each of them, "
                "and deltas are put together on one node's disk; leave publish_delta out"
            )
        for other in config.snapshot:
            target = policies.get(other, (None, (), 0))[0]
            if target is None or other in training.policies or target.engine not in LOADS_WEIGHTS:
                raise ValueError(
                    f"training.policies.{name}.snapshot: {other!r}: expected a model that is not trained and loads "
                    f"weights (engine {', '.join(LOADS_WEIGHTS)})"
                )
            if config.lora and _takes_adapters(model) and not _takes_adapters(target):
                raise ValueError(
                    f"training.policies.{name}.snapshot: {other!r} would get adapters (lora); start its engine for "
                    "them too, with args: {enable-lora: true}"
                )
        _check_sampling(f"{where}.sampling", model.sampling, str(config.loss.kind))
        if samples == 1:
            raise ValueError(
                f"training.policies.{name}: a group of one sample has nothing to compare with; set samples to "
                "8, for example"
            )
        args: list[tuple[str, Any]] = [("agent.args", agent.args) for agent in agents]
        for at, options in (*args, (f"{where}.args", model.args), (f"{where}.also", model.also)):
            for option, value in _sampling(options):
                name = option.rpartition(".")[2].replace("-", "_")
                _check_option(f"{at}.{option}", name, value, model.sampling, f"{where}.sampling.{name}")
        for kind in ({"engine": model.engine, "args": model.args}, *model.also):
            _check_defaults(where, str(kind.get("engine", model.engine)), kind.get("args") or {})


def _takes_adapters(model: ModelConfig) -> bool:
    options = {str(name).replace("_", "-"): value for name, value in model.args.items()}
    return model.engine == "vllm" and bool(options.get("enable-lora"))


def check_limits(
    training: TrainingConfig, policies: Mapping[str, tuple[ModelConfig | None, Sequence[AgentConfig], int]]
) -> None:
    """Checks that rollouts have a maximum number of tokens if the loss divides by it.

    Raises:
        ValueError: An agent has no limit. The message names the key.
    """
    for name, config in training.policies.items():
        unlimited = [agent.title for agent in policies[name][1] if not agent.max_tokens]
        if config.loss.kind == "dr_grpo" and unlimited:
            raise ValueError(
                f"training.policies.{name}.loss.kind: dr_grpo divides by the largest number of tokens that a rollout "
                f"may sample; set max_tokens of agent {unlimited[0]}, such as max_tokens: 4096"
            )


def check_engine(training: TrainingConfig) -> None:
    """Checks that the trainer supports the training settings.

    Raises:
        ValueError: A setting is not supported. The message names the key.
    """
    if training.trainer != "veomni":
        return
    for name, policy in training.policies.items():
        if policy.parallel.tensor > 1:
            raise ValueError(
                f"training.policies.{name}.parallel.tensor: veomni has no tensor parallelism; leave it out, or "
                "write training.trainer: own"
            )


def _check_sampling(where: str, sampling: SamplingConfig, loss: str) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if value == neutral or (name == "temperature" and value):
            continue
        why = (
            "sampling without randomness gives no probabilities to learn from"
            if name == "temperature"
            else (f"loss {loss} needs the probabilities of the whole distribution")
        )
        raise ValueError(f"{where}.{name} {value:g}: {why}; leave it out (a trained policy may have a temperature)")


def _check_option(where: str, option: str, value: Any, sampling: SamplingConfig, key: str) -> None:
    if value is None or (option == "logit_bias" and not value):
        return
    if option == "logit_bias":
        raise ValueError(f"{where}: a trained policy must choose its tokens freely; leave it out")
    own = getattr(sampling, option)
    wanted = -1 if option == "top_k" and value == 0 else value  # both mean no limit
    if not isinstance(value, int | float) or wanted != own:
        raise ValueError(
            f"{where} {value!r}: a trained policy is sampled with {own:g} ({key}), and calls with other values are not "
            "trained on; leave it out"
        )


def _check_defaults(where: str, engine: str, args: Mapping[str, Any]) -> None:
    option, good = DEFAULTS.get(engine, ("", ""))
    for name, value in args.items():
        if str(name).replace("_", "-") == option and value != good:
            raise ValueError(
                f"{where}.args.{name} {value!r}: reads temperature and top-p from the model's files, but the loss "
                f"needs probabilities without them; leave it out, or write {good}"
            )


def _sampling(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each sampling option, at any depth. Also searches JSON in strings."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            here = f"{path}.{name}" if path else str(name)
            if str(name).replace("-", "_") in (*NEUTRAL, "logit_bias"):
                yield here, inner
            else:
                yield from _sampling(inner, here)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _sampling(inner, f"{path}.{number}" if path else str(number))
