"""Campaigns with a team: what is refused, and a run from the file to the stored rewards of each role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.config import CampaignConfig, parse, resolved
from megaflow_hpc.errors import ConfigError
from tests.support.campaigns import forked, run_local, verb

MODEL = {"engine": "vllm", "path": "/models/m"}
FIELDS: dict[str, Any] = {
    "name": "pair",
    "tasks": "tasks",
    "agent": "megaflow_hpc.agents.teams:WriterChecker",
    "samples": 4,
    "models": {"author": MODEL, "second": MODEL},
    "team": {"writer": "author", "checker": {"policy": "second", "reward": "right"}},
}
TASKS = """\
class Sum:
    image = "none"
    instruction = "What is 2 + 2?"

    async def score(self, sandbox, messages, roles):
        answers = [message["content"] for message in roles["writer"] if message["role"] == "assistant"]
        verdict = roles["checker"][-1]["content"]
        assert messages == roles["writer"], messages
        correct = answers[-1] == "4"
        return {"reward": float(correct), "right": float((verdict == "yes") == correct)}
"""


def test_only_the_owner_runs_rollouts() -> None:
    campaign = parse(FIELDS)
    assert {name: policy.samples for name, policy in campaign.policies().items()} == {"author": 4, "second": 0}
    assert campaign.team
    assert (campaign.team.owner, campaign.team.owning_policy) == ("writer", "author")
    assert parse({**FIELDS, "team": {"checker": "second", "writer": "author"}}).policies()["second"].samples == 4
    stored = json.loads(json.dumps(campaign.model_dump(mode="json"), sort_keys=True))
    again = resolved(CampaignConfig, stored)
    assert again == campaign
    assert again.team
    assert again.team.owner == "writer", "a run's file does not keep the order of roles"
    # Trainers give the tasks to its agents by their shares, even if only another role is trained.
    agents = [{"name": "nop", "share": 2}, "oracle"]
    assert parse({**FIELDS, "agent": agents, "training": {"policies": {"second": {}}}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"team": {}}, "team: names no role; write team: {writer: default}"),
        (
            {"team": {"writer": "nobody"}},
            "writer.policy: 'nobody' is not a model; .* author, sec",
        ),
        (
            {"team": {"a": "author", "b": "c", "c": "b"}},
            "team.b.policy: 'c' is another role, and a role needs a model",
        ),
        ({"team": {"a/b": "author"}}, "role 'a/b' must be letters"),
        ({"team": {"writer": "author"}}, "models.second: has no role in team; give it one"),
        ({"team": {"roles": FIELDS["team"]}}, "team: roles: write the roles directly, the owner first"),
        ({"team": {"roles": FIELDS["team"], "owner": "editor"}}, "team: roles: write the roles directly"),
        (
            {"models": {"author": MODEL, "second": {**MODEL, "samples": 2}}},
            "models.second.samples: only role 'writer' runs rollouts",
        ),
        (
            {"models": {"author": MODEL, "second": {**MODEL, "agent": "nop"}}},
            "models.second.agent: only role 'writer' runs rollouts",
        ),
        (
            {"models": {"author": MODEL, "second": {**MODEL, "judge": True}}},
            "team.checker.policy: 'second' is a judge, which agents cannot call; leave judge out",
        ),
        (
            {"training": {"policies": {"author": {"snapshot": {"author": 10}}}}},
            "training.policies.author.snapshot: 'author': expected a model that is not trained",
        ),
        (
            {"agent": ["nop", {"as": "writer", "name": "oracle"}]},
            "team: 'writer' is also the name of an agent, and both have a metric of that name",
        ),
        (
            {"samples": 1, "training": {"policies": {"second": {}}}},
            "training.policies.second: a group of one sample has nothing to compare with",
        ),
        (
            {
                "models": {"author": {**MODEL, "agent": {"name": "a:B", "args": {"top_p": 0.9}}}, "second": MODEL},
                "training": {"policies": {"second": {}}},
            },
            "agent.args.top_p 0.9: a trained policy is sampled with 1",
        ),
        (
            {"scheduling": {"signal_after": 2}},
            "scheduling.signal_after: it compares the rollouts' own rewards, .* role 'checker' differ; leave it out",
        ),
        (
            {"training": {"policies": {"author": {}, "second": {"mix_agents": True}}}},
            "training.policies.second.mix_agents: all policies of a team are trained on the same groups",
        ),
        (
            {
                "models": {"author": {**MODEL, "args": {"enable-lora": True}}, "second": MODEL},
                "training": {"policies": {"author": {"lora": 32, "snapshot": {"second": 10}}}},
            },
            r"snapshot: 'second' would get adapters \(lora\); start its engine for them too",
        ),
    ],
)
def test_a_wrong_team_is_refused_before_anything_is_planned(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({**FIELDS, **changes})


def test_a_score_that_needs_roles_is_refused_without_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(TASKS + TASKS.replace("Sum", "Open").replace("roles)", "roles=None)"))
    fields = {name: value for name, value in FIELDS.items() if name not in ("team", "models")}
    (tmp_path / "campaign.yaml").write_text(
        yaml.safe_dump({**fields, "agent": "oracle", "tasks": ["sums:Sum", "sums:Open"]})
    )
    done = forked("check", tmp_path / "campaign.yaml", "--no-site")
    assert done.returncode == 2
    assert "the score of 1 tasks takes the roles of a team (Sum)" in done.stdout + done.stderr
    validated = forked("tasks", "validate", "sums:Sum", "--json")
    assert "takes the roles of a team" in validated.stdout + validated.stderr, validated


@pytest.mark.slow
def test_a_writer_and_a_checker_from_the_file_to_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # reverify imports the task from here
    (tmp_path / "sums.py").write_text(TASKS)
    for name, answers in {
        "author": [{"pattern": "rejects", "answers": ["5", "4"]}, {"when": "2 + 2", "answers": ["5"]}],
        "second": [{"pattern": "\n5\n", "answers": ["no"]}, {"when": "right?", "answers": ["yes"]}],
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"tasks": answers}))
    models = {name: {"engine": "scripted", "script": f"{name}.yaml"} for name in ("author", "second")}
    fields = {**FIELDS, "tasks": "sums:Sum", "samples": 2, "models": models}
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        rows = sorted(store, key=lambda row: row.id)
        assert [row.id for row in rows] == ["Sum/author/0", "Sum/author/1"]
        for row in rows:
            trajectory = row.trajectory()
            assert [turn.role for turn in trajectory.turns] == ["writer", "checker"] * 2
            assert [s.policy for s in trajectory.sequences if len(s.tokens)] == ["author", "second", "second"]
            assert len(trajectory.sequences) == 3
            assert row.rewards == {"reward": 1.0, "right": 1.0}
    shown = verb("show", result["run"], "Sum/author/0", "--json")
    assert {one["role"] for one in json.loads(shown.stdout)["conversations"]} == {"writer", "checker"}
    # Scored again, a rollout has the roles that it had.
    (tmp_path / "rating.py").write_text("def score(roles): return len(roles['writer']) - len(roles['checker'])\n")
    for scorer, mean in ([], 1.0), (["--with", tmp_path / "rating.py"], 2.0):
        again = json.loads(forked("reverify", result["run"], *scorer, "--json").stdout)
        assert (again["scored"], again["mean"]) == (2, mean)


TALK = """\
class Talk:
    image = "base"
    instruction = "What is 2 + 2?"

    async def score(self, sandbox, roles):
        decisive = next(role for role in ("judge", "executor", "player", "solver", "small") if role in roles)
        answers = {role: [each for each in own if each["role"] == "assistant"] for role, own in roles.items()}
        correct = answers[decisive][-1]["content"] in ("4", "Hm.\\nyes")
        return {"reward": float(correct), **{role: float(len(own)) for role, own in answers.items()}}
