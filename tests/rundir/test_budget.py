"""Limits of a whole campaign, summed over the reports of its pods and servers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.config import parse
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.budget import CampaignBudget, Meter, cores_of, gpus_of
from megaflow_hpc.rundir.layout import RunDir
from tests.support.campaigns import forked, verb


def lease(core_s: float, began_at: float | None = None) -> dict[str, float]:
    return {"core_s": core_s, "began_at": time.time() if began_at is None else began_at}


def test_core_hours_are_summed_over_what_the_leases_of_all_pods_say(run: RunDir) -> None:
    budget = CampaignBudget(run, {"core_hours": 2.0})
    assert budget.exceeded({}) == ""
    assert budget.exceeded({"a.0": lease(3600), "b.0": lease(3000)}) == ""
    passed = {"a.0": lease(3600), "b.0": lease(3700)}
    assert budget.exceeded(passed) == "2.03 core-hours are used, limits.core_hours is 2"


def test_the_wall_limit_counts_from_the_first_pod(run: RunDir) -> None:
    budget = CampaignBudget(run, {"wall": 1.0})
    assert budget.exceeded({"b.0": lease(0)}) == ""
    passed = {"b.0": lease(0), "a.0": lease(0, time.time() - 5400)}
    assert budget.exceeded(passed) == "the first pod started 1.50 hours ago, limits.wall is 1"


def test_cores_are_those_of_the_whole_allocation() -> None:
    assert cores_of({"SLURM_JOB_CPUS_PER_NODE": "8(x3),4"}) == 28
    assert cores_of({}) >= 1


def test_gpu_hours_are_those_that_servers_held_over_all_their_starts(run: RunDir) -> None:
    budget = CampaignBudget(run, {"gpu_hours": 1.0})
    assert budget.exceeded({}) == ""
    for server, gpus, held_s in (("a.0", 2, 1000.0), ("a.0", 2, 500.0), ("a.2", 0, 9000.0), ("a.1", 1, 700.0)):
        meter = Meter(run, server, gpus)
        meter._began -= held_s
        assert budget.exceeded({}) == ""
        meter.tick()
    assert budget.exceeded({}) == "1.03 GPU-hours are used, limits.gpu_hours is 1"
    (run.gpus / "a.0.json").write_text('{"gpu_s"')  # half a file; the earlier value still counts
    assert budget.exceeded({}) == "1.03 GPU-hours are used, limits.gpu_hours is 1"


def test_gpus_are_those_that_slurm_gave_the_element() -> None:
    assert gpus_of(1, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}) == 4
    assert gpus_of(1, {"SLURM_GPUS_ON_NODE": "4"}) == 1  # an allocation that servers share
    assert gpus_of(2, {"SLURM_ARRAY_JOB_ID": "7"}) == 2


def test_a_limit_is_raised_for_pods_that_run(run: RunDir) -> None:
    running, leases = CampaignBudget(run, {"core_hours": 1.0}), {"a.0": lease(7200)}
    assert running.exceeded(leases)
    CampaignBudget(run, {"core_hours": 1.0}).raise_to({"core_hours": 3.0})
    assert running.exceeded(leases) == ""
    CampaignBudget(run, {"core_hours": 1.0}).raise_to({"core_hours": None, "wall": 5.0})
    assert running.limits() == {"core_hours": None, "gpu_hours": None, "wall": 5.0, "usd": None}
    for wrong in ({"core_hours": 0.0}, {"failures": 3.0}):
        with pytest.raises(ConfigError, match="limit"):
            running.raise_to(wrong)


@pytest.mark.slow
def test_a_campaign_over_its_gpu_hours_starts_nothing_and_goes_on_when_they_are_raised(
    tmp_path: Path, make_campaign: Callable[..., Path]
) -> None:
    (tmp_path / "answers.yaml").write_text('default: ["42"]\n')
    model = "model: {engine: scripted, script: answers.yaml, gpus: 1}\nlimits: {gpu_hours: 1}\n"
    run = Campaign.from_yaml(make_campaign(1, model, agent="oracle")).plan(launcher="local")
    run.dir.gpus.mkdir()
    (run.dir.gpus / "default.7.json").write_text('{"gpus": 1, "gpu_s": 7200}')  # from an earlier server
    run.start("local")
    status = run.wait(120)
    assert status["state"] == "stopped"
    assert status["rollouts"]["pending"] == 1
    assert status["pods"][0]["why"] == "2.00 GPU-hours are used, limits.gpu_hours is 1"
    with pytest.raises(ConfigError, match=r"2\.00 GPU-hours .* --limit gpu_hours=HOURS"):
        run.resume(launcher="local")
    refused = verb("resume", run.path, "--launcher", "local", "--limit", "gpu_hours=many")
    assert refused.returncode == 2
    done = forked("resume", run.path, "--launcher", "local", "--limit", "gpu_hours=3", "--json")
    status = json.loads(done.stdout)
    assert (status["state"], status["rollouts"]["completed"]) == ("finished", 1)
    assert json.loads((run.dir.gpus / "default.0.json").read_text())["gpu_s"] > 0


ASKER = """
import time
from megaflow_hpc.host.chat import post_chat

