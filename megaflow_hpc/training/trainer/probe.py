"""Checks user functions in a section ``training`` by calling them on small examples.

Planning runs :func:`main` in the trainer's interpreter. It reads ``{"training": {…}, "team": {…}, "beside": DIR}`` as
JSON on standard input and writes ``{"errors": {KEY: [ERROR, LACKS]}, "digests": {…}, "code": [NAME…]}``. ``LACKS`` is
true if a library is missing. The functions' own output goes to standard error. A trainer calls :func:`check` before its
first step.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from megaflow_hpc.agents import code
from megaflow_hpc.config import resolved
from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.team import TeamConfig
from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError, MegaflowError, Mistakes
from megaflow_hpc.training.algorithms import Prompts, advantages
from megaflow_hpc.training.algorithms.choice import by_method
from megaflow_hpc.training.algorithms.rewards import scores
from megaflow_hpc.training.algorithms.samples import RoleRewards, Sample, SampleGroup, StoredRollout, TurnTokens
from megaflow_hpc.training.methods import Digests, call, digests, guarded, methods_of, numbers, resolve, wrong
from megaflow_hpc.trajectory import TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Rollout


def check(training: TrainingConfig, team: TeamConfig | None = None) -> None:
    """Calls every user function on an example. In a team, the example's samples have roles.

    Raises:
        Mistakes: a function cannot be imported or called, or its result is invalid.
    """
    if failures := failed(training, team):
        raise Mistakes([f"training: {key}: {error}" for key, (error, _) in failures.items()])


def failed(training: TrainingConfig, team: TeamConfig | None = None) -> dict[str, tuple[str, bool]]:
    """Returns the error of each failing function by its key, and whether a missing library is the cause."""
    failures = {}
    for key, method in methods_of(training).items():
        try:
            _try(key, method, training, team)
        except MegaflowError as error:
            cause = error.__cause__
            own = method.name.partition(":")[0].partition(".")[0]
            lacks = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] != own
            failures[key] = (str(error), lacks)
        except BaseException as error:  # includes SystemExit, which a script raises on import
            failures[key] = (f"{method}: {error!r}", False)
    return failures


def _try(key: str, method: Method, training: TrainingConfig, team: TeamConfig | None) -> None:
    policy, _, kind = key.removeprefix("training.policies.").partition(".")
    # Check before importing the function, because the import may need a missing library.
    if kind.startswith("columns.") and method.name in OF_VERSIONS:
        _check_versions(method, training.policies[policy], training.publish_delta)
    resolve(method)
    roles = team.roles_of(policy if policy in training.policies else next(iter(training.policies))) if team else {}
    if key.startswith("training.data."):
        groups = example_groups(roles)
        earlier = {"a": [replace(groups[0].samples[0], id="a@1/default/0", group="a@1/default")]}
        by_method(groups, method, 1, np.random.default_rng(0), {}, earlier)
    elif key == "training.prompts.order":
        prompts = Prompts(training.prompts)
        groups = example_groups(roles)
        learned = prompts.learn({}, groups)
        prompts.choose([*(group.task for group in groups), "c", "d"], 2, learned, np.random.default_rng(0))
    elif key.startswith("training.policies."):
        OF_POLICY[kind.partition(".")[0]](method, training.policies[policy], roles)


def _check_versions(method: Method, policy: PolicyTraining, publish_delta: bool) -> None:
    """Checks that complete versions are published, because the function loads them."""
    if policy.lora or publish_delta:
        key, publishes = ("lora", "only adapters") if policy.lora else ("publish_delta", "differences")
        raise ConfigError(
            f"{method}: reads earlier versions, but {key} publishes {publishes}; leave {key} or this column out"
        )


def _advantage(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    kind = policy.advantage.model_copy(update={"rewards": {}})
    advantages(policy.model_copy(update={"advantage": kind}), example_groups(roles), roles)


def _score(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    scores(method, [_stored(sample) for group in example_groups(roles) for sample in group.samples])


def _stored(sample: Sample) -> StoredRollout:
    """Returns a stored rollout that matches a sample's tokens and turns."""
    sequences = [TokenSequence("default") for _ in range(sample.sequences)]
    for sequence in sequences:
        sequence.tokens.extend(range(sample.longest))
        sequence.logprobs.extend([-1.0] * sample.longest)
        sequence.loss_mask.extend([1] * sample.longest)
        sequence.weight_versions.extend([0] * sample.longest)
    texts = ["Sort the lines of in."] + [f"sort in > out{turn.call}" for turn in sample.turns]
    messages = [{"role": "assistant" if n else "user", "content": text} for n, text in enumerate(texts)]
    turns = [
        Turn(turn.sequence, turn.start, turn.end, message=turn.call + 1, role=role)
        for turn, role in zip(sample.turns, _roles_of_turns(sample), strict=True)
    ]
    trajectory = Trajectory.begin(
        Rollout(sample.task, "default", sample.index, "agent"),
        0,
        sample.status,
        reward=sample.reward,
        rewards=dict(sample.rewards),
        sequences=sequences,
        messages=messages,
        turns=turns,
    )
    return StoredRollout(sample, trajectory)


def _roles_of_turns(sample: Sample) -> list[str]:
    return [sample.roles[turn.sequence] if sample.roles else "" for turn in sample.turns]


