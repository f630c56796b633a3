"""An engine over two nodes of the lab: it serves, starts anew when a part of it is killed, and leaves nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm"), pytest.mark.timeout(300)]

CAMPAIGN = """\
name: two-nodes
model: {engine: scripted, script: answers.yaml, gpus: 0, nodes: 2}
pool: {}
slurm: {servers: {partition: cpu, time: 10, mem: 200M}}
"""


def parts(script: Path) -> dict[int, int]:
    """Processes of the engine by their node's rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if words[1:3] == ["-m", "megaflow_hpc.model.engines.scripted"] and str(script) in words:
            found[int(words[words.index("--node-rank") + 1])] = int(folder.name)
    return found


def test_an_engine_over_two_nodes_comes_back_and_goes_whole(tmp_path: Path) -> None:
    script = tmp_path / "answers.yaml"
    script.write_text("default: [from two nodes]")
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN)
    run = Campaign.from_yaml(tmp_path / "campaign.yaml").submit(launcher="slurm")
    try:
        endpoint = run.dir.endpoints / "default.0.json"
        until(endpoint.exists, "the engine is registered")
        first = parts(script)
        assert set(first) == {0, 1}
        (node,) = run.dir.logs.glob("server-*.log")
        os.kill(first[1], signal.SIGKILL)
        until(lambda: node.read_text().count("serving the campaign") == 2, "the second node serves again")
        assert "task 1: Exited with exit code 137" in node.read_text()
        second = parts(script)
        assert set(second) == {0, 1}
        assert not set(second.values()) & set(first.values())
    finally:
        run.cancel()
    until(lambda: not parts(script) and not run.live_jobs(0), "every part and job has left")
    assert not endpoint.exists()
