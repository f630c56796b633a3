"""Implements methods from papers for advantages, ``data`` operations, prompt selection and learning rates.

They have the interface of user functions. The campaign file names them as ``megaflow_hpc.training.recipes:NAME``.
docs/how-to/methods.md lists them with their keys. Losses, importance weights and columns are in
:mod:`megaflow_hpc.training.trainer.recipes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.rewards import GivenReward, given_as
from megaflow_hpc.training.algorithms.prompts import TaskStatistics
from megaflow_hpc.training.algorithms.samples import Earlier, Sample, SampleGroup, StoredRollout
from megaflow_hpc.types import SEQUENCE_REWARD, TURN_REWARD


def returns_to_go(groups: Sequence[SampleGroup], discount: float = 1.0) -> dict[str, list[float]]:
    """Returns each turn's advantage: its return minus the mean return of the group's rollouts at the same turn.

    The return of turn t is the sum over s ≥ t of ``discount``^(s − t) × the reward of turn s. The rollout's reward is
    added to the reward of the last turn. A turn that only one rollout reached has advantage 0. This is the return of
    REINFORCE (Williams 1992; Sutton and Barto 2018, section 13.3). Turn-level credit for agents follows Zeng et al.
    2025, arXiv 2505.11821. If the policy plays several roles, each role's turns are treated separately, with the role's
    reward.
    """

    def compared(group: SampleGroup) -> dict[str, list[float]]:
        returns = {sample.id: _returns(sample, discount) for sample in group.samples}
        longest = max(map(len, returns.values()))
        reached = [[own[turn] for own in returns.values() if turn < len(own)] for turn in range(longest)]
        means = [math.fsum(values) / len(values) for values in reached]
        return {id: [value - means[turn] for turn, value in enumerate(own)] for id, own in returns.items()}

    return _by_role(groups, compared)


def _by_role(
    groups: Sequence[SampleGroup], compared: Callable[[SampleGroup], dict[str, list[float]]]
) -> dict[str, list[float]]:
    """Calls ``compared`` for each role with groups that contain only this role's turns. Returns the advantage of each
    turn."""
    advantages: dict[str, list[float]] = {}
    for group in groups:
        advantages |= {sample.id: [0.0] * max(len(sample.turns), 1) for sample in group.samples}
        for role in dict.fromkeys(role for sample in group.samples for role in sample.roles or ("",)):
            parts, places = [], dict[str, list[int]]()
            for sample in group.samples:
                own = [n for n, turn in enumerate(sample.turns) if not role or sample.roles[turn.sequence] == role]
                if role in (sample.roles or ("",)) and (own or not sample.turns):
                    places[sample.id] = own or [0]
                    turns, reward = tuple(sample.turns[n] for n in own), sample.role_rewards.get(role, sample.reward)
                    parts.append(replace(sample, turns=turns, reward=reward))
            for id, values in compared(group.only(tuple(parts))).items():
                for place, value in zip(places[id], values, strict=True):
                    advantages[id][place] = value
    return advantages


def given(rollouts: Sequence[StoredRollout], run: str, name: str) -> dict[str, float | list[float] | None]:
    """Returns the scores that ``megaflow-hpc reverify`` stored for the rollouts in ``RUN/rewards/NAME``.

    If there is no reward for a whole rollout, each of its sequences or turns gets its own reward, or 0 if missing.
    Rollouts without any reward are dropped.
    """
    found = _given(run, name)
    values: dict[str, float | list[float] | None] = {}
    for sample, _ in rollouts:
        own = found.get(sample.id)
        if own is None or own.reward is not None:
            values[sample.id] = None if own is None else own.reward
        elif any(name.startswith(SEQUENCE_REWARD) for name in own.rewards):
            values[sample.id] = [own.rewards.get(f"{SEQUENCE_REWARD}{n}", 0.0) for n in range(sample.sequences)]
        else:
            values[sample.id] = [own.rewards.get(f"{TURN_REWARD}{turn.call}", 0.0) for turn in sample.turns]
    return values


@functools.lru_cache(maxsize=4)
def _given(run: str, name: str) -> dict[str, GivenReward]:
    if not (found := given_as(RunDir(run), name)):
        raise ConfigError(f"{run}/rewards/{name}: no rewards; give some: megaflow-hpc reverify {run} --name {name}")
    return found


def _returns(sample: Sample, discount: float) -> list[float]:
    rewards = list(sample.turn_rewards) or [0.0]
    rewards[-1] += sample.reward
    for turn in reversed(range(len(rewards) - 1)):
        rewards[turn] += discount * rewards[turn + 1]
    return rewards


def anchor_groups(groups: Sequence[SampleGroup], discount: float = 0.95, weight: float = 1.0) -> dict[str, list[float]]:
    """Returns each turn's advantage: its rollout's, plus ``weight`` × the advantage among turns with the same state.

    The first part is the sum of the rollout's reward and its turn rewards, minus the group's mean. The second part is
    the turn's return, as in :func:`returns_to_go`, minus the mean return of all turns in the group that answered the
    same message, such as the same output of a command. A state that occurs only once adds nothing. Deviations are not
    normalised (F = 1). See Feng et al. 2025, GiGPO, arXiv 2505.10978, equations 2 to 8. If the policy plays several
    roles, each role's turns are treated separately, with the role's reward.
    """

    def compared(group: SampleGroup) -> dict[str, list[float]]:
        totals = {sample.id: sample.reward + math.fsum(sample.turn_rewards) for sample in group.samples}
        mean = math.fsum(totals.values()) / len(totals)
        returns = {sample.id: _returns(sample, discount) for sample in group.samples}
        by_state: dict[str, list[float]] = {}
        for sample in group.samples:
            for turn, value in zip(sample.turns, returns[sample.id], strict=False):
                by_state.setdefault(turn.state, []).append(value)
        means = {state: math.fsum(values) / len(values) for state, values in by_state.items()}
        advantages: dict[str, list[float]] = {}
        for sample in group.samples:
            among = [
                value - means[turn.state] if turn.state else 0.0
                for turn, value in zip(sample.turns, returns[sample.id], strict=False)
            ]
            advantages[sample.id] = [totals[sample.id] - mean + weight * step for step in among or [0.0]]
        return advantages

    return _by_role(groups, compared)


def passed(groups: Sequence[SampleGroup], threshold: float = 1.0) -> dict[str, float | list[float]]:
    """Gives advantage 1 to rollouts with a reward of at least ``threshold``, and 0 to others (rejection-sampling
    fine-tuning).

    In a team, the reward of each sequence's role counts.

    With ``loss.kind: megaflow_hpc.training.trainer.recipes:likelihood``, the passed rollouts serve as demonstrations
    (Yuan et al. 2023, RFT, arXiv 2308.01825; Dong et al. 2023, RAFT, arXiv 2304.06767).
    """

    def by_sequence(sample: Sample) -> list[float]:
        return [float(sample.role_rewards.get(role, sample.reward) >= threshold) for role in sample.roles]

    return {s.id: by_sequence(s) or float(s.reward >= threshold) for group in groups for s in group.samples}


def pairs(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Returns preference pairs for DPO: advantage 1 for a group's best rollout, −1 for its worst, 0 for the others.

    Ties go to the first rollout. A group in which every rollout got the same reward has no pair. Rollouts with weight 0
    are excluded, because their partner would be trained on alone. For the same reason, an amendment leaves out both
    rollouts of a pair. See Rafailov et al. 2023, DPO, arXiv 2305.18290.
    """
    advantages = {s.id: 0.0 for group in groups for s in group.samples}
    for group in groups:
        trained = [sample for sample in group.samples if sample.weight]
        if not trained:
            continue
        best = max(trained, key=lambda sample: sample.reward)
        worst = min(trained, key=lambda sample: sample.reward)
        if best.reward > worst.reward:
            advantages |= {best.id: 1.0, worst.id: -1.0}
    return advantages