def _schedule(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    scheduled(method, 1, 10, policy.optimizer.lr, {"effective": 1.0, "loss": 0.0, "entropy": 1.0, "kl": 0.0})


def _loss(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    from megaflow_hpc.training.trainer import losses

    _try_loss(losses.Loss(kind=guarded(method), entropy=policy.loss.entropy, importance="token"), method, policy)


def _importance(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    from megaflow_hpc.training.trainer import losses

    _try_loss(losses.Loss("dapo", importance=guarded(method)), method, policy)


def _try_loss(loss: Any, method: Method, policy: PolicyTraining) -> None:
    """Computes a loss and its gradient on two sequences of 5 and 4 tokens."""
    import torch  # type: ignore[import-not-found]

    from megaflow_hpc.training.trainer import losses

    random = np.random.default_rng(0)
    values = [torch.from_numpy(-2 * random.random(9).astype(np.float32)) for _ in range(3 + len(policy.columns))]
    new, proximal, engine = (value.requires_grad_(number == 0) for number, value in enumerate(values[:3]))
    batch = losses.Tokens(
        offsets=torch.tensor([0, 5, 9]),
        mask=torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1]).bool(),
        proximal=proximal,
        engine=engine,
        advantages=torch.tensor([1.0] * 5 + [-0.5] * 4),
        weights=torch.ones(9),
        rollout_tokens=torch.tensor([3, 2]),
        columns=dict(zip(policy.columns, values[3:], strict=True)),
    )
    share, _ = losses.policy_loss(loss, new, new.detach().abs(), batch, Example())
    share.backward()
    numbers(method, float(share.detach()), [()], "the loss")
    numbers(method, new.grad.numpy(), [(9,)], "the gradient of the loss")


class Example:
    """Token and rollout counts of the example minibatch with which losses are tried."""

    tokens, sequences, samples = 5, 2, 2


def _column(method: Method, policy: PolicyTraining, roles: RoleRewards) -> None:
    """Checks a column function's arguments, but does not call it, because a call may need models or a server."""
    function = resolve(method)
    try:
        inspect.signature(function).bind([], None)
    except TypeError as error:
        raise wrong(method, f"cannot be called ({error})", "function(sequences, models, **args)") from None


OF_VERSIONS = {f"megaflow_hpc.training.trainer.recipes:{name}" for name in ("average", "old")}
"""Column functions of this package that load earlier versions of the weights."""

OF_POLICY: dict[str, Callable[[Method, PolicyTraining, RoleRewards], None]] = {
    "advantage": _advantage,
    "score": _score,
    "optimizer": _schedule,
    "loss": _loss,
    "importance": _importance,
    "columns": _column,
}
"""Functions that check a user function, by the first part of its key in a policy's settings."""


def scheduled(method: Method, step: int, steps: int, lr: float, metrics: dict[str, float]) -> float:
    """Calls a user's function for the learning rate of an update.

    The function is called as ``function(step, steps, lr, metrics, **args)``, with the number of the step from 1, the
    number of steps, the learning rate from ``optimizer.lr`` and warm-up, and the update's metrics as in
    ``metrics.jsonl``. It returns the learning rate.
    """
    return float(numbers(method, call(method, step, steps, lr, metrics), [()], "the learning rate", least=0.0))


def example_groups(roles: RoleRewards | None = None) -> list[SampleGroup]:
    """Returns two groups of three rollouts, with rewards, turns and named rewards. Each rollout's sequences cycle
    through the ``roles``."""
    groups = []
    for task, rewards in (("a", (1.0, 0.0, 0.5)), ("b", (0.0, 1.0, 1.0))):
        samples = [_sample(task, number, reward, roles or {}) for number, reward in enumerate(rewards)]
        samples[2] = replace(samples[2], status="truncated", agent_s=30.0)
        groups.append(SampleGroup(f"{task}/default", task, tuple(samples)))
    return groups


def _sample(task: str, index: int, reward: float, roles: RoleRewards) -> Sample:
    turns = (TurnTokens(0, 0, 4, 8), TurnTokens(1, 0, 10, 12), TurnTokens(2, 1, 3, 9))[: 1 + 2 * (index > 0)]
    sequences = 1 + turns[-1].sequence
    return Sample(
        id=f"{task}/default/{index}",
        task=task,
        group=f"{task}/default",
        index=index,
        status="completed",
        error_kind="",
        reward=reward,
        rewards={"reward": reward, "turn.0": 0.5, **{name: reward for name in roles.values() if name}},
        oldest=0,
        newest=1,
        tokens=sum(turn.end - turn.start for turn in turns),
        longest=12,
        time_ns=index,
        sequences=sequences,
        turns=turns,
        roles=tuple(islice(cycle(roles), sequences)),
        agent_s=10.0,
    )


def main() -> None:
    """Reads the request on standard input and writes the response to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    sys.path.insert(0, question["beside"])
    training = resolved(TrainingConfig, question["training"])
    failures = failed(training, TeamConfig.model_validate(question["team"]) if question["team"] else None)
    recorded: Digests = {}
    for method in methods_of(training).values():
        try:
            recorded |= digests([method])
        except ConfigError:
            continue  # its error is among the failures
    json.dump({"errors": failures, "digests": recorded, "code": code.imported_from(question["beside"])}, answers)
    answers.close()
    os._exit(0)  # do not wait for threads started by imports


if __name__ == "__main__":
    main()
