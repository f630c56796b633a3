"""Another user who may write beside a run directory puts a directory of theirs in its place: nothing in it is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.private import who_may_replace
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm import script
from megaflow_hpc.training.dataflow import Dataflow
from tests.support.campaigns import Make, verb
from tests.support.places import ROOT
from tests.support.second_user import as_second_user

SWAP = """
import json, os, sys
told = json.load(sys.stdin)
os.umask(0)
run = told["run"]
if os.path.lexists(run):
    os.rename(run, run + ".gone")
if told["link"]:
    os.symlink(told["link"], run)
else:
    os.mkdir(run, 0o777)
    for name, text in told["files"].items():
        os.makedirs(os.path.dirname(os.path.join(run, name)), exist_ok=True)
        with open(os.path.join(run, name), "w") as file:
            file.write(text)
print("{}")
"""
ROLES: list[script.Role] = ["pods", "servers", "trainer", "gather"]


def swap(run: Path, files: dict[str, str], link: str = "") -> None:
    as_second_user(SWAP, {"run": str(run), "files": files, "link": link})


@pytest.fixture
def beside(place: Path) -> Path:
    """A directory in which everybody may rename what is there, as members of a group may in a project directory."""
    folder = place / "runs"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def batch(role: script.Role, run: Path, given: bool) -> subprocess.CompletedProcess[str]:
    """Runs a batch script as Slurm would; ``given``: the run directory is its argument, as by hand."""
    text = script.script(script.Job(role, {}, run=None if given else str(run)))
    return subprocess.run(
        ["bash", "-c", text, "job", str(run)], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("given", [False, True], ids=["submitted", "by hand"])
@pytest.mark.parametrize("role", ROLES)
def test_no_batch_script_sources_a_file_of_another_user(
    role: script.Role, given: bool, beside: Path, tmp_path: Path
) -> None:
    run, mark = beside / "run", tmp_path / "sourced"
    run.mkdir(mode=0o700)
    swap(run, {"env.sh": f"echo stolen >{mark}; exit 0\n"})
    done = batch(role, run, given)
    assert not mark.exists()
    assert done.returncode == 2
    assert f"{run}: " in done.stderr
    assert "another user" in done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_no_batch_script_sources_what_another_user_links_to(role: script.Role, beside: Path, tmp_path: Path) -> None:
    """The directory is the user's own and open to others, and the file in it is not theirs; or a link of theirs."""
    mark, mine = tmp_path / "sourced", beside.parent / "mine"
    mine.mkdir()
    mine.chmod(0o777)
    swap(mine / "put", {"env.sh": f"echo stolen >{mark}; exit 0\n"})
    as_second_user(
        "import json, os, sys; at = json.load(sys.stdin); os.symlink(at + '/put/env.sh', at + '/env.sh'); print(0)",
        str(mine),
    )
    swap(beside / "run", {}, link=str(mine))
    assert batch(role, beside / "run", given=False).returncode == 2
    assert not mark.exists()


@pytest.mark.parametrize("role", ROLES)
def test_a_batch_script_sources_the_file_of_its_own_user(role: script.Role, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "env.sh").write_text(f"pwd >{tmp_path}/sourced; exit 7\n")
    assert batch(role, run, given=False).returncode == 7
    assert (tmp_path / "sourced").read_text().strip() == str(ROOT)  # not elsewhere than where the job was submitted


def test_every_script_of_the_package_checks_before_it_sources() -> None:
    """No line of a script sources a file that was not checked; the one that builds images sources none."""
    texts = [script.script(script.Job(role, {}, run="/RUN")) for role in ROLES]
    texts += [path.read_text() for path in (ROOT / "sbatch").glob("*.sbatch") if path.stem != "build_images"]
    for text in texts:
        sources = re.findall(r"(?:^[ \t]*|[;&|] *|(?:then|else|do) +)(?:source|\.) ([^;\n]*)", text, re.MULTILINE)
        assert sources == ['"/dev/fd/$own/env.sh"']


def test_no_process_of_a_job_reads_a_run_directory_of_another_user(
    beside: Path, tmp_path: Path, make_campaign: Make
) -> None:
    """All of them load classes that run.json names, or ask Slurm for what it says."""
    planned = Campaign.from_yaml(make_campaign()).plan(tmp_path / "run", launcher="local")
    run = beside / "run"
    swap(run, {"run.json": planned.dir.run_json.read_text(), "batch.json": "{}"})
    for module, *words in (["pod"], ["model.server", "--index", "0"], ["campaign.autoscaler"]):
        command = [sys.executable, "-m", f"megaflow_hpc.{module}", str(run), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode != 0
        assert f"{run}: belongs to" in done.stderr, module
    for name, *words in (["gather"], ["resume"], ["scale", "--pods", "2"], ["cancel"]):
        done = verb(name, run, *words)
        assert done.returncode != 0
        assert f"{run}: belongs to" in done.stderr, name


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o2775, 0o2770, 0o757])
@pytest.mark.parametrize("depth", [1, 3])
def test_plan_refuses_a_run_directory_beside_which_others_may_write(
    mode: int, depth: int, make_campaign: Make, place: Path
) -> None:
    folder = place / "project"
    folder.mkdir()
    folder.chmod(mode)
    run = folder.joinpath(*"ab"[: depth - 1], "run")
    run.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError) as error:
        Campaign.from_yaml(make_campaign()).plan(run, launcher="local")
    assert f"{folder}: " in str(error.value)
    assert f"{mode:04o}" in str(error.value)
    assert re.search(rf"chmod (g-w|o-w|o-w,g-w) {folder}[,;]", str(error.value))
    assert not run.exists()