def by_duration(
    groups: Sequence[SampleGroup], version: int, random: np.random.Generator, cap: float = 4.0
) -> list[SampleGroup]:
    """Weights each rollout by its duration divided by the mean duration in the step, at most ``cap``.

    Under an age bound or a time limit, short rollouts arrive more often, in proportion to 1 / duration. Weighting by
    the inverse inclusion probability removes this bias (Horvitz and Thompson 1952). Rollouts of unknown duration keep
    weight 1.
    """
    known = [sample.agent_s for group in groups for sample in group.samples if sample.agent_s > 0]
    mean = math.fsum(known) / len(known) if known else 1.0

    def weighted(group: SampleGroup) -> SampleGroup:
        factors = [min(s.agent_s / mean, cap) if s.agent_s > 0 else 1.0 for s in group.samples]
        samples = zip(group.samples, factors, strict=True)
        return group.only(tuple(replace(s, weight=s.weight * factor) for s, factor in samples))

    return [weighted(group) for group in groups]


def soft_overlong(
    groups: Sequence[SampleGroup],
    version: int,
    random: np.random.Generator,
    longest: int,
    buffer: int,
    penalty: float = -1.0,
) -> list[SampleGroup]:
    """Adds a penalty for long rollouts to their rewards (soft overlong punishment).

    The penalty is 0 up to ``longest`` − ``buffer`` sampled tokens, and falls linearly to ``penalty`` at ``longest``.
    See Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.4.
    """
    if not 0 < buffer <= longest:
        raise ConfigError(f"soft_overlong: buffer {buffer}: expected a number from 1 to longest ({longest})")

    def punished(sample: Sample) -> Sample:
        share = min(max(sample.tokens - (longest - buffer), 0) / buffer, 1.0)
        return replace(sample, penalty=sample.penalty + penalty * share)

    return [group.only(tuple(map(punished, group.samples))) for group in groups]


