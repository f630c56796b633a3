"""A policy with several agents: each runs every task, and every reader of the run tells them apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaflow_hpc.types import RolloutName
from tests.support.campaigns import Make, rows, run_local, verb
from tests.support.scripted import SOLVE

AGENTS = "[{as: careful, name: mini-swe-agent}, {as: hasty, name: mini-swe-agent, max_turns: 1}]"
MODEL = "samples: 2\nmodel: {engine: scripted, script: answers.yaml}\n"
ARMS = ["default+careful", "default+hasty"]


@pytest.mark.slow
def test_each_agent_runs_every_task_and_has_results_of_its_own(make_campaign: Make, tmp_path: Path) -> None:
    result, done = run_local(make_campaign(2, MODEL, agent=AGENTS, answers=SOLVE))
    assert done.returncode == 0, done.stderr
    run = result["run"]
    ids = [f"task{task}/{arm}/{sample}" for task in range(2) for arm in ARMS for sample in range(2)]
    statuses = {"default+careful": "completed", "default+hasty": "truncated"}
    assert rows(run) == {name: (statuses[name.split("/")[1]], 1.0) for name in ids}
    assert sorted(result["policies"]) == ARMS
    assert [policy["rollouts"] for policy in result["policies"].values()] == [4, 4]
    figures = json.loads(verb("report", run, "--json").stdout)["runs"][0]
    assert [(one["policy"], one["states"]["truncated"]) for one in figures["policies"]] == [(ARMS[0], 0), (ARMS[1], 4)]
    assert verb("export", run, "--format", "preds,atif", "--output", tmp_path / "out").returncode == 0
    assert sorted(os.listdir(tmp_path / "out" / "atif" / "task0")) == ARMS
    files = [f"preds-{arm}-{sample}.json" for arm in ARMS for sample in range(2)]
    assert sorted(name for name in os.listdir(tmp_path / "out") if name.startswith("preds")) == files
    shown = verb("show", run, ids[2], "--json")
    assert json.loads(shown.stdout)["agent"] == "hasty"


def test_an_id_has_task_policy_and_scaffold() -> None:
    parsed = {name: tuple(RolloutName.parse(name)) for name in ("a/b/0", "a@7/b+c/0", "org/a/b+c.d/12", "a/0", "a")}
    assert parsed == {
        "a/b/0": ("a", "b", ""),
        "a@7/b+c/0": ("a", "b", "c"),
        "org/a/b+c.d/12": ("org/a", "b", "c.d"),
        "a/0": ("", "", ""),
        "a": ("", "", ""),
    }
    assert RolloutName.parse("a@7/b+c/0").arm == "b+c"
