"""browser-use, unmodified, reads a code from a page of its sandbox, which reaches nothing but the gateway.

It is not part of the suite, because it needs 400 MB from PyPI. ``launchers/test tests/agents/browser_use.py`` makes its
image over that of desktops, of the files that docs/how-to/screens.md shows, and runs it. ``BROWSER_USE_SITE`` may name
a directory in which it is installed already.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc import open_trajectories
from tests.support.campaigns import cli, run_local
from tests.support.places import ROOT

PACKAGE = "browser-use==0.13.14"
PAGE = """\
<!doctype html><title>Form</title>
<button autofocus onclick="this.textContent = 'The code is ' + (4000 + 711)">Go</button>
"""
TASK = """\
[agent]
timeout_sec = 600.0

[environment]
docker_image = "browser"
workdir = "/work"
"""


def example(name: str) -> str:
    """Return a file that the page on screens shows."""
    text = (ROOT / "docs" / "how-to" / "screens.md").read_text()
    found = re.search(rf'```\w+ title="{re.escape(name)}"\n(.*?)\n```', text, re.DOTALL)
    assert found, f"docs/how-to/screens.md shows no {name}"
    return found[1] + "\n"


def step(name: str, **fields: Any) -> str:
    """An answer of browser-use's model with one action."""
    plan = {"thinking": "so", "evaluation_previous_goal": "ok", "memory": "nothing", "next_goal": name}
    return json.dumps({**plan, "action": [{name: fields}]})


SERVE = "python3 -m http.server 8000 --bind 127.0.0.1"
URL = "http://127.0.0.1:8000/page.html"
SCRIPT = {
    "tasks": [
        {"when": "The code is 4711", "answers": [step("done", text="4711", success=True)]},
        {"when": f": {URL}", "answers": [step("send_keys", keys="Enter")]},
        {"when": "press Go", "answers": [step("navigate", url=URL, new_tab=False)]},
    ]
}
"""browser-use asks for each step in a conversation of its own, so an answer depends on what its browser shows."""


def image(folder: Path, desktop_sif: Path) -> Path:
    """Make the image as the page says."""
    (folder / "browser").mkdir()
    site = folder / "browser" / "site"
    if installed := os.environ.get("BROWSER_USE_SITE"):
        shutil.copytree(installed, site)
    else:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", "3.11"]
        subprocess.run([*pip, "--target", str(site), PACKAGE], check=True)
    for name in ("browser/Dockerfile", "browser/browse.py"):
        (folder / name).write_text(example(name))
    done = cli("images", "build", folder / "browser" / "Dockerfile", "--map", f"desktop={desktop_sif}", timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder / "browser" / "Dockerfile"


def test_browser_use_reads_a_page_and_is_recorded_with_its_screenshots(tmp_path: Path, desktop_sif: Path) -> None:
    task = tmp_path / "tasks" / "page"
    for name in ("tests", "environment"):
        (task / name).mkdir(parents=True)
    (task / "task.toml").write_text(TASK)
    (task / "instruction.md").write_text(f"Open {URL}, press Go, and say the code.\n")
    (task / "environment" / "page.html").write_text(PAGE)
    test = 'if grep -q 4711 /work/answer; then r=1; else r=0; fi; echo "$r" > /logs/verifier/reward.txt\n'
    (task / "tests" / "test.sh").write_text(test)
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump(SCRIPT))
    dockerfile = image(tmp_path, desktop_sif)
    campaign = {
        "name": "browser",
        "tasks": "tasks/*",
        "agent": {"name": "command", "args": {"command": f"{SERVE} & python3 /opt/browse.py"}},
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "environment": {
            "network": "gateway",
            "images": {"browser": str(dockerfile), "desktop": str(desktop_sif)},
        },
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        (trajectory,) = store
        assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, "")
        last = trajectory.sequences[-1]
        prompt = bytes(token for token in last.tokens if token < 256).decode()
        assert "The code is 4711" in prompt, "the page that the browser showed reached the model"
        assert [len(sequence.images) for sequence in trajectory.sequences] == [1, 1], "a screenshot for each step"
        assert len(trajectory.images) == 2
