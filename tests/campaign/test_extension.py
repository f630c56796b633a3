"""Tasks and samples added to a run, and edits of a campaign file that a run does not follow."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from megaflow_hpc.campaign import extension, plan
from megaflow_hpc.campaign.extension import Extension, extend
from megaflow_hpc.campaign.facade import Campaign, Run
from megaflow_hpc.campaign.planning.draft import Draft
from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.overrides import override
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.slurm import site
from tests.support.campaigns import Make, planned, rows
from tests.support.harbor_tasks import write_solved_task


def edit(campaign: Path, before: str, after: str) -> None:
    text = campaign.read_text()
    assert before in text
    campaign.write_text(text.replace(before, after))


@pytest.mark.slow
def test_tasks_and_samples_of_an_edited_file_are_added_to_a_finished_run_and_nothing_runs_twice(
    make_campaign: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = make_campaign(2, agent="oracle")
    run = planned(campaign)
    assert extend(run) == Extension([], 0)
    run.start("local")
    assert run.wait(timeout_s=120)["rollouts"]["completed"] == 2
    write_solved_task(campaign.parent / "tasks", "task9")
    with open(campaign, "a") as file:
        file.write("samples: 3\n")

    assert main(["extend", str(run.path)]) == 0
    assert "added 1 tasks and 7 rollouts" in capsys.readouterr().out
    again = Run(run.path)
    assert again.status()["rollouts"]["total"] == 9
    assert (again.record.config.samples, len(planned_tasks(again.dir, again.record))) == (3, 3)
    assert again.status()["warnings"] == again.edits.campaign_keys() == []
    monkeypatch.setattr(site, "has_slurm", lambda: True)
    assert again.resume(), "a run that has only run on this machine continues there"
    assert again.local is not None
    summary = again.wait(timeout_s=120)
    assert (summary["state"], summary["rollouts"]["completed"]) == ("finished", 9)
    names = {f"{task}/oracle/{sample}" for task in ("task0", "task1", "task9") for sample in range(3)}
    assert rows(run.path) == dict.fromkeys(names, ("completed", 1))
    assert extend(Run(run.path)) == Extension([], 0)


def test_a_run_of_some_tasks_is_extended_by_their_samples_only(
    make_campaign: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign(3, agent="oracle")
    run = Campaign.from_yaml(campaign).plan(only=["task1", "task2/oracle/0"], launcher="local")
    assert main(["extend", str(run.path)]) == 0
    assert "nothing to add: the run has every rollout of the file that --only task1 task2/oracle/0 selects" in (
        capsys.readouterr().out
    )
    write_solved_task(campaign.parent / "tasks", "task9")
    with open(campaign, "a") as file:
        file.write("samples: 2\n")
    assert extend(run) == Extension([], 1)
    final = Run(run.path)
    ids = sorted(rollout.id for block in read_blocks(run.dir) for rollout in block.rollouts)
    assert ids == ["task1/oracle/0", "task1/oracle/1", "task2/oracle/0"]
    assert (final.record.total, [*planned_tasks(final.dir, final.record)]) == (3, ["task1", "task2"])


@pytest.mark.parametrize("step", ["append_tasks", "write_run", "write_blocks", "write_atomic"])
def test_an_extension_that_is_killed_can_be_repeated(
    make_campaign: Make, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = make_campaign(2, agent="oracle")
    run = planned(campaign)
    write_solved_task(campaign.parent / "tasks", "task9")
    with open(campaign, "a") as file:
        file.write("samples: 2\n")
    real = getattr(extension, step)

    def killed(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extension, step, killed)
        with pytest.raises(KeyboardInterrupt):
            extend(run)
    halfway = Run(run.path)
    assert set(planned_tasks(halfway.dir, halfway.record)) >= {"task0", "task1"}
    assert halfway.status()["state"] == "planned"
    extend(halfway)
    final = Run(run.path)
    assert set(planned_tasks(final.dir, final.record)) == {"task0", "task1", "task9"}
    assert final.status()["rollouts"]["total"] == 6
    assert extend(final) == Extension([], 0)


def test_two_extensions_at_once_add_each_rollout_once(make_campaign: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = make_campaign(2, agent="oracle")
    run = planned(campaign)
    write_solved_task(campaign.parent / "tasks", "task9")
    (campaign.parent / "tasks" / "broken").mkdir()
    (campaign.parent / "tasks" / "broken" / "task.toml").write_text("schema_version = 7")
    with open(campaign, "a") as file:
        file.write("samples: 2\n")
    both, make = Barrier(2), plan.make

    def together(*arguments: Any, **options: Any) -> Draft:
        draft = make(*arguments, **options)
        both.wait(60)
        return draft

    monkeypatch.setattr(plan, "make", together)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(extend, Run(run.path)) for _ in range(2)]
    (refused,) = [error for each in tries if (error := each.exception())]
    assert "another process changes this run; nothing was added" in str(refused)
    final = Run(run.path)
    assert [*planned_tasks(final.dir, final.record)] == ["task0", "task1", "task9"]
    ids = [rollout.id for block in read_blocks(run.dir) for rollout in block.rollouts]
    assert (len(ids), len(set(ids)), final.record.total, final.record.left_out) == (6, 6, 6, 1)


def test_another_image_of_a_planned_task_is_refused(make_campaign: Make, base_sif: Path, tmp_path: Path) -> None:
    """Its rollouts would keep the earlier image, whatever run.json said."""
    campaign = make_campaign(1, agent="oracle")
    run = planned(campaign)
    shutil.copy(base_sif, tmp_path / "other.sif")
    edit(campaign, str(base_sif), str(tmp_path / "other.sif"))
    line = next(n for n, text in enumerate(campaign.read_text().splitlines(), 1) if "images:" in text)
    with pytest.raises(ConfigError, match=rf"{campaign.name}:{line}: environment.images: task0 was planned with "):
        extend(run)
    assert read_run(run.dir).source == run.record.source


def test_other_edits_are_refused_with_their_line_and_change_nothing(make_campaign: Make) -> None:
    campaign = make_campaign(1, agent="oracle")
    run = planned(campaign)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with open(campaign, "a") as file:
        file.write("samples: 2\nseed: 7\n")
    line = len(campaign.read_text().splitlines())
    with pytest.raises(ConfigError, match=rf"{campaign.name}:{line}: seed: not as it was planned.*undo the edit"):
        extend(run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert read_run(run.dir).total == 1


def test_a_running_pod_keeps_a_run_from_being_extended(make_campaign: Make) -> None:
    campaign = make_campaign(1, agent="oracle", solution="sleep 30")
    run = planned(campaign)
    run.start("local")
    assert run.local is not None
    try:
        while not run.ledger.leases():
            assert run.local.look(), "the pod has ended"
            os.sched_yield()
        with pytest.raises(ConfigError, match=r"1 pods are queued or running .* stop them first"):
            extend(Run(run.path))
    finally:
        run.local.stop()


def test_resume_names_the_edited_keys_and_what_to_do(
    make_campaign: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = make_campaign(1, agent="oracle")
    run = planned(campaign)
    assert run.edits.campaign_keys() == []
    with open(campaign, "a") as file:
        file.write("samples: 2\nlimits: {wall: 3}\nseed: 3\nslurm: {pods: {time: 60, count: 2}}\n")

    def refuse(*_: object, **__: object) -> bool:
        raise ConfigError("not started")

    monkeypatch.setattr(Run, "resume", refuse)
    assert main(["resume", str(run.path)]) == 2
    said = capsys.readouterr().err
    unchanged = "edited after planning, which does not change the run"
    assert f"{campaign}: samples: {unchanged}; change it with: megaflow-hpc extend {run.path}\n" in said
    assert f"{campaign}: limits.wall: {unchanged}; change it with: megaflow-hpc resume --limit\n" in said
    assert f"{campaign}: slurm.pods.time: {unchanged}; change it with: megaflow-hpc resume --time, --mem or" in said
    assert f"{campaign}: slurm.pods.count: {unchanged}; change it with: megaflow-hpc scale --pods\n" in said
    assert f"{campaign}: seed: {unchanged}; undo the edit, or plan a new run\n" in said
    override(run.dir, run.record.config, {"pods": {"time": "60"}})
    CampaignBudget(run.dir, {}).raise_to({"wall": 3.0})
    assert main(["resume", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert "slurm.pods.time" not in said
    assert "limits.wall" not in said
    assert f"{campaign}: slurm.pods.count: {unchanged}" in said