def mask_truncated(groups: Sequence[SampleGroup], version: int, random: np.random.Generator) -> list[SampleGroup]:
    """Gives truncated rollouts weight 0 (overlong filtering). They still count in their group, but are not trained on.

    See DAPO, arXiv 2503.14476, section 3.4.
    """

    def masked(sample: Sample) -> Sample:
        return replace(sample, weight=0.0) if sample.status == "truncated" else sample

    return [group.only(tuple(map(masked, group.samples))) for group in groups]


def shuffled(groups: Sequence[SampleGroup], version: int, random: np.random.Generator) -> list[SampleGroup]:
    """Shuffles the rewards of a step's rollouts, for control runs in which rewards carry no information."""
    samples = [sample for group in groups for sample in group.samples]
    givers = iter([samples[index] for index in random.permutation(len(samples))])

    def taken(sample: Sample) -> Sample:
        giver = next(givers)
        return replace(sample, reward=giver.reward, rewards=giver.rewards)

    return [group.only(tuple(map(taken, group.samples))) for group in groups]


def past_successes(
    groups: Sequence[SampleGroup],
    version: int,
    random: np.random.Generator,
    earlier: Earlier,
    threshold: float = 1.0,
    age: int | None = None,
) -> list[SampleGroup]:
    """Adds a past success to each group in which no rollout has a reward of at least ``threshold``.

    If all rollouts of a group fail, the policy learns nothing from the task. The added rollout is the newest success of
    the same task and agent that is not in another group and at most ``age`` versions old. By default, any age is
    allowed. Older weights sampled the success. So set ``importance`` to ``token`` or ``sequence``, which compare its
    recorded log-probabilities with those of the policy before the step. See Oh et al. 2018, Self-Imitation Learning,
    arXiv 1806.05635, and for language models Zhang et al. 2025, RLEP, arXiv 2507.07451.
    """
    added: set[str] = set()
    changed = []
    for group in groups:
        agents = {sample.agent for sample in group.samples}
        past = [
            sample
            for sample in earlier.get(group.task, ())
            if sample.reward >= threshold
            and sample.id not in added
            and sample.agent in agents
            and (age is None or version - sample.oldest <= age)
        ]
        if past and all(sample.reward < threshold for sample in group.samples):
            added.add(past[-1].id)
            group = group.only((*group.samples, past[-1]))
        changed.append(group)
    return changed


def uncertain(
    tasks: Sequence[str], count: int, statistics: Mapping[str, TaskStatistics], random: np.random.Generator
) -> list[str]:
    """Requests more groups of tasks whose outcome is uncertain, in proportion to p (1 − p) with the recent pass rate p.

    Each task's share of ``count`` is rounded down. The remaining groups go to the largest remainders, with ties broken
    at random. Tasks without rollouts have p = 1/2. p (1 − p) is raised to at least 0.01, so that solved and unsolved
    tasks are requested again. p (1 − p) is the variance of a pass, and the variance of GRPO's gradient is proportional
    to it. Giving more rollouts to such tasks is the idea of Knapsack RL (Li et al. 2025, arXiv 2509.25849), which
    allocates them by solving a knapsack problem instead.
    """
    rates = np.array([statistics[task].recent if task in statistics else 0.5 for task in tasks])
    share = np.maximum(rates * (1 - rates), 0.01)
    share *= count / share.sum()
    groups = np.floor(share).astype(int)
    order = random.permutation(len(tasks))
    rest = order[np.argsort(-(share - groups)[order], kind="stable")][: count - groups.sum()]
    np.add.at(groups, rest, 1)
    return [task for task, times in zip(tasks, groups.tolist(), strict=True) for _ in range(times)]


def by_effective_size(
    step: int, steps: int, lr: float, metrics: Mapping[str, float], power: float = 0.5, floor: float = 0.1
) -> float:
    """Scales the learning rate by (effective sample size / number of tokens)^``power``, but at least by ``floor``.

    The effective sample size of importance weights w is (Σ w)² / Σ w² (Kong 1992). The weight of a token is its ratio
    of new to engine probability. Old rollouts reduce the effective sample size and increase the gradient's variance.
    The idea is from VCPO (arXiv 2602.17616), but ``power`` and ``floor`` are not.
    """
    return lr * max(metrics.get("effective", 1.0) ** power, floor)
