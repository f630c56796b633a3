"""What every site differs in: proxies, and an environment that lines of the campaign file set up."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.host.address import unproxied
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import cause
from megaflow_hpc.slurm import script
from tests.support.campaigns import Make, forked, rows

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
        names = [f"{kind}_proxy" for kind in ("http", "https", "all")]
        proxies = dict.fromkeys([*names, *map(str.upper, names)], proxy)
        words = ("run", campaign, "--launcher", "local", "--run-dir", tmp_path / "run")
        done = forked(*words, **proxies, NO_PROXY=".site")
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


def of_role(tmp_path: Path, role: str, config: CampaignConfig, *names: str, **environ: str) -> list[str]:
    """The values of variables in a job of a role after it has sourced ``env.sh``."""
    (tmp_path / "env.sh").write_text(environment_script(config, "pmi2"))
    words = f"role={role}; . $0; printf '%s\\n' " + " ".join(f'"${{{name}:-}}"' for name in names)
    environment = os.environ | environ
    said = subprocess.check_output(["bash", "-uc", words, tmp_path / "env.sh"], env=environment, text=True)
    return said.splitlines()


def test_each_role_may_have_its_own_interpreter_and_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods on x86 nodes, engines on Grace nodes: neither has the interpreter of the machine that plans."""
    monkeypatch.setenv("MEGAFLOW_SCRATCH", "/planner")
    by_machine = 'case "$TEST_MACHINE" in aarch64) export MEGAFLOW_PYTHON=/arm/python;; esac'
    slurm = {
        "setup": [by_machine],
        "pods": {"setup": "export MEGAFLOW_SCRATCH=/local/nvme", "pools": [{"count": 2}]},
        "servers": {"setup": ["export MEGAFLOW_PYTHON=/grace/python", "export MEGAFLOW_ENGINE_VENV=/grace/engine"]},
    }
    config = CampaignConfig(name="x", tasks="t", agent="nop", slurm=slurm)
    names = ("MEGAFLOW_PYTHON", "MEGAFLOW_SCRATCH", "MEGAFLOW_ENGINE_VENV")

    def of(role: str, **environ: str) -> list[str]:
        return of_role(tmp_path, role, config, *names, **{"MEGAFLOW_ENGINE_VENV": "/e", "TEST_MACHINE": "", **environ})

    monkeypatch.setenv("MEGAFLOW_ENGINE_VENV", "/e")
    assert of("pods") == [sys.executable, "/local/nvme", "/e"]
    assert of("pods", TEST_MACHINE="aarch64", MEGAFLOW_PYTHON="/submitter")[0] == "/arm/python"
    assert of("pods", MEGAFLOW_PYTHON="/submitter")[0] == sys.executable
    assert of("servers", TEST_MACHINE="aarch64") == ["/grace/python", "/planner", "/grace/engine"]
    assert of("trainer") == [sys.executable, "/planner", "/e"]


def test_a_trainer_follows_the_interpreter_of_its_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGAFLOW_TRAINER_PYTHON", "MEGAFLOW_ENGINE_VENV"):
        monkeypatch.delenv(name, raising=False)

    def python(*setup: str, **environ: str) -> str:
        slurm, training = {"trainer": {"setup": setup}}, {"policies": {"default": {}}}
        config = CampaignConfig(
            name="x", tasks="t", agent="nop", model={"path": "m"}, samples=2, slurm=slurm, training=training
        )
        (value,) = of_role(tmp_path, "trainer", config, "MEGAFLOW_TRAINER_PYTHON", **environ)
        return value

    assert python() == python(MEGAFLOW_TRAINER_PYTHON="/submitter") == sys.executable
    assert python("export MEGAFLOW_PYTHON=/grace/python") == "/grace/python"
    (tmp_path / "engine" / "bin").mkdir(parents=True)
    assert python(f"export MEGAFLOW_ENGINE_VENV={tmp_path}/engine") == f"{tmp_path}/engine/bin/python"
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", "/planner")
    assert python() == "/planner"
    assert python("export MEGAFLOW_TRAINER_PYTHON=/grace/torch") == "/grace/torch"


def test_scripts_tell_env_sh_their_role(tmp_path: Path) -> None:
    pools = [{"count": 1}, {"partition": "arm"}]
    config = CampaignConfig(name="x", tasks="t", agent="nop", slurm={"pods": {"pools": pools}})
    run = RunDir("/r")
    for job, role in (
        (script.pod_job(config, run), "pods"),
        (script.pod_job(config, run, pool=config.slurm.pods.pools[1]), "pods"),
        (script.gather_job(config, run, ""), "pods"),
        (script.server_job(config, run, 1, 1), "servers"),
        (script.trainer_job(config, run, "default"), "trainer"),
    ):
        assert re.findall(r"^role=(\S+)", script.script(job), re.MULTILINE) == [role]


def test_an_interpreter_for_another_architecture_is_named(tmp_path: Path) -> None:
    """The header of an ELF file for a machine that does not exist here stands for the other architecture."""
    foreign = tmp_path / "python"
    foreign.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xfe\xca" + bytes(100))
    foreign.chmod(0o755)
    config = CampaignConfig(
        name="x", tasks="t", agent="nop", slurm={"servers": {"setup": f"export MEGAFLOW_PYTHON={foreign}"}}
    )
    (tmp_path / "env.sh").write_text(environment_script(config, "pmi2"))
    text = script.script(script.server_job(config, RunDir(tmp_path), 1, 1))
    done = subprocess.run(["bash", "-c", text.split("set -u")[0]], capture_output=True, text=True, check=False)
    assert done.stderr == (
        f"MEGAFLOW_PYTHON={foreign} cannot run on {os.uname().nodename} ({os.uname().machine}): Exec format error; "
        "export another one in slurm.servers.setup\n"
    )
    assert cause(["pod: MPI sees", *done.stderr.splitlines(), "x"]) == done.stderr.strip()
