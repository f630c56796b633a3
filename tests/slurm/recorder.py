"""Record what real Slurm commands print while lab tests run, and replay it.

::

    python -m tests.slurm.recorder [SCENE...]      with a lab (launchers/lab)

Runs the test of each scene of :data:`SCENES` in a process of its own, and writes ``recorded/SCENE.txt``: each different
answer to each of the product's queries, in order. A scene ends once the test's jobs have ended. Answers about the site
that equal those of the scene ``finished`` are left out. So are answers that fixtures got before the test asked the
same about the site, and jobs of earlier tests, which ``squeue`` lists for some minutes. :mod:`tests.support.calls`
describes the form of the files. Names of users, paths and clusters are neutral.

:class:`Slurm` answers the same calls in a test from one scene.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.calls import Call, read_calls
from tests.support.places import ROOT

RECORDED = Path(__file__).with_name("recorded")
SOUND = "finished"
"""Other scenes contain of the site only what differs from this one."""
SCENES = {
    "array-limit": "test_sites.py::test_seven_pods_are_one_campaign_where_arrays_have_five_elements",
    "qos-of-twelve-jobs": "test_arrays.py::test_a_qos_that_allows_twelve_jobs_gets_as_many_pods_as_fit",
    "lost-submission": "test_arrays.py::test_jobs_that_nobody_wrote_down_are_found_by_their_comment",
    "two-clusters": "test_clusters.py::test_pods_of_two_clusters_carry_out_one_campaign_and_each_is_asked_for_its_own",
    "other-partitions": "test_clusters.py::test_a_partition_that_the_other_cluster_lacks_is_named",
    SOUND: "test_administration.py::test_a_campaign_of_one_command_is_accounted_for_and_leaves_nothing",
    "doctor": "test_administration.py::test_doctor_proves_mpi_by_two_ranks_in_one_world",
    "no-pmi": "test_doctor_states.py::test_a_sound_site",
    "no-accounting": "test_doctor_states.py::test_slurmdbd_stopped",
    "drained": "test_doctor_states.py::test_a_partition_down_and_nodes_drained",
    "no-default-partition": "test_doctor_states.py::test_a_partition_dropped",
    "no-controller": "test_doctor_states.py::test_the_controller_gone",
    "held-servers": "test_elastic.py::test_no_server_runs_before_pods_have_work_and_none_after",
    "daemons-killed": "test_faults.py::test_a_campaign_ends_without_slurmctld_and_slurmdbd",
    "cancelled-element": "test_faults.py::test_a_cancelled_element_costs_nothing_and_the_campaign_beside_it_even_less",
    "reasons": "test_queue.py::test_run_status_and_watch_say_why_each_pod_waits",
    "longer-than-allowed": "test_queue.py::test_waiting_pods_get_another_walltime_memory_and_partition",
    "brief-qos": "test_queue.py::test_jobs_without_a_time_ask_for_what_a_qos_allows",
    "qos-of-twelve-cpus": "test_resources.py::test_pods_fit_the_cpus_of_a_qos_or_are_refused",
    "ended": "test_faults.py::test_accounting_tells_how_jobs_ended",
    "timeout": "test_short_starts.py::test_accounting_tells_that_a_walltime_ended_a_job",
    "requeued": "test_slurm_campaign.py::test_the_pre_timeout_signal_drains_one_pod_and_requeues_its_element_alone",
    "killed-pod": "test_faults.py::test_a_campaign_killed_and_cancelled_and_resumed_has_every_rollout_once",
    "refused": "test_slurm_campaign.py::test_what_slurm_refuses_is_said_in_its_own_words",
    "heterogeneous": "test_together.py::test_engines_and_pod_are_one_heterogeneous_job_and_one_world",
    "requeued-trainer": "test_training_job.py::"
    "test_a_killed_trainer_is_requeued_and_its_campaign_ends_with_the_training",
    "unlaunched": "test_unlaunched.py::test_resume_releases_what_a_broken_node_could_not_launch",
}
"""Scene → the test of ``tests/lab`` in which it is recorded."""
WRAPPER = """\
#!{python} -I
import json, os, subprocess, sys
name = os.path.basename(sys.argv[0])
others = [folder for folder in os.environ["PATH"].split(":") if folder != {folder!r}]
command = next(path for path in (os.path.join(folder, name) for folder in others) if os.path.exists(path))
words = sys.argv[1:]
if name == "srun" and words[:1] != ["--mpi=list"]:
    os.execv(command, [command, *words])
