"""Functions of the user's in place of built-in methods: found, called, checked, and unchanged between starts."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megaflow_hpc.config import parse
from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import PolicyTraining, PromptsConfig, TrainingConfig
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.training.algorithms import Prompts, advantages, choose
from megaflow_hpc.training.algorithms.rewards import scored, scores
from megaflow_hpc.training.algorithms.samples import Sample, TurnTokens
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.methods import call, digests, guarded, identity, methods_of, resolve
from megaflow_hpc.training.plan import StepPlan
from megaflow_hpc.training.trainer.probe import _stored, check, example_groups
from megaflow_hpc.trajectory import TokenSequence, Trajectory, Turn
from tests.support.groups import group, sample
from tests.support.hash_trainer import begun, planned
from tests.support.training import Pods, training_run

MODULE = """
from dataclasses import replace

import numpy as np


def centred(groups, scale=1.0):
    found = {}
    for group in groups:
        mean = np.mean([sample.reward for sample in group.samples])
        found |= {sample.id: scale * (sample.reward - mean) for sample in group.samples}
    return found


def by_turn(groups):
    return {s.id: [10.0 * t.call for t in s.turns] for g in groups for s in g.samples}


def by_sequence(groups):
    return {s.id: np.arange(s.sequences, dtype=np.float64) for g in groups for s in g.samples}


def leaves(groups):
    raise SystemExit(0)


def missing(groups):
    return {s.id: 1.0 for g in groups for s in g.samples[1:]}


def unknown(groups):
    return centred(groups) | {"x/default/9": 1.0}


def long(groups):
    return {s.id: [1.0] * 9 for g in groups for s in g.samples}


def nan(groups):
    return {s.id: float("nan") for g in groups for s in g.samples}


def huge(groups):
    return {s.id: 1e300 for g in groups for s in g.samples}


def text(groups):
    return {s.id: "1.0" for g in groups for s in g.samples}


def a_list(groups):
    return [1.0]


def broken(*_):
    return 1 / 0


def fresh(groups, version, random, age=0):
    return [group.only(tuple(s for s in group.samples if version - s.oldest <= age)) for group in groups]


def lighter(groups, version, random):
    return [replace(g, samples=tuple(replace(s, weight=0.5, penalty=-1.0) for s in g.samples)) for g in groups]


def twice(groups, version, random):
    return [*groups, groups[0]]


def negative(groups, version, random):
    return [replace(g, samples=tuple(replace(s, weight=-1.0) for s in g.samples)) for g in groups]


def borrow(groups, version, random, earlier, task="t"):
    return [group.only((*group.samples, *earlier[task])) for group in groups]


def judge(rollouts, scale=0.01):
    return {s.id: scale * sum(len(q.tokens) for q in t.sequences) for s, t in rollouts}


def judge_turns(rollouts):
    return {s.id: [10.0 * turn.call for turn in s.turns] for s, _ in rollouts}


def judge_sequences(rollouts):
    return {s.id: [0.5 + number for number in range(s.sequences)] for s, _ in rollouts}


def undecided(rollouts):
    return {s.id: None if s.index == 1 else float(s.index) for s, _ in rollouts}


def nan_scores(rollouts):
    return {s.id: float("nan") for s, _ in rollouts}


def long_scores(rollouts):
    return {s.id: [0.0] * 9 for s, _ in rollouts}


def no_scores(rollouts):
    return {}


def hardest(tasks, count, statistics, random):
    rate = {task: row.passed / row.tried for task, row in statistics.items()}
    return [min(tasks, key=lambda task: (rate.get(task, 0.5), task))] * count


def strangers(tasks, count, statistics, random):
    return ["stranger"] * count


def halves(groups, version, random):
    return [replace(g, samples=tuple(replace(s, reward=s.reward / 2) for s in g.samples)) for g in groups]