def test_every_verb_that_looks_ahead_names_such_a_place(make_campaign: Make, place: Path) -> None:
    (place / "project").mkdir()
    (place / "project").chmod(0o775)
    campaign = make_campaign(1, f"run_dir: {place}/project/runs")
    for name, *words in (["check"], ["run", "--dry-run", "--launcher", "local"], ["plan"]):
        done = verb(name, campaign, *words)
        assert done.returncode != 0
        assert f"{place}/project: its group may write to this directory" in done.stderr + done.stdout
        assert not (place / "project" / "runs").exists()


@pytest.mark.parametrize("mode", [0o755, 0o2750, 0o1777, 0o3775, 0o700])
def test_plan_takes_a_run_directory_that_nobody_else_can_replace(mode: int, make_campaign: Make, place: Path) -> None:
    folder = place / "project"
    folder.mkdir()
    folder.chmod(mode)
    before = os.umask(0)  # what plan makes is closed to others all the same
    try:
        run = Campaign.from_yaml(make_campaign()).plan(folder / "runs" / "run", launcher="local")
    finally:
        os.umask(before)
    assert who_may_replace(run.path) == ""
    assert not (folder / "runs").stat().st_mode & 0o022


def test_plan_refuses_a_run_directory_behind_a_link_of_another_user(make_campaign: Make, place: Path) -> None:
    campaign = make_campaign()
    place.chmod(0o1777)
    (place / "mine").mkdir()
    swap(place / "link", {}, link=str(place / "mine"))
    with pytest.raises(ConfigError, match=r"link.*belongs to"):
        Campaign.from_yaml(campaign).plan(place / "link" / "run", launcher="local")
    swap(place / "theirs", {})
    (place / "link2").symlink_to(place / "theirs")
    with pytest.raises(ConfigError, match="theirs"):
        Campaign.from_yaml(campaign).plan(place / "link2" / "run", launcher="local")


def test_resume_refuses_when_others_may_write_beside_the_run(make_campaign: Make, place: Path) -> None:
    (place / "runs").mkdir(mode=0o755)
    run = Campaign.from_yaml(make_campaign()).plan(place / "runs" / "run", launcher="local")
    (place / "runs").chmod(0o775)
    with pytest.raises(ConfigError, match="its group may write"):
        run.resume(launcher="local")


# --- profiles and stores ----------------------------------------------------------------------------------------------


def test_a_site_profile_that_others_may_write_or_in_whose_directory_they_may_is_refused(
    make_campaign: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "group" / "profiles"
    folder.mkdir(parents=True)
    profile = folder / "x.yaml"
    profile.write_text("slurm: {setup: [touch /tmp/never]}\n")
    profile.chmod(0o644)
    monkeypatch.setenv("MEGAFLOW_PROFILES", str(folder))
    campaign = make_campaign(1, "site: x")
    Campaign.from_yaml(campaign)
    for mode in (0o664, 0o646, 0o666):
        profile.chmod(mode)
        with pytest.raises(ConfigError, match=f"{profile}: .*{mode:04o}"):
            Campaign.from_yaml(campaign)
    profile.chmod(0o644)
    Campaign.from_yaml(campaign)
    for writable in (folder, folder.parent):
        writable.chmod(0o2775)
        with pytest.raises(ConfigError, match=f"{writable}: its group may write"):
            Campaign.from_yaml(campaign)
        writable.chmod(0o755)
    folder.chmod(0o1777)  # whoever may add a file adds a profile: one of another name, or of one that is looked for
    as_second_user(
        "import json, os, sys; p = json.load(sys.stdin); open(p, 'w').write('slurm: {}'); os.chmod(p, 0o644); print(0)",
        str(folder / "y.yaml"),
    )
    campaign.write_text(campaign.read_text().replace("site: x", "site: y"))
    with pytest.raises(ConfigError, match=r"y\.yaml"):
        Campaign.from_yaml(campaign)


@pytest.mark.parametrize("part", ["", "..", "sha256", "names", "layers", "steps"])
def test_an_image_store_that_others_may_write_is_refused(part: str, place: Path) -> None:
    root = place / "group" / "store"
    root.parent.mkdir()
    ImageStore(root).prepare("test")
    ImageStore(root)
    (root / part).resolve().chmod(0o2775)
    with pytest.raises(SiteError, match="its group may write") as error:
        ImageStore(root)
    assert f"chmod g-w {(root / part).resolve()}" in str(error.value)


def test_an_engine_pool_that_others_could_have_replaced_is_refused(place: Path) -> None:
    run = place / "runs" / "pool"
    RunDir(run).create()
    pool = EnginePool(run)
    pool.create({"default": 1}, "group")
    assert pool.policy("default") == "default"
    run.parent.chmod(0o2775)
    with pytest.raises(ConfigError, match=f"{run.parent}: its group may write"):
        pool.policy("default")


def test_a_store_made_under_an_open_umask_is_closed_to_others(place: Path) -> None:
    before = os.umask(0)
    try:
        ImageStore(place / "a" / "store").prepare("test")
    finally:
        os.umask(before)
    ImageStore(place / "a" / "store")


def test_no_trainer_takes_a_run_directory_of_another_user(beside: Path) -> None:
    swap(beside / "run", {"run.json": "{}"})
    with pytest.raises(ConfigError, match="belongs to"):
        Dataflow(beside / "run")