done = subprocess.run([command, *words], capture_output=True)
sys.stdout.buffer.write(done.stdout)
sys.stderr.buffer.write(done.stderr)
call = dict(words=[name, *words], status=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())
with open({file!r}, "a") as file:
    file.write(json.dumps(call) + "\\n")
sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
"""
WORK = "/work"
"""Stands for the directory in which a test works."""
COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
ASKED = re.compile(
    r"squeue .*-o '?(%i\|%T|%i\|%k|QOS )|sinfo .*-o '?%R\||"
    r"scontrol (-M \S+ |--local )?(show config|(-a )?-o show (partition|job))|"
    r"scontrol release|sacctmgr -nP show |sacct -n -X (-P -j .*NodeList|-S)|sacct -n -P -D|srun --mpi=list|"
    r"sbatch (SCRIPT|--version)|scancel (-M \S+ )?--quiet"
)
"""The product's own queries, and not what tests ask besides."""
SITE = re.compile(r"sinfo|scontrol show config|scontrol -a -o show partition|sacctmgr|srun")
"""Queries about the site and not about jobs."""
OF_DOCTOR = re.compile(rf"{SITE.pattern}|sacct -n -X -S")
"""Queries by which ``doctor`` examines the site."""
JOBS = re.compile(r"squeue --local -h --me -t all")
"""The product's query for its jobs."""
ENDED = re.compile(r"COMPLETED|CANCELLED|FAILED|TIMEOUT|NODE_FAIL|PREEMPTED|DEADLINE|BOOT_FAIL|OUT_OF_MEMORY")
OPTIONS = {"SLURM_TIME_FORMAT": "%s"}
"""Environment of the product's queries."""
END_S = 180.0
"""Seconds within which the jobs of a test must end."""
RAW = "MEGAFLOW_RECORDED_CALLS"
"""Environment variable with the file of the calls, set while a scene is recorded."""
CONFIGURATION = re.compile(
    r"AccountingStorage(Enforce|Host|Port|Type)|ClusterName|MaxArraySize|JobDefaults|SelectType|SLURM_VERSION"
)
"""Lines kept of ``scontrol show config``."""


def read(scene: str) -> Iterator[Call]:
    """Yields the calls of a recorded scene in order."""
    return read_calls(RECORDED / f"{scene}.txt")


class Slurm:
    """Stands for Slurm's commands in place of :func:`subprocess.run`, and answers each call as it was recorded.

    The answers to the same call follow one another; the last one repeats.

    Args:
        folder: The directory in which the recorded test worked.
    """

    def __init__(self, scene: str, folder: Path) -> None:
        self._answers: dict[str, list[Call]] = {}
        for call in map(of_today, read(scene)):
            out = call.out.replace(WORK, str(folder))
            self._answers.setdefault(call.words, []).append(replace(call, out=out))
        for call in read(SOUND):
            if SITE.match(call.words):
                self._answers.setdefault(call.words, [call])
        self.calls: list[str] = []
        """Calls so far, as they would be recorded."""

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        words = neutral(shlex.join(command))
        self.calls.append(words)
        assert words in self._answers, f"not recorded: {words}"
        answers = self._answers[words]
        call = answers.pop(0) if len(answers) > 1 else answers[0]
        return subprocess.CompletedProcess(command, call.status, call.out, call.err)


def of_today(call: Call) -> Call:
    """Returns a call as it is made today. The scene ``refused`` was recorded before."""
    words = re.sub(r"^squeue -h -r", "squeue --local -h -r", call.words)
    return replace(call, words=words)


