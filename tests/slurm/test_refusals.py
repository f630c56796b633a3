"""What the batch scripts do when Slurm refuses or is away, and when steps fail or the walltime ends.

They run with stand-ins for Slurm's commands on PATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaflow_hpc import config
from megaflow_hpc.config.slurm import OWN_OPTIONS, GatherConfig, PodsConfig, ServersConfig, SlurmConfig, TrainerConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.launch import Launch, over_nodes
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.slurm import script
from tests.support.places import ROOT

SECTIONS = {
    "slurm": SlurmConfig,
    "pods": PodsConfig,
    "servers": ServersConfig,
    "trainer": TrainerConfig,
    "gather": GatherConfig,
}

SRUN = """
touch "$MEGAFLOW_POD_DIR/world"
case ${SCENE:-} in preempted) touch "$MEGAFLOW_POD_DIR/preempted" ;; esac
echo "$*" >>"$NOTES/srun"
echo "${STATE:-drained}" >"$MEGAFLOW_POD_DIR/state"
"""
SLEEP = 'case $1 in 0.5) exec /bin/sleep 0.1 ;; esac; echo "$1" >>"$NOTES/sleep"'
"""Returns at once, except in ``outcome``: no test waits."""


class Site:
    """Stand-ins for Slurm's commands, a run directory and the variables of a job."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.notes = folder / "bin", folder / "notes"
        self.run = RunDir(folder / "run")
        for path in (self.bin, self.notes, self.run.ledger, self.run.logs, folder / "tmp"):
            path.mkdir(parents=True)
        (self.run.path / "run.json").touch()
        python = self.notes.parent / "python"
        python.write_text(f'#!/bin/sh\ncase $2 in megaflow_hpc) exit 0;; esac\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        lines = [
            f"MEGAFLOW_PYTHON={python}",
            "MEGAFLOW_MPI=none",
            "MEGAFLOW_REQUEUES=3",
        ]
        (self.run.path / "env.sh").write_text("\n".join(lines))
        self.command("srun", SRUN)
        self.command("sleep", SLEEP)
        self.variables = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TMPDIR": str(folder / "tmp"),
            "NOTES": str(self.notes),
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_JOB_END_TIME": str(int(time.time()) + 60),
        }

    def command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def scontrol(self, *answers: str) -> None:
        """Makes ``scontrol`` give these answers to requeues in order, and agree to those after them."""
        lines = [f'echo "$*" >>"{self.notes}/scontrol"', f'case $(wc -l <"{self.notes}/scontrol") in']
        lines += [f"{n}) echo '{answer}' >&2; exit 1 ;;" for n, answer in enumerate(answers, 1)]
        self.command("scontrol", "\n".join([*lines, "esac"]))

    def said(self, name: str) -> list[str]:
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []

    def play(self, role: script.Role = "pods", text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        text = text or script.script(script.Job(role, {}, run=str(self.run)))
        path, log = self.notes.parent / "slurm_script", self.notes.parent / "log"
        path.write_text(text)
        command, env = ["bash", str(path), str(self.run)], {**self.variables, **variables}
        with log.open("w") as file:  # the scripts read their own log
            done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.PIPE, text=True, timeout=60)
        return subprocess.CompletedProcess(command, done.returncode, log.read_text(), done.stderr)


