"""What another user of the machine gets of a run directory: nothing, or with ``share: group`` everything but keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.endpoints import Endpoint
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from tests.support.campaigns import Make
from tests.support.second_user import as_second_user

VISITOR = """
import json, os, sys
told = json.load(sys.stdin)
def attempt(action, path):
    try:
        action(path)
        return "yes"
    except OSError as error:
        return type(error).__name__
def write(path):
    os.close(os.open(path + "/visitor", os.O_WRONLY | os.O_CREAT))
print(json.dumps({
    "read": {f: attempt(lambda p: open(p, "rb").read(), f) for f in told["files"]},
    "list": {d: attempt(os.listdir, d) for d in told["folders"]},
    "write": {d: attempt(write, d) for d in told["folders"]},
    "change": {f: attempt(lambda p: open(p, "r+b").close(), f) for f in told["files"]},
}))
"""


def visit(run: RunDir, member: bool) -> dict[str, dict[str, str]]:
    everything = [path for path in [run.path, *sorted(run.path.rglob("*"))] if not path.is_symlink()]
    told = {
        "files": [str(path) for path in everything if path.is_file()],
        "folders": [str(path) for path in everything if path.is_dir()],
    }
    found = as_second_user(VISITOR, told, member)
    return {what: {os.path.relpath(p, run.path): r for p, r in found[what].items()} for what in found}


def carried_out(campaign: Path, place: Path, share: str) -> RunDir:
    """A whole local campaign, under a umask that would close everything, with a key as an engine leaves it."""
    text = campaign.read_text()
    campaign.write_text(f"{text}share: {share}\nrun_dir: {place}/runs\n")
    (place / "runs").mkdir(mode=0o755)
    before = os.umask(0o077)
    try:
        run = Campaign.from_yaml(campaign).submit(launcher="local")
        assert run.wait(timeout_s=120)["state"] == "finished"
    finally:
        os.umask(before)
    write_json(run.dir.endpoints / "default.0.json", {"server": "default.0", "key": "secret"}, 0o600)
    return run.dir


@pytest.mark.slow
def test_a_member_of_the_group_reads_a_shared_run_but_its_keys_and_a_stranger_reads_nothing(
    place: Path, make_campaign: Make
) -> None:
    run = carried_out(make_campaign(1, agent="oracle"), place, "group")
    found = visit(run, member=True)
    assert {path for path, result in found["read"].items() if result != "yes"} == {"endpoints/default.0.json"}
    assert {path for path, result in found["list"].items() if result != "yes"} == {"endpoints"}
    for what in ("run.json", "trajectories.h5", "campaign.yaml", "env.sh", "ledger/finished", "tasks/000000.json"):
        assert found["read"][what] == "yes"
    assert {path.split("/")[0] for path in found["read"]} >= {"journal", "events", "ledger"}
    assert set(found["write"].values()) | set(found["change"].values()) == {"PermissionError"}
    closed = visit(run, member=False)
    assert {result for results in closed.values() for result in results.values()} == {"PermissionError"}
    assert Run(run).status()["rollouts"]["completed"] == 1


def test_another_users_run_is_refused_by_name_to_whoever_would_change_it(tmp_path: Path) -> None:
    RunDir(tmp_path).check_ours()
    with pytest.raises(ConfigError, match="/: belongs to root; other users may read it, but not change it"):
        RunDir("/").check_ours()


@pytest.mark.slow
def test_a_run_that_is_not_shared_is_closed_to_its_group_too(place: Path, make_campaign: Make) -> None:
    run = carried_out(make_campaign(1, agent="oracle"), place, "user")
    found = visit(run, member=True)
    assert {result for results in found.values() for result in results.values()} == {"PermissionError"}


def test_a_pool_that_is_shared_shows_its_servers_to_the_group_whatever_their_umask(place: Path) -> None:
    run = RunDir(place / "pool")
    before = os.umask(0o077)  # as engine servers have it
    try:
        run.create()
        pool = EnginePool(run.path)
        pool.create({"default": 1}, "group")
        pool.advertise(Endpoint(server="default.0", policy="default", url="https://node:1", key="secret"))
        write_json(run.endpoints / "default.0.json", {"key": "secret"}, 0o600)
    finally:
        os.umask(before)
    found = visit(run, member=True)
    read = {path for path, result in found["read"].items() if result == "yes"}
    assert read == {"pool/about.json", "pool/servers/default.0.json"}
    assert {path for path, result in found["write"].items() if result == "yes"} == {"pool/members"}
    assert "secret" not in (pool.servers / "default.0.json").read_text()
    closed = visit(run, member=False)
    assert {result for results in closed.values() for result in results.values()} == {"PermissionError"}