def neutral(text: str) -> str:
    """Replaces this machine's names and paths."""
    text = re.sub(rf"\b{getpass.getuser()}\b", "ada", text).replace(str(ROOT), "/checkout")
    text = re.sub(r"(AccountingStoragePort +=|host:127.0.0.1:)( ?)\d+", r"\1\g<2>6819", text)
    text = re.sub(r"/tmp/pytest-of-\w+/pytest-\d+/[^/\s]+", WORK, text)
    return re.sub(r"\S*/\.submission_file_\w+\.sh", "SCRIPT", text)


def keep(scene: str, raw: Path) -> None:
    """Writes a scene from the calls that were recorded while its test ran."""
    found = [json.loads(line) for line in raw.read_text().splitlines()]
    begin = next((number for number, one in enumerate(found) if one["words"] == BEGIN), 0)
    again = {words for one in found[begin:] if OF_DOCTOR.match(words := shlex.join(one["words"]))}
    found = [one for n, one in enumerate(found) if n > begin or shlex.join(one["words"]) not in again]
    first = min(_submitted(found), default=0)
    clusters: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return clusters.setdefault(match[0], f"cluster{len(clusters) + 1}")

    calls: dict[Call, None] = {}
    for one in found:
        words, out, err = (neutral(text) for text in (shlex.join(one["words"]), one["out"], one["err"]))
        if not ASKED.match(words):
            continue
        if "show config" in words:
            out = "".join(f"{line}\n" for line in out.splitlines() if CONFIGURATION.match(line))
        if words.startswith("squeue --local"):
            out = "".join(
                f"{line}\n" for line in out.splitlines() if int((re.match(r"\d+", line) or [first])[0]) >= first
            )
        words, out, err = (re.sub(r"\blab[0-9a-f]{8}\b", named, text) for text in (words, out, err))
        calls[Call(words, one["status"], out, err)] = None
    sound = set() if scene == SOUND else set(read(SOUND))
    text = "\n".join(call.text() for call in calls if call not in sound or not SITE.match(call.words))
    version = subprocess.check_output(["sbatch", "--version"], text=True)
    (RECORDED / f"{scene}.txt").write_text(f"{version}tests/lab/{SCENES[scene]}\n\n{text}\n")


BEGIN = ["begin"]
"""Stands in the file of calls where the test begins, after its fixtures."""


def _submitted(calls: Sequence[Any]) -> list[int]:
    sent = "".join(call["out"] for call in calls if call["words"][0] == "sbatch")
    return list(map(int, re.findall(r"Submitted batch job (\d+)", sent)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Marks where a recorded test begins. After it has passed, asks for its jobs until all have ended."""
    raw = Path(os.environ[RAW])
    with raw.open("a") as file:
        file.write(json.dumps({"words": BEGIN, "status": 0, "out": "", "err": ""}) + "\n")
    if (yield).excinfo is not None:
        return
    calls = [json.loads(line) for line in raw.read_text().splitlines()]
    asked = [call["words"] for call in calls if JOBS.match(shlex.join(call["words"]))]
    jobs, deadline = set(_submitted(calls)), time.monotonic() + END_S
    while asked and jobs:
        done = subprocess.run(asked[-1], capture_output=True, text=True, check=True, env={**os.environ, **OPTIONS})
        lines = done.stdout.splitlines()
        if not any(int(line.partition("|")[0].partition("_")[0]) in jobs and not ENDED.search(line) for line in lines):
            return
        assert time.monotonic() < deadline, f"jobs did not end: {lines}"
        time.sleep(0.5)


def record(scene: str) -> bool:
    """Records a scene. Returns whether its test passed; if not, nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "calls")
        raw.touch()
        for name in COMMANDS:
            wrapper = Path(folder, name)
            wrapper.write_text(WRAPPER.format(python=sys.executable, folder=folder, file=str(raw)))
            wrapper.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", RAW: str(raw)}
        test = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, f"tests/lab/{SCENES[scene]}"]
        if subprocess.run(test, env=environment, cwd=ROOT, check=False).returncode:
            return False
        keep(scene, raw)
    return True


def main() -> int:
    scenes = sys.argv[1:] or [SOUND, *(scene for scene in SCENES if scene != SOUND)]
    failed = [scene for scene in scenes if not record(scene)]
    print(f"not recorded: {' '.join(failed)}" if failed else "all recorded")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
