"""``shell`` in a run directory that a stranger has made: what it names runs in a sandbox, or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.cli import main
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from tests.support.harbor_tasks import write_solved_task
from tests.support.steering import EVIL, harmless

TASK = """
from pathlib import Path
Path({marker!r}).touch()
class Quiet:
    image = "base"
    instruction = "nothing"
    def setup(self, sandbox):
        Path({marker!r}).touch()
    def score(self, sandbox):
        return 1
"""


@pytest.fixture
def plan(tmp_path: Path, rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Plans a local run of one task; returns its directory."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(scratch))
    write_solved_task(tmp_path / "tasks", "task0")

    def planned(tasks: str = "tasks/*") -> Path:
        (tmp_path / "campaign.yaml").write_text(
            f"name: odd\ntasks: {tasks}\nagent: [oracle]\nenvironment: {{network: none, images: {{base: {rootfs}}}}}\n"
        )
        return Path(Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local").path)

    return planned


def change(run: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((run / "run.json").read_text())
    how(record)
    (run / "run.json").write_text(json.dumps(record))


def test_what_a_run_calls_its_agent_is_not_called(
    plan: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, marker = plan(), tmp_path / "made"
    agent = {"name": "os:mkdir", "args": {"path": str(marker)}}
    change(run, lambda record: record["policies"]["oracle"]["agents"][0].update(agent))
    change(run, lambda record: record["campaign"].update(agent=[agent]))
    words = ["shell", str(run), "task0/oracle/0", "--command", "echo inside; exit 3"]
    assert main(words) == 3
    assert "inside" in capsys.readouterr().out
    assert not marker.exists()
    assert main([*words, "--own-code"]) == 2  # os.mkdir makes no agent
    assert marker.exists()


def test_a_tasks_class_is_imported_where_the_user_says_so(
    plan: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, module = tmp_path / "made", f"quiet_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(TASK.format(marker=str(marker)))
    monkeypatch.setattr(sys, "path", sys.path[:])
    run = plan(f"{module}:Quiet")
    marker.unlink()
    sys.modules.pop(module)
    words = ["shell", str(run), "Quiet/oracle/0", "--command", "true"]
    assert main(words) == 2
    assert "runs outside of any sandbox; if you trust this run directory, add --own-code" in (capsys.readouterr().err)
    assert not marker.exists()
    assert main([*words, "--own-code"]) == 0
    assert marker.exists()


def test_hostile_names_of_policies_tasks_and_images_are_said_and_not_obeyed(
    plan: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = plan()
    names = [EVIL, "-e", "--image", "$(touch made)", "`touch made`", "a\nb", "../../../etc", ""]
    task = planned_tasks(RunDir(run), read_run(RunDir(run)))["task0"].task
    change(run, lambda record: record["policies"].update(dict.fromkeys(names, record["policies"]["oracle"])))
    for name in names:  # as a run of before has tasks and images
        tasks = {"task0": task, name: {**task, "id": name}}
        change(run, lambda record, n=name, t=tasks: record.update(packed=None, tasks=t, images={"base": n}))
        for rollout in (f"task0/{name}/0", f"{name}/oracle/0", f"no {name}/{name}/0", f"task0/no {name}/0", name):
            status = main(["shell", "--command", "exit 4", "--", str(run), rollout])
            said = capsys.readouterr()
            assert status in (1, 2, 3), said.err
            assert harmless(said.out + said.err)
            assert "Traceback" not in said.err
    assert not (tmp_path / "made").exists()
