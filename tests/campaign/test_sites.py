"""What every site differs in: proxies, and an environment that lines of the campaign file set up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.host.address import unproxied
from tests.support.campaigns import Make, cli, rows

AGENT = """\
import asyncio, json, urllib.request
from megaflow_hpc.types import AgentResult

class Asks:
    async def run(self, task, sandbox, model):
        return await asyncio.to_thread(self.ask, model)  # by a client that obeys http_proxy, as most do

    def ask(self, model):
        assert urllib.request.getproxies()["http"].startswith("http://127.0.0.1:")
        body = json.dumps({"model": model.model_name, "messages": [{"role": "user", "content": "?"}]}).encode()
        head = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(model.base_url + "/chat/completions", body, head)) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        return AgentResult(messages=[{"role": "assistant", "content": said}])
"""


@pytest.mark.slow
def test_a_sites_proxy_takes_no_call_to_gateway_or_engine(tmp_path: Path, make_campaign: Make) -> None:
    (tmp_path / "asks.py").write_text(AGENT)
    model = "model: {engine: scripted, script: answers.yaml}\n"
    campaign = make_campaign(1, model, agent="asks:Asks", answers=["42"])
    with socket.socket() as taken:  # a proxy that is down: nobody listens at its port
        taken.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{taken.getsockname()[1]}"
        proxies = {
            name: proxy for kind in ("http", "https", "all") for name in (f"{kind}_proxy", f"{kind.upper()}_PROXY")
        }
        done = cli("run", campaign, "--launcher", "local", "--run-dir", tmp_path / "run", **proxies, NO_PROXY=".site")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run") == {"task0/default/0": ("completed", 0.0)}


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_jobs_keep_their_interpreter_and_the_loopback_whatever_setup_does(tmp_path: Path, shell: str) -> None:
    """A module that sets proxies, and a conda environment whose programs come first."""
    setup = ["export http_proxy=http://proxy:3128 NO_PROXY=.site.example", f"PATH={tmp_path}/conda/bin:$PATH"]
    config = CampaignConfig(name="x", tasks="t", agent="nop", slurm={"setup": setup})
    (tmp_path / "env.sh").write_text(environment_script(config, "pmi2"))
    words = '. "$0"; set -u; echo "$no_proxy $NO_PROXY $http_proxy $MEGAFLOW_PYTHON ${PATH%%:*}"'
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    said = subprocess.check_output([shell, "-c", words, tmp_path / "env.sh"], env=environment, text=True).split()
    local = unproxied({"NO_PROXY": ".site.example"})
    assert said[:2] == [local["no_proxy"], local["NO_PROXY"]] == ["127.0.0.1,localhost,::1,.site.example"] * 2
    assert said[2:] == ["http://proxy:3128", sys.executable, f"{tmp_path}/conda/bin"]
    assert unproxied({})["no_proxy"] == "127.0.0.1,localhost,::1"
