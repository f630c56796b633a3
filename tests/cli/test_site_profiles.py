"""Site profiles that the package ships: each is valid, a whole campaign is planned with it, and ``init`` offers it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import config
from megaflow_hpc.config import site_profile
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.slurm import site
from tests.support.places import ROOT

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]
SHIPPED = sorted(path.stem for path in site_profile.SHIPPED.glob("*.yaml"))
PUBLIC = [name for name in SHIPPED if name != "ubuntu2404"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without profiles, on a machine that no profile knows."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MEGAFLOW_PROFILES", "NERSC_HOST", "LMOD_SYSTEM_NAME", "SYSTEMNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "login1.nowhere.edu")
    own = tmp_path / "config" / "megaflow-hpc" / "sites"
    own.mkdir(parents=True)
    return own


def slurm_of(folder: Path, cluster: str, partitions: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts programs with Slurm's names on PATH that know these partitions, all of nodes with GPUs."""
    folder.mkdir()
    printed = {
        "sinfo": "".join(f"{name}|{name}|up|64|512|999000|gpu:8|1-00:00:00\n" for name in sorted(partitions)),
        "scontrol": f"ClusterName = {cluster}\nMaxArraySize = 501\nAccountingStorageEnforce = none\n",
        "squeue": "",
        "srun": "MPI plugin types are...\n\tpmi2\n",
        "sacctmgr": "",
        "sbatch": "",
    }
    for name, text in printed.items():
        (folder / name).write_text(f"#!/bin/sh\nprintf %s {shlex.quote(text)}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("MEGAFLOW_MPI", "pmi2")
    for value in vars(site).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def partitions(value: object) -> set[str]:
    """All values of ``partition`` in a section."""
    if not isinstance(value, dict):
        return set()
    found = set().union(*(partitions(each) for each in value.values()))
    return found | ({value["partition"]} if isinstance(value.get("partition"), str) else set())


def test_there_is_a_profile_and_a_page_for_each_site() -> None:
    assert SHIPPED == ["frontier", "jupiter", "juwels", "leonardo", "lumi", "perlmutter", "ubuntu2404"]
    index = (ROOT / "docs" / "sites" / "index.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in SHIPPED:
        head = (site_profile.SHIPPED / f"{name}.yaml").read_text().split("recognise:")[0]
        assert "not been tested" in head, "a profile says first that it was never tested"
        assert f"docs/sites/{name}.md" in head
        page = (ROOT / "docs" / "sites" / f"{name}.md").read_text()
        assert f"site: {name}" in page
        assert f"({name}.md)" in index
        assert f"sites/{name}.md" in navigation


@pytest.mark.parametrize("name", SHIPPED)
def test_a_whole_campaign_is_planned_with_a_profile_and_each_job_asks_for_its_partition(
    name: str, campaign: Path, megaflow: Megaflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = site_profile.find(name, "test").fields["slurm"]
    slurm_of(tmp_path / "slurm", name, partitions(slurm) or {"any"}, monkeypatch)
    (tmp_path / "model").mkdir()
    text = campaign.read_text().replace("agent: [oracle, nop]", "agent: oracle")
    model = "model: {path: model, gpus: 4}\nsamples: 4\ntraining: {policies: {default: }}\n"
    campaign.write_text(f"{text}site: {name}\n{model}slurm: {{account: project}}\n")
    loaded = config.load(campaign)
    assert loaded.slurm.extra == {"account": "project"}
    assert loaded.slurm.pods.ranks_per_node == slurm["pods"]["ranks_per_node"]
    done = megaflow("submit", campaign, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    scripts = json.loads(done.stdout)["scripts"]
    roles = {script.partition("-")[0]: text for script, text in scripts.items()}
    assert len(roles) == 4
    for role in ("pods", "servers", "trainer", "gather"):
        section, script = slurm[role], next(text for job, text in roles.items() if job in role or role in job)
        assert "#SBATCH --account=project" in script
        fields = () if role == "gather" else type(getattr(loaded.slurm, role)).model_fields
        expected = {name: value for name, value in section.items() if name == "partition" or name not in fields}
        if cpus := expected.pop("cpus-per-gpu", None):  # of the model's four GPUs
            expected["cpus-per-task"] = 4 * cpus
        for option, value in expected.items():
            assert value is None or f"#SBATCH --{option}={value}" in script, role
    done = megaflow("plan", campaign)
    assert done.returncode == 0, done.stderr
    record = json.loads((Path(done.stdout.strip()) / "run.json").read_text())
    assert record["site"]["name"] == name
    assert "recognise" not in record["site"]["fields"], "a campaign has no such key"


def test_a_profile_of_the_user_wins_over_the_group_s_and_both_over_the_package_s(
    campaign: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setenv("MEGAFLOW_PROFILES", str(group))
    campaign.write_text(campaign.read_text() + "site: lumi\n")
    assert config.load(campaign).slurm.pods.partition == "small"
    (group / "lumi.yaml").write_text("slurm: {pods: {partition: standard}}\n")
    assert config.load(campaign).slurm.pods.partition == "standard"
    (home / "lumi.yaml").write_text("slurm: {pods: {partition: debug}}\n")
    assert config.load(campaign).slurm.pods.partition == "debug"


def test_a_shipped_profile_that_others_may_write_is_refused(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sites"
    shutil.copytree(site_profile.SHIPPED, copy)
    monkeypatch.setattr(site_profile, "SHIPPED", copy)
    campaign.write_text(campaign.read_text() + "site: lumi\n")
    config.load(campaign)
    (copy / "lumi.yaml").chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write to this site profile"):
        config.load(campaign)


def test_what_no_profile_knows_is_refused_with_what_there_is(campaign: Path, megaflow: Megaflow, home: Path) -> None:
    campaign.write_text(campaign.read_text() + "site: Perlmuter\n")
    said = megaflow("check", campaign).stderr
    assert said.startswith(f"{campaign}:5: site 'Perlmuter': no such profile in {home} (MEGAFLOW_PROFILES) or in the ")
    assert f"package; did you mean 'perlmutter'? there are: {', '.join(SHIPPED)}" in said
    profile = home / "here.yaml"
    campaign.write_text(campaign.read_text().replace("Perlmuter", "here"))
    for text, expected in (
        ("recognise:\n  clustr: [a]\nslurm: {}\n", f"{profile}:2: unknown key 'clustr'; did you mean 'cluster'?"),
        ("recognise:\n  environment: NERSC_HOST\n", f"{profile}:2: environment 'NERSC_HOST': expected names with"),
        ("recognize: {}\n", f"{profile}:1: 'recognize' is not allowed in a site profile; allowed: run_dir, "),
        ("slurm:\n  pods:\n    partion: x\n", f"{profile}:3: unknown key 'slurm.pods.partion'; did you mean"),
    ):
        profile.write_text(text)
        done = megaflow("check", campaign)
        assert (done.returncode, done.stderr.startswith(expected)) == (2, True), done.stderr


SIGNS: dict[str, tuple[str, dict[str, str], str]] = {
    "perlmutter": ("other", {"NERSC_HOST": "perlmutter"}, "login05"),
    "frontier": ("other", {"LMOD_SYSTEM_NAME": "frontier"}, "login05.frontier.olcf.ornl.gov"),
    "juwels": ("other", {"SYSTEMNAME": "juwelsbooster"}, "jwlogin22.juwels"),
    "jupiter": ("jupiter", {}, "jpbl-s01-01"),
    "leonardo": ("other", {}, "login07.leonardo.local"),
    "lumi": ("lumi", {}, "uan01"),
}
"""Profile → ClusterName, variables and host name of a machine that it is for."""


@pytest.mark.parametrize("name", PUBLIC)
def test_init_offers_the_profile_of_the_site_where_it_runs(
    name: str, megaflow: Megaflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, variables, host = SIGNS[name]
    slurm_of(tmp_path / "slurm", cluster, {"any"}, monkeypatch)
    place = tmp_path / "bugs"
    place.mkdir()
    assert megaflow("init", place / "before.yaml").returncode == 0
    if cluster == "other":
        assert "site:" not in (place / "before.yaml").read_text(), "no sign of a known site yet"
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    done = megaflow("init", place / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    text = (place / "campaign.yaml").read_text()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    loaded = config.load(place / "campaign.yaml")
    assert loaded.site == name
    assert "this site has a profile" in text
    assert loaded.slurm.pods.partition == site_profile.find(name, "test").fields["slurm"]["pods"].get("partition")
    assert f"docs/sites/{name}.md" in text
    assert "# account: PROJECT" in text


def test_a_host_name_that_many_sites_use_is_no_sign(
    megaflow: Megaflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_of(tmp_path / "slurm", "other", {"any"}, monkeypatch)
    for host in ("uan01", "login01", "login1.cluster", "head"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert megaflow("init", tmp_path / f"{host}.yaml").returncode == 0
        assert "site:" not in (tmp_path / f"{host}.yaml").read_text(), host


def test_init_offers_a_user_s_profile_where_its_rule_says_and_a_group_s_without_one_everywhere(
    home: Path, megaflow: Megaflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_of(tmp_path / "slurm", "other", {"any"}, monkeypatch)
    (home / "there.yaml").write_text("recognise: {cluster: [elsewhere]}\nslurm: {account: a}\n")
    (home / "closed.yaml").write_text("slurm: {account: b}\n")
    os.chmod(home / "closed.yaml", 0o666)
    done = megaflow("init", tmp_path / "one.yaml")
    assert config.load(tmp_path / "one.yaml").site is None
    assert "everybody may write to this site profile" in done.stderr
    (home / "closed.yaml").chmod(0o644)
    (home / "there.yaml").write_text("recognise: {cluster: [oth*]}\nslurm: {account: a}\n")
    megaflow("init", tmp_path / "two.yaml")
    assert "site: closed  # also: there" in (tmp_path / "two.yaml").read_text()