"""
ANSWERS = {
    "Argue": ["Even so."],
    "Is the claim true": ["Hm.\nyes"],
    "Plan how": ["Write 4."],
    "The plan is": ["```bash\necho 4 > answer\n```", "4"],
    "Answer it. Or divide": ["PART: one\nPART: two", "4"],
    "Answer it.": ["1"],
    "Is this hard": ["no"],
    "What is 2": ["4"],
}
PLAYED = {
    "Debate": {"pro": 2, "contra": 2, "judge": 1},
    "PlannerExecutor": {"planner": 1, "executor": 2},
    "SelfPlay": {"player": 4, "opponent": 4},
    "Recursive": {"solver": 2},
    "ModelRouter": {"router": 1, "small": 1},
}
"""Example agent → the answers in each role's latest conversation."""


@pytest.mark.slow
def test_the_example_agents_have_tasks_with_a_reward_for_each_role(tmp_path: Path, base_sif: Path) -> None:
    """All in one campaign, whose roles are those of all agents. Roles share two models."""
    (tmp_path / "talks.py").write_text(TALK)
    tasks = [{"when": text, "answers": answers} for text, answers in ANSWERS.items()]
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    roles = ["large", *(role for played in PLAYED.values() for role in played)]
    fields: dict[str, Any] = {
        "name": "talks",
        "tasks": "talks:Talk",
        "agent": [{"as": name, "name": f"megaflow_hpc.agents.teams:{name}"} for name in PLAYED],
        "models": {name: {"engine": "scripted", "script": "answers.yaml"} for name in ("even", "odd")},
        "team": {role: ("even", "odd")[number % 2] for number, role in enumerate(roles)},
        "environment": {"network": "none", "images": {"base": str(base_sif)}},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        assert {row.agent: (row.error, row.rewards) for row in store} == {
            name: ("", {"reward": 1.0, **played}) for name, played in PLAYED.items()
        }
        for row in store:
            played = {(turn.role, turn.policy) for turn in row.turns}
            assert {role for role, _ in played} == {*PLAYED[row.agent]}
            assert played <= {*fields["team"].items()}
            assert all(turn.sequence >= 0 for turn in row.turns), "every call has its tokens"
