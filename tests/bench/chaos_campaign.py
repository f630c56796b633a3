"""The campaign of a seed of chaos (tests/bench/chaos.py), and the ways in which it is submitted."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from megaflow_hpc.campaign.facade import Campaign
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import MegaflowError
from tests.support.campaigns import cli
from tests.support.harbor_tasks import write_solved_task
from tests.support.labs import sbatch
from tests.support.places import ROOT
from tests.support.waiting import eventually

PODS, SLOTS = 2, 3
WAYS = ("from Python", "by hand with --export=NONE", "from inside an allocation")
SUBMIT_S = 90.0

WORK = """\
import hashlib, json, os, sys, time, urllib.request
def ask():
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go on?"}]}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"]
digest, words = hashlib.sha256(), []
for step in range(20):
    for _ in range(200):
        digest.update(b"work" * 256)
    with open("progress", "a") as file:
        print(step, digest.hexdigest(), file=file, flush=True)
        os.fsync(file.fileno())
    if step in (5, 15):
        words.append(ask())
    time.sleep(0.15)
if "large" in sys.argv:
    os.makedirs("/logs/artifacts", exist_ok=True)
    for part in range(7):
        open(f"/logs/artifacts/{part}", "wb").write(os.urandom(1 << 20))
open("answer", "w").write(" ".join(words))
"""


def write_campaign(
    folder: Path,
    image: Path,
    tasks: int,
    mark: str,
    pods: int = PODS,
    ranks: int = 2,
    variables: Mapping[str, str] | None = None,
) -> Path:
    """Tasks whose work shows ``mark`` in its command line, and a campaign on the partition that can be preempted.

    Every fourth task leaves so much that its trajectory is a large message.
    """
    for number in range(tasks):
        solution, test = "echo 42 42 > answer", "grep -q '42 42' answer"
        task = write_solved_task(folder / "tasks", f"work{number:02d}", solution, test, agent_s=240)
        large = "import sys; sys.argv.append('large')\n" if number % 4 == 3 else ""
        (task / "environment" / "work.py").write_text(large + WORK)
    (folder / "answers.yaml").write_text('default: ["42"]\n')
    campaign = {
        "name": "chaos",
        "tasks": "tasks/*",
        "agent": {"name": "command", "args": {"command": f"python3 work.py {shlex.quote(mark)}"}},
        "model": {"engine": "scripted", "script": "answers.yaml", "gpus": 1, "servers": 2},
        "environment": {"network": "gateway", "images": {"base": str(image)}},
        "slurm": {
            "requeues": 20,
            "setup": [f"export {name}={shlex.quote(value)}" for name, value in (variables or {}).items()],
            "pods": {
                "partition": "preempt",
                "count": pods,
                "ranks_per_node": ranks,
                "slots_per_rank": max(1, SLOTS // (ranks - 1)),
                "cpus_per_rank": 1,
                "mem": "1G",
                "time": 20,
            },
            "servers": {"partition": "gpu", "time": 20, "mem": "500M"},
        },
    }
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign, sort_keys=False))
    return path


def submit(campaign: Path, way: str) -> Run:
    """Submits a campaign in one of :data:`WAYS`; returns when a pod of it has begun, or after :data:`SUBMIT_S`."""
    if way == WAYS[0]:
        run = Campaign.from_yaml(campaign).submit()
    elif way == WAYS[1]:
        planned = json.loads(cli("plan", campaign, "--json").stdout)
        for command in (each for each in planned["commands"] if each.startswith("sbatch ")):
            subprocess.run(
                ["bash", "-c", command],
                check=True,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"SBATCH_EXPORT": "NONE"},
            )
        run = Run(planned["run"])
    else:
        around, out = campaign.with_name("around.sbatch"), campaign.with_name("submitted")
        words = shlex.join([sys.executable, "-m", "megaflow_hpc", "submit", str(campaign), "--json"])
        around.write_text(
            f"#!/bin/bash\n#SBATCH -n1 --mem-per-cpu=300M --time=10\ncd {ROOT} && srun -n1 {words} >{out}\n"
        )
        log = campaign.with_name("around.log")
        if (state := sbatch("-o", log, around)) != "COMPLETED":
            raise MegaflowError(f"submission from inside an allocation: {state}: {log.read_text()}")
        run = Run(json.loads(out.read_text())["run"])
    eventually(lambda: run.ledger.leases(), SUBMIT_S)
    return run
