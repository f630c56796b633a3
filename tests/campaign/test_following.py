"""Looking at a campaign: silent pods, what was retried, watch, what was idle; and ending it at once."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.monitor.status import STALE_S, Monitor
from megaflow_hpc.monitor.usage import JobUse, totals
from tests.support.campaigns import Make, planned, running, verb
from tests.support.processes import processes
from tests.support.waiting import until


def event(run: Run, name: str, age_s: float, **fields: object) -> None:
    with open(run.dir.event_file("7_0", "0"), "a") as file:
        file.write(json.dumps({"t": time.time() - age_s, "event": name, **fields}) + "\n")


def test_a_pod_without_signs_of_life_is_silent_and_a_clock_that_is_off_does_not_matter(make_campaign: Make) -> None:
    run = planned(make_campaign(1))
    event(run, "pod", 2 * STALE_S, state="started", node="n1")
    event(run, "attempt", 2 * STALE_S, id="task0/oracle/0", attempt=0, kind="sandbox", error="x")
    done = verb("status", run.path)
    assert re.search(r"pod 7_0.0 on n1 is silent for \d{3} s", done.stdout)
    assert "retried by cause: sandbox 1" in done.stdout
    monitor = Monitor(run.dir)
    assert monitor.status()["pods"][0]["state"] == "silent"
    event(run, "engine", 2 * STALE_S, rank=1, state="ready", node="n1")  # it writes: only its clock is behind
    assert monitor.status()["pods"][0]["state"] == "started"


def test_watch_follows_to_the_end_and_leaves(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(1)).submit(launcher="local")
    done = verb("watch", run.path, "--every", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    pages = [json.loads(line) for line in done.stdout.splitlines()]
    assert pages[-1]["state"] == "finished"
    assert pages[-1]["rollouts"]["completed"] == 2
    done = verb("watch", run.path)  # no terminal: a line
    assert re.fullmatch(r"\d\d:\d\d:\d\d small: finished, 2/2 done, 0 running, pods 0\n", done.stdout)
    run.wait(timeout_s=60)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_local_campaign_at_once(make_campaign: Make) -> None:
    process, path = running(make_campaign(1, agent="oracle", solution="sleep 300; echo 42 > answer"))
    process.send_signal(signal.SIGINT)
    until(lambda: Run(path).status()["pods"][0]["state"] != "started", "the pod drains")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"megaflow-hpc resume {path}" in said
    [pod] = Run(path).status()["pods"]
    assert pod["state"] == "gone", "it was not waited for"
    assert not [words for _, words in processes() if path in words]


def test_idle_seconds_are_those_in_which_no_rollout_ran() -> None:
    engine, gather = JobUse((0, 100), 1, 2, "6_0", "servers"), JobUse((100, 130), 2, 0, "8", "gather")
    early, late = JobUse((10, 100), 4, 0, "7_0", "pods"), JobUse((60, 80), 4, 0, "7_1", "pods")
    ran = [("7_0", (30, 50)), ("7_0", (40, 60)), ("7_1", (70, 90))]
    found = totals([engine, early, late, gather], ran)
    assert found["gpu_seconds"] == 200
    assert found["idle_gpu_seconds"] == 2 * (30 + 10 + 10)
    assert found["core_seconds"] == 100 + 4 * 90 + 4 * 20 + 2 * 30
    assert found["idle_core_seconds"] == 50 + 4 * (20 + 40) + 4 * 10, "the first pod idles while the second works"
    assert found["gpus_outlived_last_rollout_s"] == 10
    assert totals([], [])["idle_gpu_seconds"] == 0


def test_what_ran_in_the_second_that_accounting_cuts_off_is_work() -> None:
    pod, engine = JobUse((10, 20), 4, 0, "7_0", "pods"), JobUse((10, 20), 1, 1, "6_0", "servers")
    ends = (19.5, 20.0, 20.7, 20.99)
    idle = [totals([pod, engine], [("7_0", (12.0, end))]) for end in ends]
    assert [each["idle_core_seconds"] for each in idle] == [round(5 * (10 - (end - 12.0)), 1) for end in ends]
    whole = totals([pod], [("7_0", (10.0, 20.9))])
    assert (whole["core_seconds"], whole["idle_core_seconds"]) == (40, 0), "never less than none"
