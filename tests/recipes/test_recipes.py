"""Every recipe from ``init --recipe`` to its report, by its rehearsal, and what the verbs say about recipes."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.recipes import find_recipe, recipe_names
from megaflow_hpc.resources import is_installed
from tests.support.campaigns import verb
from tests.support.recipe_environment import initialised, typed
from tests.support.warm import WarmPython


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_a_rehearsal_gives_its_rewards(name: str, recipes_python: WarmPython, base_sif: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for image in ("base.sif", "desktop.sif"):
        (tmp_path / "images" / image).symlink_to(base_sif.with_name(image))
    options = "--games 2" if name == "text-games" else ""  # the other two levels take half a minute to make
    made, recipe = initialised(name, tmp_path, recipes_python, options), find_recipe(name)
    result = json.loads(typed(recipes_python, made, "megaflow-hpc run rehearsal.yaml --launcher local --json").stdout)
    with open_trajectories(result["run"]) as store:
        assert {row.status for row in store} == {"completed"}, [row.trajectory().error for row in store]
        rewards = {row.id: row.reward for row in store}
    left = set(rewards)
    for words, reward in recipe.rehearsal.items():
        ids = fnmatch.filter(rewards, words if "/" in words else f"*/{words}/*")
        assert len(ids) > 1, f"{words}: a slice of one rollout shows little"
        assert round(mean(rewards[id] for id in ids), 3) == reward, {id: rewards[id] for id in ids}
        left -= set(ids)
    assert not left, "no reward is expected of these rollouts"
    first = min(rewards)
    assert first in verb("show", result["run"], first).stdout
    assert verb("report", result["run"], "--no-pictures", "-o", made / "page").returncode == 0
    assert (made / "page" / "index.html").stat().st_size > 10_000
    for command in recipe.after:
        typed(recipes_python, made, command)
    if name == "text-games":
        with open_trajectories(result["run"]) as store:
            seen = [line for m in store[0].trajectory().messages for line in str(m["content"]).splitlines()]
        assert any(line.startswith("-= ") for line in seen)
        assert all(re.search("[A-Za-z]", line) for line in seen), "the banner of a game costs tokens and says nothing"
    if name == "synthesis":
        kept = [json.loads(line)["messages"] for line in (made / "sft.jsonl").read_text().splitlines()]
        assert len(kept) == 9, "one of each kind, although each was answered twice"
        assert all([m["role"] for m in messages] == ["user", "assistant"] for messages in kept)
        assert all("<answer>" in messages[1]["content"] for messages in kept)
    for file in sorted(made.glob("*.yaml")):
        if "slurm" in yaml.safe_load(file.read_text()):
            done = typed(recipes_python, made, f"megaflow-hpc check {file.name} --no-site --json", status=None)
            wrong = json.loads(done.stdout)["mistakes"]
            # The user's model is not here, nor are the data that users bring.
            assert all(
                "model" in line or re.search(r"tasks: .*(no such file|no Harbor task)", line) for line in wrong
            ), wrong


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_complete(name: str) -> None:
    recipe = find_recipe(name)
    assert {"README.md", "campaign.yaml", "rehearsal.yaml"} <= set(recipe.files)
    assert recipe.expected, "an expected figure with its source"
    assert all("arxiv" in e.source.lower() or "https://" in e.source for e in recipe.expected)
    assert set(recipe.rehearsal.values()) >= {0.0, 1.0}, "the reward of a solution and of nothing"
    assert recipe.make or "make.py" not in recipe.files
    assert len(recipe.summary) < 150
    text = (recipe.folder / "README.md").read_text()
    assert all(command in text for command in ("run rehearsal.yaml --launcher local", "run campaign.yaml"))
    assert all(f"{p.name}=={p.version}" in text for p in recipe.needs.packages)
    assert recipe.needs.fetch.format(containers="CONTAINERS") in text
    # Recipes carry no images, and `run` fetches only those with an address.
    if "images/" in (recipe.folder / "rehearsal.yaml").read_text():
        assert recipe.needs.fetch
    # The tests of SWE-bench's files are graded by its package.
    if "swebench" in text:
        assert "swebench" in [package.name for package in recipe.needs.packages]


def test_the_image_of_a_recipe_is_fetched_before_it_is_used(tmp_path: Path) -> None:
    said = verb("init", "--recipe", "bug-repair", tmp_path / "mine").stderr
    assert "mine && mkdir -p images && apptainer pull images/base.sif docker://python:3.12\nthen: megaflow" in said
    definition = re.search(r"cd (\S+) && apptainer build", find_recipe("desktop").fetch)
    assert definition is not None
    assert Path(definition[1], "desktop.def").exists()


def test_the_verb_lists_and_shows_recipes() -> None:
    listed = verb("recipes")
    assert all(name in listed.stdout for name in recipe_names())
    [shown] = json.loads(verb("recipes", "reasoning", "--json").stdout)
    assert shown["needs"]["packages"][0]["name"] == "reasoning-gym"
    assert shown["commands"][-1] == "megaflow-hpc run campaign.yaml"
    assert "recipe.toml" not in shown["files"]
    assert "megaflow-hpc init --recipe reasoning && cd reasoning" in verb("recipes", "reasoning").stdout


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path) -> None:
    """The environment of the tests has no reasoning-gym."""
    done = verb("init", "--recipe", "reasoning", tmp_path / "mine")
    assert done.returncode == 0
    assert "next: cd " in done.stderr
    assert "pip install reasoning-gym==0.1.25" in done.stderr
    made = subprocess.run(
        [sys.executable, "make.py"], cwd=tmp_path / "mine", capture_output=True, text=True, check=False
    )
    assert made.returncode == 1
    assert made.stderr == "error: this recipe needs reasoning-gym: pip install reasoning-gym==0.1.25\n"
    checked = verb("check", tmp_path / "mine" / "campaign.yaml", "--no-site")
    assert checked.returncode == 2
    assert "test.jsonl: make it with: python " in checked.stdout + checked.stderr


def test_a_directory_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning_gym").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert [package.name for package in find_recipe("reasoning").missing] == ["reasoning-gym"]
    assert is_installed("json")
    assert not is_installed("reasoning_gym_too")


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "campaign.yaml").write_text("mine")
    done = verb("init", "--recipe", "reasoning", tmp_path)
    assert done.returncode == 2
    assert "campaign.yaml: exists already; name another directory" in done.stderr
    assert sorted(tmp_path.iterdir()) == [tmp_path / "campaign.yaml"], "nothing was written"
    assert verb("init", "--recipe", "reasoning", tmp_path, "--force").returncode == 0
    assert verb("init", "--recipe", "reasoning", tmp_path / "README.md").returncode == 2


def test_links_and_directories_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "campaign.yaml").symlink_to("not-mounted/campaign.yaml")
    done = verb("init", "--recipe", "bug-repair", tmp_path)
    assert (done.returncode, "campaign.yaml: exists already" in done.stderr) == (2, True)
    assert (tmp_path / "campaign.yaml").is_symlink()
    mine = tmp_path / "mine"
    (mine / "bugs.yaml").mkdir(parents=True)
    done = verb("init", "--recipe", "bug-repair", mine, "--force")
    assert (done.returncode, "bugs.yaml: is a directory" in done.stderr) == (2, True), done.stderr
    (mine / "bugs.yaml").rmdir()
    (tmp_path / "slice").write_text("mine")
    done = verb("init", "--recipe", "terminal-bench-2", tmp_path, "--force")
    assert (done.returncode, "slice: is a file" in done.stderr) == (2, True), done.stderr
    assert list(mine.iterdir()) == [], "nothing was written"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_recipe_gets_the_partitions_and_the_account_of_the_site(tmp_path: Path) -> None:
    written = tmp_path / "own"
    assert verb("init", written.parent / "own.yaml").returncode == 0
    expected = yaml.safe_load((tmp_path / "own.yaml").read_text())["slurm"]
    assert verb("init", "--recipe", "reasoning", written).returncode == 0
    for file, roles in {"campaign.yaml": ("pods", "servers"), "training.yaml": ("pods", "servers", "trainer")}.items():
        found = yaml.safe_load((written / file).read_text())["slurm"]
        assert found["account"] == expected["account"]
        assert "# also: " in (written / file).read_text(), "the lab has partitions for pods other than cpu"
        assert {role: found[role]["partition"] for role in roles} == {
            role: expected["servers" if role == "trainer" else role]["partition"] for role in roles
        }
    assert found["pods"]["slots_per_rank"] == 256, "what the recipe sets stays"