def exhausted(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def halved(step, steps, lr, metrics):
    return lr / 2 * metrics["effective"]


def negative_rate(step, steps, lr, metrics):
    return -lr
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module ``own_methods`` next to a campaign file."""
    path = tmp_path / "own_methods.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    return path


def valued(name: str, groups: Any, **fields: Any) -> Any:
    config = PolicyTraining.model_validate({"advantage": {"kind": f"own_methods:{name}", **fields}})
    return advantages(config, groups)


def long_sample(index: int, reward: float) -> Sample:
    """A sample of two sequences with one and two turns, of 4, 2 and 4 tokens."""
    turns = (TurnTokens(0, 0, 4, 8), TurnTokens(1, 1, 2, 4), TurnTokens(3, 1, 6, 10))
    return sample("t/p", index, reward, sequences=2, turns=turns, rewards={"turn.0": 0.5, "turn.3": 2.0})


def test_an_advantage_is_a_number_for_each_rollout() -> None:
    kind = {"name": "own_methods:centred", "args": {"scale": 2.0}}
    config = PolicyTraining.model_validate({"advantage": {"kind": kind}})
    assert advantages(config, [group([1, 0])]) == {"t/p/0": (1.0, 1.0), "t/p/1": (-1.0, 1.0)}


def test_an_advantage_gets_penalties_and_weighted_rewards_as_the_reward() -> None:
    rows = [sample("t/p", 0, 5.0, rewards={"tests": 1.0}, penalty=-0.5), sample("t/p", 1, 5.0, rewards={"tests": 0.0})]
    found = valued("centred", [group([]).only(tuple(rows))], rewards={"tests": 2.0})
    assert found == {"t/p/0": (0.75, 1.0), "t/p/1": (-0.75, 1.0)}


def test_an_advantage_may_differ_between_turns_or_sequences() -> None:
    both = group([]).only((long_sample(0, 1.0), long_sample(1, 0.0)))
    found = valued("by_turn", [both])
    assert [found[f"t/p/{index}"][0].tolist() for index in (0, 1)] == [[0.0, 10.0, 30.0]] * 2
    assert valued("by_sequence", [both])["t/p/1"][0].tolist() == [0.0, 1.0]
    assert both.samples[0].turn_rewards == (0.5, 0.0, 2.0)


def test_whitening_counts_each_turn_by_its_tokens() -> None:
    both = group([]).only((long_sample(0, 1.0), long_sample(1, 0.0)))
    found = valued("by_turn", [both], whiten=True)["t/p/0"][0]
    # 0, 10 and 30 with 4, 2 and 4 tokens: mean 14, variance (4 · 196 + 2 · 16 + 4 · 256) / 10 = 184
    assert found == pytest.approx([-14 / 184**0.5, -4 / 184**0.5, 16 / 184**0.5], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("missing", "lacks sample 't/p/0'"),
        ("unknown", "returned the unknown sample 'x/default/9'"),
        ("long", r"the advantage of t/p/0 has shape \(9,\), expected a single number or \(1,\)"),
        ("nan", "the advantage of t/p/0 contains nan, expected finite numbers"),
        ("huge", r"the advantage of t/p/0 contains 1e\+300, expected finite numbers"),
        ("text", "the advantage of t/p/0 has dtype <U3, expected integers or floating-point numbers"),
        ("a_list", "returned list, expected a mapping from sample to values"),
        ("broken", r"raised ZeroDivisionError.* at .*own_methods\.py:\d+; no step was taken"),
    ],
)
def test_an_invalid_advantage_is_refused(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"own_methods:{name}: {error}"):
        valued(name, [group([1, 0])])


def chosen(step: Any, groups: Any, version: int = 0) -> Any:
    config = TrainingConfig.model_validate({"policies": {"default": {}}, "data": [step]})
    return choose(config, groups, version=version, want=9)


def test_a_step_of_data_drops_rollouts_and_changes_weights_and_penalties() -> None:
    old = group([]).only((sample("t/p", 0, 1.0, oldest=1), *group([1, 0, 0]).samples[1:]))
    found = chosen({"method": {"name": "own_methods:fresh", "args": {"age": 2}}}, [old], version=3)
    assert found.drops == {f"t/p/{index}": "own_methods:fresh" for index in (1, 2)} | {"t/p": "fewer than two samples"}
    found = chosen("own_methods:lighter", [group([1, 0])])
    assert [(s.weight, s.penalty) for s in found.taken[0].samples] == [(0.5, -1.0)] * 2


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("twice", "returned t/p/0 in group t/p, expected each sample once, in its own group"),
        ("negative", "the weight of t/p/0 contains -1.0, expected numbers of at least 0"),
        ("broken", "raised ZeroDivisionError"),
    ],
)
def test_an_invalid_step_of_data_is_refused(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        chosen(f"own_methods:{name}", [group([1, 0])])


def test_a_step_of_data_may_add_rollouts_of_earlier_steps_to_groups_of_their_task() -> None:
    past = {"t": [sample("t@1/p", 0, 1.0)], "u": [sample("u@1/p", 0, 1.0)]}
    config = TrainingConfig.model_validate({"policies": {"default": {}}, "data": ["own_methods:borrow"]})
    found = choose(config, [group([0, 0])], version=0, want=9, earlier=past)
    assert [(s.id, s.group) for s in found.taken[0].samples] == [("t/p/0", "t/p"), ("t/p/1", "t/p"), ("t@1/p/0", "t/p")]
    assert found.drops == {}
    with pytest.raises(ConfigError, match="returned t@1/p/0 in group t@2/p, expected each sample once"):
        choose(config, [group([0, 0]), group([0, 0], "t@2/p")], version=0, want=9, earlier=past)
    step = {"method": {"name": "own_methods:borrow", "args": {"task": "u"}}}
    other = TrainingConfig.model_validate({"policies": {"default": {}}, "data": [step]})
    with pytest.raises(ConfigError, match="returned u@1/p/0 in group t/p, expected each sample once, in its own group"):
        choose(other, [group([0, 0])], version=0, want=9, earlier=past)


def test_a_scorer_rewards_rollouts_sequences_or_turns() -> None:
    stored = [_stored(sample) for sample in example_groups()[0].samples]  # of 1, 2 and 2 sequences, 1, 3 and 3 turns

    def found(name: str) -> list[Any]:
        of_each = scores(Method(name=f"own_methods:{name}"), stored)
        return [scored(sample, of_each[sample.id]) for sample, _ in stored]

    judged = found("judge")
    assert [(s.reward, s.verdict, s.rewards["score"]) for s in judged] == [
        (pytest.approx(0.12), 1.0, pytest.approx(0.12)),
        (pytest.approx(0.24), 0.0, pytest.approx(0.24)),
        (pytest.approx(0.24), 0.5, pytest.approx(0.24)),
    ]
    assert [s.turn_rewards for s in found("judge_turns")] == [(0.0,), (0.0, 10.0, 20.0), (0.0, 10.0, 20.0)]
    assert [s.reward for s in found("judge_turns")] == [1.0, 0.0, 0.5]
    assert [s.sequence_rewards for s in found("judge_sequences")][1:] == [(0.5, 1.5), (0.5, 1.5)]
    assert [math.isnan(s.reward) for s in found("undecided")] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nan_scores", "the score of task-0/default/0 contains nan, expected finite numbers; no step was taken"),
        ("long_scores", r"the score of task-0/default/0 has shape \(9,\)"),
        ("no_scores", "lacks rollout 'task-0/default/0', expected one entry for each"),
        ("broken", "raised ZeroDivisionError.* at .*own_methods.py:[0-9]+; no step was taken"),
    ],
)
def test_an_invalid_scorer_takes_no_step_and_loses_none(tmp_path: Path, name: str, error: str) -> None:
    training = {"policies": {"default": {"score": f"own_methods:{name}"}}, "batch": 1, "steps": 1}
    run = training_run(tmp_path / "run", training, tasks=1, samples=2)
    flow = begun(run, Pods(run, lambda r: float(r.sample_index)))
    with pytest.raises(ConfigError, match=f"own_methods:{name}: {error}"):
        flow.try_plan(1)
    assert flow.files.numbers(StepPlan) == []
    good = PolicyTraining.model_validate({"score": "own_methods:judge"})
    again = Dataflow(run, training=TrainingConfig(policies={"default": good}, batch=1, steps=1))
    again.start()
    assert len(planned(again, 1).rollouts) == 2


def test_scores_are_planned_beside_the_verifiers_rewards(tmp_path: Path, own: Path) -> None:
    training = {"policies": {"default": {"score": "own_methods:undecided"}}, "batch": 1, "data": [{"replay": 0.5}]}
    run = training_run(tmp_path / "run", training, tasks=1, samples=4)
    pods = Pods(run, lambda r: 0.25)
    flow = begun(run, pods)
    plan = planned(flow, 1)
    # scores 0, 2 and 3 of three rollouts, with mean 5/3
    assert [(r.reward, r.scores) for r in plan.rollouts] == [(0.25, {"score": score}) for score in (0.0, 2.0, 3.0)]
    assert [r.advantage for r in plan.rollouts] == pytest.approx([-5 / 3, 1 / 3, 4 / 3])
    assert plan.drops == {"task-0/default/1": "no reward"}
    assert plan.scorer == identity(Method(name="own_methods:undecided"))
    statistics = Step(flow, plan).statistics()
    assert (statistics["reward"], statistics["score"]) == (0.25, pytest.approx(5 / 3))
    Step(flow, plan).commit()
    pods.work()
    again = Dataflow(run)  # replays the first step's group, with the scores of its plan
    again.start()
    second = planned(again, 2)
    assert [(r.replayed, r.scores) for r in second.rollouts][3:] == [(True, r.scores) for r in plan.rollouts]
    own.write_text(MODULE + "\n")
    with pytest.raises(ConfigError, match="was changed after the training began"):
        Dataflow(run)


@pytest.mark.parametrize("change", ["own_methods:halves", "megaflow_hpc.training.recipes:shuffled"])
def test_rewards_are_changed_once_in_a_replay_and_in_no_metric(tmp_path: Path, change: str) -> None:
    run = training_run(tmp_path / "run", {"batch": 1, "data": [change, {"replay": 0.5}]}, tasks=1, samples=4)
    pods = Pods(run, lambda r: float(r.sample_index))
    flow = begun(run, pods)
    Step(flow, planned(flow, 1)).commit()
    pods.work()
    second = planned(flow, 2)
    assert [r.replayed for r in second.rollouts] == [False] * 4 + [True] * 4
    assert [r.reward for r in second.rollouts] == [0.0, 1.0, 2.0, 3.0] * 2
    assert Step(flow, second).statistics()["reward"] == 1.5
    own = [r.advantage for r in second.rollouts if r.replayed]
    if change.endswith(":shuffled"):
        assert sorted(own) == [-1.5, -0.5, 0.5, 1.5] != own, "a replay must not learn from true rewards"
    else:
        assert own == [-0.75, -0.25, 0.25, 0.75]
    flow.leave()
    (flow.files.path / "steps" / "000002.json").unlink()  # as if the trainer had been killed before it claimed the plan
    again = Dataflow(run)
    again.start()
    assert again.try_plan(2) == msgspec.structs.replace(second, trainer=2)
    again.leave()


def test_memory_that_runs_out_in_a_function_is_not_its_mistake() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        guarded(Method(name="own_methods:exhausted"))(1)
    with pytest.raises(ConfigError, match="own_methods:broken: raised ZeroDivisionError"):
        guarded(Method(name="own_methods:broken"))(1)
    assert guarded(Method(name="own_methods:exhausted")).__qualname__ == "exhausted"


def test_a_choice_of_prompts_may_request_a_task_several_times() -> None:
    prompts = Prompts(PromptsConfig.model_validate({"order": "own_methods:hardest", "pass_rate": [0, 0.05]}))
    state = prompts.learn({}, [group([1, 1], "a/p"), group([1, 0], "b/p"), group([0, 0], "c/p")])
    assert prompts.choose(["a", "b", "c"], 2, state, np.random.default_rng(0))[0] == ["c", "c"]
    with pytest.raises(ConfigError, match="expected a list of 1 of the tasks passed in"):
        Prompts(PromptsConfig.model_validate({"order": "own_methods:strangers"})).choose(
            ["a"], 1, {}, np.random.default_rng(0)
        )


def training(**fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"policies": {"default": fields}})


def test_every_function_is_tried_on_an_example() -> None:
    good = {"policies": {"default": {"advantage": {"kind": "own_methods:by_turn"}}}, "data": ["own_methods:lighter"]}
    check(TrainingConfig.model_validate({**good, "prompts": {"order": "own_methods:hardest"}}))
    check(training(optimizer={"schedule": "own_methods:halved"}))
    for name in ("judge", "judge_turns", "judge_sequences", "undecided"):
        check(training(score=f"own_methods:{name}"))
    with pytest.raises(Mistakes, match="own_methods:nan_scores: the score of a/default/0 contains nan"):
        check(training(score="own_methods:nan_scores"))
    bad = {**good, "data": ["own_methods:twice"], "prompts": {"order": "own_methods:strangers"}}
    with pytest.raises(Mistakes) as error:
        check(TrainingConfig.model_validate(bad))
    assert [line.split(": ")[1] for line in error.value.found] == ["training.prompts.order", "training.data.0"]
    with pytest.raises(Mistakes, match="the learning rate contains -1e-06, expected numbers of at least 0"):
        check(training(optimizer={"schedule": "own_methods:negative_rate"}))
    assert {len(s.turns) for g in example_groups() for s in g.samples} == {1, 3}


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("nowhere:f", {}, "nowhere: cannot be imported: there is no such module; put nowhere.py next to the campaign"),
        ("own_methods:absent", {}, "absent does not exist in .*own_methods.py"),
        ("own_methods:np", {}, "np is not a function"),
        ("own_methods:centred", {"scael": 1}, "args: got an unexpected keyword argument 'scael'; it takes groups, sca"),
        ("half_written:f", {}, r"cannot be imported: SyntaxError.*"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(tmp_path: Path, name: str, args: Any, error: str) -> None:
    (tmp_path / "half_written.py").write_text("def f(:")
    with pytest.raises(ConfigError, match=error):
        resolve(Method(name=name, args=args))


def test_a_name_without_a_module_is_a_mistake_in_the_file() -> None:
    with pytest.raises(Mistakes, match="expected 'grpo', 'dr_grpo', 'rloo' or 'median'"):
        parse({"training": {"policies": {"default": {"advantage": {"kind": "x"}}}}})


def test_a_changed_file_is_refused_until_it_is_restored(tmp_path: Path, own: Path) -> None:
    training = {"policies": {"default": {"advantage": {"kind": "own_methods:centred"}}}, "batch": 1}
    run = training_run(tmp_path / "run", training)
    run.code.mkdir()
    shutil.copy(own, run.code / "own_methods.py")
    Dataflow(run).start()
    own.write_text("raise SystemExit('the original does not matter any more')")
    sys.modules.pop("own_methods", None)
    Dataflow(run)
    (run.code / "own_methods.py").write_text(MODULE + "\n")
    with pytest.raises(ConfigError, match=r"code/own_methods\.py: was changed after .*restore it, or"):
        Dataflow(run)
    (run.code / "own_methods.py").write_text(MODULE)
    Dataflow(run)
    sys.path.remove(str(run.code))


HELPERS = {
    "own_user.py": """
import importlib.metadata, numpy
import own_pack.inner
import own_gone


def f(groups):
    import own_late
""",
    "own_late.py": "from own_star import *",
    "own_star/__init__.py": "",
    "own_star/part.py": "",
    "own_pack/__init__.py": "try:\n    import own_optional\nexcept ImportError:\n    pass",
    "own_pack/inner.py": "from . import near\nfrom .near import x\nfrom .. import beyond",
    "own_pack/near.py": "x = 1",
    "own_pack/apart.py": "",
    "own_space/leaf.py": "",
    "own_apart.py": "",
}


def helpers(tmp_path: Path) -> None:
    for name, text in HELPERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sys.modules.pop("own_user", None)


def test_the_digests_of_a_function_cover_the_users_modules_that_it_imports(tmp_path: Path) -> None:
    helpers(tmp_path)
    (of_function,) = digests([Method(name="own_user:f")]).values()
    assert sorted(of_function) == [
        *("own_late", "own_pack", "own_pack.inner", "own_pack.near", "own_star", "own_star.part", "own_user"),
    ]
    (tmp_path / "own_pack/near.py").write_text("from own_space import leaf")
    assert digests([Method(name="own_user:f")])["own_user"].keys() - of_function.keys() == {"own_space.leaf"}


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("own_pack/near.py", "x = 2", r"own_pack/near\.py: was changed after .*; restore it, or"),
        ("own_late.py", None, "own_late, which own_user imports, was changed after .*, none now"),
        ("own_optional.py", "", r"own_optional\.py: was changed after the training began \(SHA-256 none then"),
        ("own_apart.py", "x = 2", None),
        ("own_pack/apart.py", "x = 2", None),
    ],
)
def test_a_changed_helper_module_is_refused_until_it_is_restored(
    tmp_path: Path, name: str, text: str | None, error: str | None
) -> None:
    helpers(tmp_path)
    run = training_run(tmp_path / "run", {"policies": {"default": {"advantage": {"kind": "own_user:f"}}}, "batch": 1})
    Dataflow(run).start()
    before = HELPERS.get(name)
    for content in (text, before):
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(content)
        importlib.invalidate_caches()
        if error and content == text:
            with pytest.raises(ConfigError, match=error):
                Dataflow(run)
        else:
            Dataflow(run)


def test_the_scorer_of_a_plan_is_named_with_the_modules_that_it_imports(tmp_path: Path) -> None:
    helpers(tmp_path)
    before = identity(Method(name="own_user:f"))
    (tmp_path / "own_star/part.py").write_text("x = 1")
    assert identity(Method(name="own_user:f")).partition(" ")[0] == before.partition(" ")[0] == "own_user:f"
    assert identity(Method(name="own_user:f")) != before


def test_this_packages_own_functions_have_no_digest() -> None:
    config = training(advantage={"kind": "megaflow_hpc.training.trainer.probe:check"})
    assert digests(methods_of(config).values()) == {}


def test_a_function_that_exits_is_an_error() -> None:
    """It would end the process as if all was done."""
    with pytest.raises(ConfigError, match=r"own_methods:leaves: raised SystemExit\(0\)"):
        call(Method(name="own_methods:leaves"), [])


def test_advantages_of_turns_reach_the_tokens_of_a_step(tmp_path: Path) -> None:
    training = {"policies": {"default": {"advantage": {"kind": "own_methods:by_turn"}}}, "batch": 1}
    run = training_run(tmp_path / "run", training, tasks=1, samples=2)
    flow = Dataflow(run)
    flow.start()
    assert flow.try_plan(1) is None
    pods = Pods(run, float)
    for block in read_blocks(run):
        for rollout in block.rollouts:
            helper, one, two = (TokenSequence(policy) for policy in ("helper", "default", "default"))
            for s in (helper, one, two):
                s.tokens.extend(range(6))
                s.logprobs.extend([math.nan, math.nan, -1.0, -1.0, math.nan, -1.0])
                s.loss_mask.extend([0, 0, 1, 1, 0, 1])
                s.weight_versions.extend([-1, -1, 0, 0, -1, 0])
            spans = [(1, 2, 4), (0, 2, 4), (2, 2, 4), (1, 5, 6), (2, 5, 6)]
            turns = [Turn(sequence, start, end) for sequence, start, end in spans]
            more = {"reward": 1.0, "rewards": {}, "sequences": [helper, one, two], "turns": turns}
            pods.store(block.number, Trajectory.begin(rollout, 0, "completed", **more))
    pods._journal.commit()
    plan = planned(flow, 1)
    first = plan.rollouts[0]
    assert first.turns == [(0, 2, 4), (1, 2, 4), (0, 5, 6), (1, 5, 6)]
    assert first.advantages == [0.0, 20.0, 30.0, 40.0]
    assert first.advantage == pytest.approx((2 * 0 + 2 * 20 + 30 + 40) / 6)
    (batch,) = Step(flow, plan).minibatch([0]).microbatches(100)
    assert batch.advantages.reshape(2, 6).tolist() == [[0, 0, 0, 0, 0, 30], [0, 0, 20, 20, 0, 40]]
    flow.close()