class Asker:
    async def run(self, task, sandbox, model):
        await post_chat(model, model.model_name, task.instruction, {}, "asker")
        time.sleep(4)
"""


def test_dollars_are_summed_over_all_pods_and_need_a_price(run: RunDir) -> None:
    budget = CampaignBudget(run, {"usd": 5.0})
    assert budget.exceeded({"a.0": {"usd": 2.0}, "b.0": {"usd": 2.9}, "c.0": {"usd": "many"}}) == ""
    spent = "5.50 US dollars are spent on model calls, limits.usd is 5"
    assert budget.exceeded({"a.0": {"usd": 2.5}, "b.0": {"usd": 3.0}}) == spent
    external = {"engine": "external", "base_url": "http://h"}
    fields = {"name": "x", "tasks": "t", "agent": "mini-swe-agent", "limits": {"usd": 5}}
    for models in ({"model": external}, {"models": {"a": {**external, "price": [1, 0]}, "b": external}}):
        with pytest.raises(ConfigError, match=r"limits\.usd: without model(s\.b)?\.price, calls cost nothing"):
            parse({**fields, **models})
    parse({**fields, "model": {**external, "price": [1, 0]}})


@pytest.mark.slow
def test_a_campaign_that_spent_its_dollars_stops_cleanly_and_goes_on_when_they_are_raised(
    tmp_path: Path, make_campaign: Callable[..., Path]
) -> None:
    (tmp_path / "asker.py").write_text(ASKER)
    extra = """
        model: {engine: scripted, script: answers.yaml, price: [0, 1000000]}  # a dollar for each sampled token
        limits: {usd: 2}
        slurm: {pods: {slots_per_rank: 1}}
        """
    file = make_campaign(8, extra, agent="asker:Asker", answers=["42"])
    checked = verb("check", file, "--no-site")
    assert "limits.usd: 2 is 0.25 US dollars for each of 8 rollouts" in checked.stderr
    run = Campaign.from_yaml(file).plan(launcher="local")
    run.start("local")
    status = run.wait(240)
    assert status["state"] == "stopped"
    assert "US dollars are spent on model calls, limits.usd is 2" in status["pods"][0]["why"]
    assert status["rollouts"]["failed"] == 0
    assert 0 < status["rollouts"]["pending"] < 8
    assert status["spent"]["usd"] >= max(2, status["models"]["default"]["usd"])
    said = verb("status", run.path).stdout
    assert "of 2 US dollars (limits.usd)" in said
    assert re.search(r"model default: \d+ calls, \d+ prompt and \d+ sampled tokens, [0-9.]+ USD", said)
    report = json.loads(verb("report", run.path, "--no-pictures", "--json").stdout)["runs"][0]
    assert report["cost"]["usd"] == pytest.approx(status["spent"]["usd"])
    assert report["models"]["default"]["calls"] == status["models"]["default"]["calls"]
    with pytest.raises(ConfigError, match=r"US dollars are spent .* --limit usd=USD"):
        run.resume(launcher="local")
    done = forked("resume", run.path, "--launcher", "local", "--limit", "usd=none", "--json")
    assert json.loads(done.stdout)["rollouts"]["completed"] == 8
    refused = verb("resume", run.path, "--limit", "usd=much")
    assert "expected dollars above 0, as usd=100" in refused.stderr
