"""Records of pods and engines with nonsense in a field: no limit is lifted, no job of another run is named, and who
looks is shown the rest, in words and in JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.output import print_json
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.ids import by_cluster
from tests.support.harbor_tasks import write_solved_task
from tests.support.ledgers import LEASE, NOW
from tests.support.samples import commit, trajectory
from tests.support.steering import EVIL, harmless

DIGITS = "9" * 5000
ODD = {
    "nan": "NaN",
    "5,000 digits": DIGITS,
    "negative": "-7",
    "steering": json.dumps(EVIL),
    "deep": "[" * 20_000 + "]" * 20_000,
}
"""JSON as Python reads it, for a field of any record."""
RECORDS = {
    "an event": ("events/8_0.0.jsonl", '{"event": "start", "t": %s, "id": "a", "rank": 1, "attempt": %s}\n'),
    "a pod's state": ("events/9_0.0.jsonl", '{"event": "pod", "t": 1, "state": %s}\n'),
    "a lease": ("ledger/leases/8_0.0", '{"pod": "8_0", "start": "0", "job_id": "", "t": %s, "core_s": %s}'),
    "earlier starts": (
        "ledger/leases/8_0.1",
        '{"pod": "8_0", "job_id": "", "t": 1, "earlier": {"core_s": %s, "stored": %s}}',
    ),
    "ended pods": ("ledger/ended/1", '{"core_s": %s, "began_at": %s, "arrays": %s, "names": [%s]}'),
    "a job": ("ledger/jobs/8.json", '{"role": "pods", "id": "1", "elements": %s, "base": %s}'),
    "an endpoint": ("endpoints/default.0.json", '{"server": "default.0", "policy": "default", "weight": %s}'),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A local run of which one pod has stored a rollout."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # a machine without Slurm
    write_solved_task(tmp_path / "tasks", "task0")
    (tmp_path / "image" / "bin").mkdir(parents=True)
    (tmp_path / "campaign.yaml").write_text(
        "name: odd\ntasks: tasks/*\nagent: [oracle]\n"
        f"environment: {{network: none, images: {{base: {tmp_path / 'image'}}}}}\nslurm: {{check: false}}\n"
    )
    run = RunDir(Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local").path)
    commit(run, "7_0", (0, 0, trajectory(0, id="task0/oracle/0", task_id="task0", policy="oracle")))
    events = EventWriter(run.event_file("7_0", "0"))
    events.write(PodEvent(state="started", node="n1"))
    events.write(RolloutEvent(id="task0/oracle/0", status="completed"))
    events.write(PodEvent(state="drained", stored=1))
    events.close()
    return run


def no_number(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_of_nonsense_hides_no_other(run: RunDir, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    place, text = RECORDS[kind]
    path = run.path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    for odd in ODD:
        path.write_text(text.replace("%s", ODD[odd]))
        assert main(["status", str(run.path)]) == 0, odd
        said = capsys.readouterr()
        assert harmless(said.out + said.err), odd
        assert main(["status", str(run.path), "--json"]) == 0, odd
        status = json.loads(capsys.readouterr().out, parse_constant=no_number)
        assert [pod["state"] for pod in status["pods"] if pod["pod"] == "7_0.0"] == ["drained"], odd


def test_a_lease_that_says_nonsense_lets_no_limit_pass(run: RunDir) -> None:
    """It neither takes back what other pods have used nor stops the sum."""
    used = {"a.0": {"core_s": 4 * 3600.0, "began_at": NOW}}
    for wrong in (math.nan, -math.inf, -1e9, "x", None, [], 10**400):
        budget = CampaignBudget(run, {"core_hours": 3})
        assert "4.00 core-hours are used" in budget.exceeded({**used, "b.0": {"core_s": wrong, "began_at": wrong}})
        budget = CampaignBudget(run, {"wall": 1})
        assert "limits.wall is 1" in budget.exceeded({**used, "b.0": {"core_s": wrong, "began_at": wrong}})
    run.gpus.mkdir(exist_ok=True)
    (run.gpus / "a.json").write_text('{"gpu_s": 14400.0}')
    for wrong in ("NaN", "-1e9", '"nan"', "Infinity", "[" * 20_000, DIGITS):
        (run.gpus / "b.json").write_text(f'{{"gpu_s": {wrong}}}')
        assert "4.00 GPU-hours are used" in CampaignBudget(run, {"gpu_hours": 3}).exceeded({})


NO_JOBS = ("--me", "-u root", "1 --me", "7\n#SBATCH --wrap=id", "$(id)", "7@--me", "7@a b", "", "１２", "9" * 200)


def test_what_a_run_directory_calls_its_jobs_is_no_option_and_no_line_of_a_script(run: RunDir) -> None:
    """``cancel`` gives them to scancel, of which ``--me`` ends all that its user has; a gather job waits for them."""
    run.jobs.mkdir(exist_ok=True)
    for number, name in enumerate((*NO_JOBS, "17", "18@other")):
        (run.jobs / f"{number}.json").write_text(json.dumps({"role": "pods", "id": name}))
        (run.path / f"ledger/leases/{name}.0").write_text(json.dumps({**LEASE, "job_id": name}))
    seen = Run(run.path)
    assert [record.id for record in seen.slurm_jobs.arrays.records()] == ["17", "18@other"]
    assert seen.slurm_jobs.ids() == ["17", "18@other"]
    assert seen.job_ids() == ["17", "18@other"]
    jobs = ["12", "12_3", "12_[0-3,7%2]", "12+1", "12_3@other"]
    assert by_cluster([*NO_JOBS, *jobs]) == {"": jobs[:4], "other": ["12_3"]}


def test_json_is_json_whatever_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, (1, -math.inf)], "c": {"d": 1.5, 7: Path("x")}})
    assert json.loads(capsys.readouterr().out, parse_constant=no_number) == {
        "a": None,
        "b": [None, [1, None]],
        "c": {"d": 1.5, "7": "x"},
    }
