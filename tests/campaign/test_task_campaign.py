"""A campaign of the more particular Harbor tasks: steps, a verifier apart, and verification in a fresh layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc import open_trajectories
from tests.support.campaigns import Make, run_local
from tests.support.harbor_tasks import SEPARATE, write_files, write_steps


@pytest.mark.slow
def test_steps_users_artifacts_and_verifiers_apart_reach_the_store(make_campaign: Make, tmp_path: Path) -> None:
    campaign = make_campaign(1)
    (tmp_path / "tasks" / "task0" / "task.toml").write_text('[environment]\ndocker_image = "base"\nworkdir = "/app"\n')
    write_steps(tmp_path / "tasks")
    files = {
        "task.toml": SEPARATE,
        "instruction.md": "x",
        "solution/solve.sh": "printf 42 > hidden",
        "tests/test.sh": "test $(cat answer) = 42 && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt",
    }
    write_files(tmp_path / "tasks" / "apart", files)
    campaign.write_text(campaign.read_text().replace("network: none,", "network: none, verification: fresh,"))
    result, done = run_local(campaign)
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        found = {row.id: (row.reward, row.rewards, {a.name: a.data for a in row.artifacts}) for row in store}
    assert {name: reward for name, (reward, _, _) in found.items()} == {
        "task0/oracle/0": 1.0,
        "task0/nop/0": 0.0,
        "walk/oracle/0": 1.5,
        "walk/nop/0": 0.0,
        "apart/oracle/0": 1.0,
        "apart/nop/0": 0.0,
    }
    _, rewards, kept = found["walk/oracle/0"]
    assert rewards == {"reward": 1.5, "extra": 0.5, "who": 0.5}
    assert kept["steps/first/artifacts/app/log"].startswith(b"begun\nsolved one by ")
    assert kept["steps/second/artifacts/app/log"].endswith(b"solved two by 0\n")
    assert found["apart/oracle/0"][2].keys() >= {"artifacts/app/answer", "verifier.log"}
