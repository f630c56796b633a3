"""Looking at rollouts while they run: which, where, how far, and what was said."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir.live import LiveFiles
from tests.support.campaigns import running, stored
from tests.support.scripted import SOLVE, block
from tests.support.waiting import until

HOSTILE = "\x1b[31m[bold]not bold[/bold]\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base_sif: Path, write_task: Callable[..., Path]) -> Iterator[Run]:
    """A campaign of one rollout that is solved, one whose agent's command never ends, and one that cannot run."""
    folder = tmp_path_factory.mktemp("watched")
    for name in ("quick", "hanging", "broken"):
        write_task(folder / "tasks", name)
    (folder / "tasks" / "broken" / "tests" / "test.sh").write_text("exit 0\n")  # says no reward
    script = {
        "tasks": [
            {"when": "Task hanging", "answers": [block(f"echo '{HOSTILE}'"), block("sleep 3600")]},
            {"when": "Task", "answers": SOLVE},
        ]
    }
    (folder / "answers.yaml").write_text(yaml.safe_dump(script))
    (folder / "campaign.yaml").write_text(
        "name: watched\ntasks: tasks/*\nagent: mini-swe-agent\nmodel: {engine: scripted, script: answers.yaml}\n"
        f"environment: {{network: none, images: {{base: {base_sif}}}}}\nslurm: {{pods: {{slots_per_rank: 3}}}}\n"
    )
    process, path = running(folder / "campaign.yaml")
    run = Run(path)
    yield run
    process.send_signal(signal.SIGINT)
    until(lambda: run.status()["pods"][0]["state"] != "started", "the pod drains")
    process.send_signal(signal.SIGINT)  # and does not wait
    process.communicate(timeout=60)


@pytest.mark.slow
def test_status_tells_what_runs_where_and_who_looks_is_told_what_was_said(run: Run) -> None:
    until(lambda: stored(run) == 2, "the others are stored")
    status = run.status()
    [pod] = status["pods"]
    [place] = run.monitor.running.longest([pod["pod"]])
    assert (place.id, place.pod, place.attempt) == ("hanging/default/0", pod["pod"], 0)
    assert place.node == pod["node"]
    assert status["failed_at"] == {"verifier": {pod["node"]: 2}}  # one was repeated
    until(lambda: [lease["tokens"] for lease in run.ledger.leases().values()] > [0], "the lease counts tokens")

    viewer = LiveFiles(run.dir)
    assert not run.dir.live.exists()  # nobody looks: nothing is written
    viewer.ask(["hanging/default/0", "no/such/0"], "hanging/default/0")
    until(lambda: (said := viewer.activity(pod["pod"])) and said.transcripts, "the transcript is shown")
    said = viewer.activity(pod["pod"])
    assert said is not None
    assert said.rollouts.keys() == said.transcripts.keys() == {"hanging/default/0"}
    assert (said.rollouts["hanging/default/0"].calls, said.rollouts["hanging/default/0"].waits) == (2, False)
    messages = said.transcripts["hanging/default/0"].messages
    assert [role for role, _ in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert HOSTILE in messages[3][1]
    assert "sleep 3600" in messages[4][1]
    assert run.dir.live.stat().st_mode & 0o777 == 0o700
    viewer.leave()
    until(lambda: viewer.activity(pod["pod"]) is None, "nobody looks any more")
    assert list(run.dir.live.iterdir()) == []