@pytest.fixture
def here(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_refused_requeue_is_repeated_until_slurm_agrees(here: Site) -> None:
    here.scontrol("Unable to contact slurm controller (connect failure)", "Unexpected message received for job 7_0")
    done = here.play()
    assert here.said("scontrol") == ["requeue 7_0"] * 3, done
    pauses = [int(pause) for pause in here.said("sleep")]
    assert pauses[0] == 1
    assert pauses[1] in (2, 3)
    assert pauses[2:] == [30], "it waits for Slurm to end the shell"
    assert Marks(here.run).refused() == []


def test_requests_end_an_hour_after_the_walltime_and_leave_slurms_words(here: Site) -> None:
    here.scontrol(*["Unable to contact slurm controller (connect failure)"] * 99)
    here.variables["SLURM_JOB_END_TIME"] = str(int(time.time()) - 3597)
    here.command("sleep", SLEEP + "; /bin/sleep 0.6")
    done = here.play()
    assert done.returncode == 1
    assert 2 <= len(here.said("scontrol")) < 9
    assert max(map(int, here.said("sleep"))) < 64
    (refused,) = Marks(here.run).refused()
    assert (refused.job, refused.role) == ("7_0", "pod")
    assert refused.words == "Unable to contact slurm controller (connect failure)"
    assert time.time() - refused.at < 60
    assert "scontrol requeue 7_0: Unable to contact" in done.stdout


@pytest.mark.parametrize(
    "words", ["Requested operation is presently disabled for job 7_0", "Invalid job id specified for job 7_0"]
)
def test_a_final_refusal_is_not_repeated(here: Site, words: str) -> None:
    here.scontrol(*[words] * 99)
    assert here.play().returncode == 1
    assert here.said("scontrol") == ["requeue 7_0"]
    assert [refused.words for refused in Marks(here.run).refused()] == [words]
    here.scontrol()
    here.play(STATE="done")
    assert Marks(here.run).refused() == [], "a later start removes the record"


def test_a_request_whose_answer_was_lost_counts(here: Site) -> None:
    here.scontrol("slurm_requeue error: Zero Bytes were transmitted", "7_0: Job is pending execution")
    here.play()
    assert here.said("scontrol") == ["requeue 7_0"] * 2
    assert Marks(here.run).refused() == []


@pytest.mark.parametrize("name", ["TMPDIR", "SLURM_TMPDIR"])
def test_a_job_starts_although_the_login_nodes_temporary_directory_does_not_exist_here(here: Site, name: str) -> None:
    here.scontrol()
    here.command("srun", SRUN + 'echo "$MEGAFLOW_POD_DIR" >>"$NOTES/place"')
    done = here.play(**{name: str(here.notes / "nowhere")})
    assert here.said("scontrol") == ["requeue 7_0"], done
    [place] = here.said("place")
    assert place.startswith("/tmp/megaflow-pod.")
    assert not Path(place).exists()


def test_after_sigterm_slurm_decides(here: Site) -> None:
    here.scontrol(*["Unable to contact slurm controller"] * 99)
    here.command("sleep", SLEEP + "; kill -TERM $PPID; /bin/sleep 0.3")
    assert here.play().returncode == 1
    assert here.said("scontrol") == ["requeue 7_0"]


def failing_trainer(here: Site, python: Path, srun: str = "exit 1", more: str = "") -> str:
    """A trainer's script, whose step fails."""
    (here.run.path / "training" / "default").mkdir(parents=True)
    (here.run.path / "training" / ".package").mkdir()
    with (here.run.path / "env.sh").open("a") as file:
        file.write(f"\nMEGAFLOW_TRAINER_PYTHON={python} MEGAFLOW_TRAINER_REQUEUES=3 {more}\n")
    here.command("srun", srun)
    return script.script(script.Job("trainer", {}, run=str(here.run), policy="default"))


def test_engines_and_trainers_repeat_their_requests_too(here: Site) -> None:
    python = here.notes.parent / "python"
    python.write_text("#!/bin/sh\ncase $* in *model.server*) exit 75;; *marks*) exit 1;; *-c*) echo True;; esac\n")
    here.scontrol("Unable to contact slurm controller")
    assert here.play("servers").returncode == 0
    assert here.said("scontrol") == ["requeuehold 7_0"] * 2
    (here.notes / "scontrol").unlink()
    here.scontrol("Unable to contact slurm controller", "Requested operation is presently disabled")
    assert here.play(text=failing_trainer(here, python)).returncode == 1
    assert here.said("scontrol") == ["requeue 7"] * 2
    assert [(one.job, one.role) for one in Marks(here.run).refused()] == [("7", "trainer")]
    assert (here.run.path / "training" / "default" / "last").read_text().startswith("lost ")


SERVER_FAILS = """
case "$*" in
    *model.server*) echo "error: unrecognized arguments: --no-such-option"; exit 2 ;;
    *) trap 'exit 143' USR1; while :; do /bin/sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize(
    ("srun", "status", "said"),
    [
        ("echo 'trainer: no tokenizer'; exit 2", 2, "trainer: no tokenizer"),
        ("echo 'trainer: no pod'; exit 69", 69, "trainer: no pod"),
        ("printf 'trainer: no pod\\n  exitcode  : 69 (pid: 7)\\n'; exit 137", 69, "trainer: no pod"),
        (SERVER_FAILS, 2, "--no-such-option"),
    ],
    ids=["mistake", "no pods", "no pods, by torchrun on several nodes", "the engine in its job never starts"],
)
def test_a_trainer_that_would_fail_again_ends_for_good(here: Site, srun: str, status: int, said: str) -> None:
    python = here.notes.parent / "python"
    python.write_text("#!/bin/sh\ncase $* in *-c*) echo True;; esac\n")
    here.scontrol()
    share = "MEGAFLOW_TRAINER_SHARE=sleep" if srun is SERVER_FAILS else ""
    text = failing_trainer(here, python, srun, share)
    assert here.play(text=text).returncode == status
    assert here.said("scontrol") == []
    head, _, log = (here.run.path / "training" / "default" / "last").read_text().partition("\n")
    assert head.split()[::2] == ["failed", str(status)]
    assert said in log


def test_failures_are_counted_through_all_jobs_that_replace_each_other(here: Site) -> None:
    """Jobs with Requeue=0 are replaced by new ones. An engine or trainer that always fails is given up nevertheless."""
    python = here.notes.parent / "python"
    python.write_text("#!/bin/sh\ncase $* in *model.server*|*marks*) exit 1;; *-c*) echo True;; esac\n")
    here.scontrol(*["Requested operation is presently disabled"] * 99)
    engine = script.script(script.Job("servers", {}, run=str(here.run), base=8))
    trainer = failing_trainer(here, python)
    for text, asked in ((engine, "{}_0"), (trainer, "{}")):
        (here.notes / "scontrol").unlink(missing_ok=True)
        for job in range(11, 16):
            here.play(text=text, SLURM_JOB_ID=str(job), SLURM_ARRAY_JOB_ID=str(job))
        assert here.said("scontrol") == [f"requeue {asked.format(job)}" for job in (11, 12, 13)]


def test_a_gather_job_whose_walltime_ends_repeats_its_request(here: Site) -> None:
    python = here.notes.parent / "python"
    python.write_text("#!/bin/sh\ncase $* in *gather*) kill -USR2 $PPID; exec /bin/sleep 30;; esac\n")
    here.scontrol("Unable to contact slurm controller")
    assert here.play("gather").returncode == 143, "it was ended"
    assert here.said("scontrol") == ["requeue 7"] * 2
    assert Marks(here.run).refused() == []
    here.scontrol(*["Requested operation is presently disabled for job 7"] * 9)
    here.play("gather")
    assert [(one.job, one.role) for one in Marks(here.run).refused()] == [("7", "gather")]
    (here.notes / "scontrol").unlink()
    python.write_text("#!/bin/sh\ncase $* in *gather*) kill -TERM $PPID; /bin/sleep 0.5; exit 130;; esac\n")
    here.play("gather")
    assert here.said("scontrol") == [], "Slurm decides"
    assert Marks(here.run).refused() == [], "a later start removes the record"


def test_a_submitted_script_knows_that_it_is_the_batch_script_whatever_its_parent(here: Site) -> None:
    """Under ParaStation's psslurm no process is called slurmstepd."""
    here.scontrol()
    here.play()
    assert here.said("scontrol") == ["requeue 7_0"]
    by_hand = (ROOT / "sbatch" / "sandbox_pods.sbatch").read_text()
    here.play(text=by_hand)
    assert here.said("scontrol") == ["requeue 7_0"], "a command of a user's own job: the user decides"
    here.play(text="#!/bin/bash\nexport SLURM_TASK_PID=$$\n" + by_hand)
    assert here.said("scontrol") == ["requeue 7_0"] * 2


def test_a_preempted_start_does_not_count_as_one_that_stored_nothing(here: Site) -> None:
    here.scontrol()
    for _ in range(6):
        here.play(SCENE="preempted")
    assert len(here.said("scontrol")) == 6
    assert not list(here.run.logs.glob("*.requeues"))
    for _ in range(6):
        here.play()
    assert len(here.said("scontrol")) == 6 + 3


def test_pods_of_a_site_that_limits_requests_drain_one_after_another(here: Site) -> None:
    here.scontrol()
    drains = 'until [ -e "$MEGAFLOW_POD_DIR/drain" ]; do /bin/sleep 0.05; done; cat "$MEGAFLOW_POD_DIR/drain"'
    here.command("srun", f'{SRUN}{drains} >>"$NOTES/why"; echo "$MEGAFLOW_END" >>"$NOTES/end"')
    with (here.run.path / "env.sh").open("a") as file:
        file.write("\nmegaflow_lead_s=60 megaflow_window_s=18\n")
    walltime_end = int(time.time()) + 600
    here.variables |= {"SLURM_JOB_END_TIME": str(walltime_end), "SLURM_ARRAY_TASK_COUNT": "2"}
    for element in "01":
        here.play(SLURM_ARRAY_TASK_ID=element)
    ends = [int(end) for end in here.said("end")]
    assert [end % 18 for end in ends] == [0, 9], "each has its own second of the window"
    assert all(walltime_end - 18 < end <= walltime_end for end in ends)
    assert here.said("why") == ["walltime"] * 2
    naps = [int(pause) for pause in here.said("sleep") if int(pause) > 60]
    assert all(end - 60 - 30 <= nap + walltime_end - 600 <= end - 60 for end, nap in zip(ends, naps, strict=True))
    assert here.said("scontrol") == ["requeue 7_0", "requeue 7_1"]


def test_every_srun_waits_for_all_tasks(here: Site) -> None:
    here.scontrol()
    here.play()
    (words,) = here.said("srun")
    assert "--wait=0" in words
    for path in (ROOT / "megaflow_hpc" / "slurm").glob("*.sh"):
        for call in path.read_text().replace("\\\n", " ").splitlines():
            if call.strip().startswith("srun "):
                assert "--wait=0" in call, (path, call)
    over = over_nodes(Launch(["engine"], {}), 2, Path("/p"), {"SLURM_JOB_NUM_NODES": "2"})
    assert "--wait=0" in over.command


def test_the_lead_time_is_that_of_sbatchs_signal() -> None:
    def parsed(slurm: dict[str, object]) -> config.CampaignConfig:
        return config.parse({"name": "x", "tasks": "t/*", "agent": "oracle", "slurm": slurm})

    campaign = parsed({"pods": {"signal": "B:USR2@300"}})
    assert campaign.slurm.lead_s == 300
    assert script.pod_job(campaign, RunDir("/r")).options["signal"] == "B:USR2@300"
    assert script.server_job(campaign, RunDir("/r"), 1, 1).options["signal"] == "B:USR2@60"
    stored = {"pods": {"extra": {}}, "extra": {}, "lead_s": 90}
    fields = {"name": "x", "tasks": ["t"], "agent": ["oracle"], "slurm": stored}
    assert config.resolved(config.CampaignConfig, fields).slurm.lead_s == 90, "as an earlier version has it"
    for wrong, why in (
        ({"pods": {"signal": "B:USR2@39"}}, "pods.signal: write at least 40 seconds"),
        ({"pods": {"signal": "TERM@60"}}, "slurm.pods.signal 'TERM@60': write B:USR2@SECONDS"),
        ({"pods": {"pools": [{"signal": "B:USR2@90"}]}}, "signal: all pools take it from slurm.pods"),
        ({"lead_s": 300}, "unknown key 'slurm.lead_s'; .* and options of sbatch"),
        ({"srun": ["--network=job_vni"]}, "unknown key 'slurm.srun'"),
        ({"servers": {"cpus-per-gpu": 0}}, "expected a whole number above 0"),
        ({"servers": {"cpus-per-gpu": True}}, "expected a whole number above 0"),
        ({"pods": {"pools": [{"cluster": "other"}]}}, "did you mean 'clusters'"),
        ({"pods": {"pools": [{"nodes": 2}]}}, "nodes: all pools take it from slurm.pods"),
        ({"time": "soon"}, "slurm.time 'soon': 'soon' is not a time"),
        ({"gather": {"partiton": "cpu"}}, "unknown key 'slurm.gather.partiton'; did you mean 'partition'"),
        (
            {"mail-type": ["END", "FAIL"]},
            "slurm.mail-type: expected one value, .* such as END,FAIL",
        ),
        ({"pods": {"--partition": "cpu"}}, "slurm.pods.--partition 'cpu': write partition"),
        ({"qos": "a", "--qos": "b"}, "slurm.--qos 'b': is there twice, in two spellings"),
    ):
        with pytest.raises(ConfigError, match=why):
            parsed(wrong)


@pytest.mark.parametrize("section", ["slurm", "pods", "servers", "trainer", "gather"])
def test_what_jobs_set_themselves_and_short_options_are_refused_all_at_once(section: str) -> None:
    wrong = {name: 1 for name in OWN_OPTIONS if name not in SECTIONS[section].model_fields}
    wrong |= {"t": 10, "M": "other", "-G": 1}
    of_gpus = ("cpus-per-gpu", "dependency")
    own = {"pods": ("signal", "clusters", "dependency"), "gather": ("signal",), "servers": of_gpus, "trainer": of_gpus}
    taken = own.get(section, ())
    slurm = wrong if section == "slurm" else {section: wrong}
    with pytest.raises(ConfigError) as error:
        config.parse({"name": "x", "tasks": "t/*", "agent": "oracle", "slurm": slurm})
    lines = str(error.value).splitlines()
    for name in wrong.keys() - set(taken):
        line = next(line for line in lines if f"{section}.{name} " in line)
        assert "write the option's long name" in line if len(name.strip("-")) == 1 else "leave it out: " in line
