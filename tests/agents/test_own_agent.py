"""A new user's own agent and task, as the command line creates them and the documentation shows the agent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.agents import code
from megaflow_hpc.agents.probe import probe
from megaflow_hpc.cli import main
from megaflow_hpc.config import AgentConfig
from megaflow_hpc.errors import ConfigError
from tests.support.places import ROOT

CAMPAIGN = """\
name: own
tasks: tasks/*
agent: {{name: my_agent:MyAgent, max_turns: 30, args: {{temperature: 0.5}}}}
models:
  mine: {{engine: scripted, script: answers.yaml}}
  Nothing: {{engine: scripted, script: answers.yaml, agent: others:Nothing}}
  Mapping: {{engine: scripted, script: answers.yaml, agent: others:Mapping}}
  Impatient: {{engine: scripted, script: answers.yaml, agent: {{name: others:Impatient, max_turns: 2}}}}
environment: {{network: none, images: {{base: {sif}}}}}
"""
ANSWERS = """\
default:
  - "Let me count.\\n```bash\\ngrep -c '' words.txt > count.txt\\n```"
  - "It is done."
"""
OTHERS = """\
import aiohttp
from helper import said

class Nothing:
    async def run(self, task, sandbox, model):
        await sandbox.exec(said)

class Mapping:
    async def run(self, task, sandbox, model):
        return {"done": True}

class Impatient:
    async def run(self, task, sandbox, model):
        body = {"model": model.model_name, "messages": [{"role": "user", "content": "x"}]}
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            while True:
                await session.post(f"{model.base_url}/chat/completions", json=body, headers=headers)
"""


def example() -> str:
    """Return the agent that the documentation shows in full."""
    page = (ROOT / "docs" / "how-to" / "agents.md").read_text()
    blocks: list[str] = re.findall(r"```python[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "import " in block]
    return block


@pytest.mark.slow
def test_new_agents_solve_a_new_task_as_they_were_when_it_was_planned(
    tmp_path: Path, base_sif: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: object) -> list[str]:
        assert main([str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    made = json.loads("".join(printed("tasks", "new", "count-lines", tmp_path / "tasks", "--json")))
    assert made["id"] == "count-lines"
    proof = printed("tasks", "validate", tmp_path / "tasks", "--image", base_sif)
    assert re.split(r"\s{2,}", proof[0]) == ["task", "reward before", "reward after", "valid"]
    assert proof[2].split() == ["count-lines", "0.0", "1.0", "ok"]
    listed = printed("tasks", "list", tmp_path / "tasks")
    assert re.split(r"\s{2,}", listed[0]) == ["id", "image", "agent s", "solution", "instruction"]
    assert re.search(r"count-lines +base +600\.0 +yes +The file", listed[2])

    printed("agents", "new", "my_agent", tmp_path)
    assert (tmp_path / "my_agent.py").read_text() == example()
    assert main(["agents", "new", "my_agent", str(tmp_path)]) == 2  # no file is overwritten
    (tmp_path / "others.py").write_text(OTHERS)
    (tmp_path / "helper.py").write_text("said = 'echo 3 > count.txt'\n")
    (tmp_path / "answers.yaml").write_text(ANSWERS)
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN.format(sif=base_sif))
    run = Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local")
    assert sorted(path.name for path in (run.path / "code").iterdir()) == ["helper.py", "my_agent.py", "others.py"]
    for name in ("my_agent.py", "helper.py"):
        (tmp_path / name).write_text("raise SystemExit('edited while the campaign runs')\n")
    run.start("local")
    run.wait(timeout_s=120)
    with open_trajectories(run.path) as store:
        found = {row.policy: row for row in store}
        mine = found["mine"]
        assert (mine.status, mine.error, mine.reward, len(mine.turns)) == ("completed", "", 1.0, 2)
        assert mine.messages[-1]["content"] == "It is done."
        assert [turn.sandbox_s > 0 for turn in mine.turns] == [True, False]  # measured, not reported
        assert (found["Nothing"].status, found["Nothing"].error, found["Nothing"].reward) == ("completed", "", 1.0)
        # Its client raised an error at status 429.
        over = found["Impatient"]
        assert (over.status, over.reward, over.error) == ("truncated", 0.0, "this rollout has made its 2 model calls")
        assert (found["Mapping"].status, found["Mapping"].error_kind) == ("failed", "user")
        said = "others:Mapping: run returned dict {'done': True}; return a megaflow_hpc.types.AgentResult, or None"
        assert said in found["Mapping"].error


BROKEN = {
    "lost": (None, "No module named 'lost'.*; put lost.py next to the campaign file, or its directory on PYTHONPATH"),
    "lacking": ("import no_such_module\n", r"No module named 'no_such_module'.* at .*lacking\.py:1$"),
    "other": ("class Other: pass\n", r"/other\.py has no MyAgent; name a class of that file$"),
    "syntax": ("def broken(:\n", "SyntaxError"),
    "script": ("import sys\nsys.exit(3)\n", r"SystemExit\(3\)"),
    "plain": ("class MyAgent:\n    def run(self): pass\n", "has no 'async def run"),
    "raises": ("class MyAgent:\n    def __init__(self):\n        1 / 0\n", r"ZeroDivisionError.* at .*raises\.py:3$"),
}
"""Module → its text, and the message about an agent in it."""


def test_an_agent_that_cannot_be_made_is_refused_at_its_line(tmp_path: Path) -> None:
    for name, (text, _) in BROKEN.items():
        if text is not None:
            (tmp_path / f"{name}.py").write_text(text)
    made, own = probe([AgentConfig(name=f"{name}:MyAgent") for name in BROKEN], str(tmp_path))
    for agent, (name, (_, said)) in zip(made, BROKEN.items(), strict=True):
        assert re.match(rf"agent '{name}:MyAgent'.*{said}", agent.error), agent.error
    assert own == ["other.py", "plain.py", "raises.py"]  # imported as a whole

    (tmp_path / "my_agent.py").write_text("import os\nprint('to standard error', flush=True)\nos._exit(7)\n")
    (tmp_path / "campaign.yaml").write_text("name: own\ntasks: tasks/*\nagent: my_agent:MyAgent\n")
    assert main(["tasks", "new", "one", str(tmp_path / "tasks")]) == 0
    with pytest.raises(ConfigError, match=r"campaign\.yaml:3: .*'my_agent:MyAgent'.*ended the interpreter .* status 7"):
        Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local")


READS = """\
from pathlib import Path

from megaflow_hpc.types import AgentResult

HERE = Path(__file__).parent

class MyAgent:
    async def run(self, task, sandbox, model):
        import sibling
        from pack import deeper
        said = [(HERE / "prompts" / "system.txt").read_text(), (HERE / "one.txt").read_text()]
        said += [sibling.SAID, deeper.SAID]
        said += [path.read_text() for path in sorted(HERE.glob("*.md"))] + [str(len(list((HERE / "big").iterdir())))]
        result = await sandbox.exec("echo 3 > count.txt; sh", user_input=(HERE / "tool.sh").read_text())
        return AgentResult(messages=[{"role": "user", "content": " ".join([*said, result.stdout.strip()])}])
"""
BESIDE = {
    "my_agent.py": READS,
    "sibling.py": "import later\nSAID = later.SAID\n",
    "later.py": "SAID = 'sibling'\n",
    "pack/__init__.py": "",
    "pack/deeper.py": "from pathlib import Path\nSAID = (Path(__file__).parents[1] / 'own.txt').read_text()\n",
    "own.txt": "package",
    "prompts/system.txt": "system",
    "one.txt": "one",
    "a.md": "a",
    "b.md": "b",
    "tool.sh": "echo tool",
    "unnamed.txt": "",
    "broken.py": "import (",
}


@pytest.mark.slow
def test_an_agent_works_when_all_that_it_was_made_of_is_gone(tmp_path: Path, base_sif: Path) -> None:
    for name, text in BESIDE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "one.txt").chmod(0o600)
    (tmp_path / "tool.sh").chmod(0o755)
    (tmp_path / "big").mkdir()
    for number in range(code.DATA_FILES + 1):
        (tmp_path / "big" / str(number)).write_text("")
    assert main(["tasks", "new", "count-lines", str(tmp_path / "tasks")]) == 0
    environment = f"environment: {{network: none, images: {{base: {base_sif}}}}}\n"
    (tmp_path / "campaign.yaml").write_text(f"name: own\ntasks: tasks/*\nagent: my_agent:MyAgent\n{environment}")
    run = Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local")
    kept = run.path / "code"
    files = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file() and not path.is_symlink()}
    assert files == BESIDE.keys() - {"unnamed.txt", "broken.py"}
    assert (kept / "big").readlink() == tmp_path / "big"  # too large to be copied
    assert (kept / "tool.sh").stat().st_mode & 0o111
    assert (kept / "one.txt").stat().st_mode & 0o077 == 0
    for name in BESIDE:
        (tmp_path / name).unlink()
    run.start("local")
    run.wait(timeout_s=120)
    with open_trajectories(run.path) as store:
        [row] = store
        assert (row.status, row.error, row.reward) == ("completed", "", 1.0)
        assert row.messages[0]["content"] == "system one sibling package a b 201 tool"


def test_code_is_kept_whole_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pkg/__init__.py", "pkg/deep/er/prompt.txt", "pkg/__pycache__/x.pyc", "pkg/.git/config", "single.py"):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text(name)
    (tmp_path / "run").mkdir()
    code.keep(["pkg", "single.py"], tmp_path / "from", tmp_path / "run" / "code")
    kept = {str(p.relative_to(tmp_path / "run" / "code")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert kept == {"pkg/__init__.py", "pkg/deep/er/prompt.txt", "single.py"}
    monkeypatch.setattr(code, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match=r"more than 2 files .* separate module or package"):
        code.keep(["pkg", "single.py"], tmp_path / "from", tmp_path / "run" / "code")
