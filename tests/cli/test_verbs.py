"""Every verb: its help, one line about a bad argument, and only JSON on stdout."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import config
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import GROUPS, build_parser, main
from megaflow_hpc.cli.parser import verbs_of
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent
from megaflow_hpc.rundir.pods.condensing import condense
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.samples import commit, run_dir, trajectory

NO_RUN = "there is no such directory; list run directories with: megaflow-hpc list"
NO_CAMPAIGN = "correct the path"
NO_STORE = "expected a trajectories.h5"
NO_TASK = "build some with: megaflow-hpc tasks build"

WRONG = {
    "init": ("/no/campaign.yaml", "/no/campaign.yaml", "create it, or name another file"),
    "recipes": ("nothing", "nothing", "no such recipe; the recipes are: "),
    "check": ("/no/campaign.yaml", "/no/campaign.yaml", NO_CAMPAIGN),
    "plan": ("/no/campaign.yaml", "/no/campaign.yaml", NO_CAMPAIGN),
    "run": ("/no/campaign.yaml --launcher local", "/no/campaign.yaml", NO_CAMPAIGN),
    "submit": ("/no/campaign.yaml --dry-run", "/no/campaign.yaml", NO_CAMPAIGN),
    "resume": ("/no/run", "/no/run", NO_RUN),
    "extend": ("/no/run", "/no/run", NO_RUN),
    "scale": ("/no/run --pods 1", "/no/run", NO_RUN),
    "cancel": ("/no/run", "/no/run", NO_RUN),
    "gather": ("/no/run", "/no/run", NO_RUN),
    "list": ("--newest many", "many", "give a whole number"),
    "logs": ("/no/run", "/no/run", NO_RUN),
    "status": ("/no/run", "/no/run", NO_RUN),
    "watch": ("/no/run", "/no/run", NO_RUN),
    "prove": ("/no/campaign.yaml", "/no/campaign.yaml", NO_CAMPAIGN),
    "doctor": ("--jobs", "--jobs", "no such option"),
    "show": ("/no/run 0", "/no/run", NO_STORE),
    "validate": ("/no/file.h5", "/no/file.h5", NO_STORE),
    "diff": ("/no/run 0 1", "/no/run", NO_STORE),
    "export": ("/no/run --format jsonl", "/no/run", NO_STORE),
    "import": ("/no/x.jsonl --output /no/file.h5", "/no/x.jsonl", "expected JSON lines of megaflow-hpc export"),
    "reverify": ("/no/run", "/no/run", NO_RUN),
    "compact": ("/no/file.h5", "/no/file.h5", NO_STORE),
    "anonymise": ("/no/file.h5 -o /no/copy.h5", "/no/file.h5", NO_STORE),
    "du": ("/no/run", "/no/run", NO_STORE),
    "tasks import": ("/no/x.jsonl --output swebench", "/no/x.jsonl", "correct the path"),
    "tasks build": ("/no/bugs.yaml --output /no/tasks", "/no/bugs.yaml", NO_CAMPAIGN),
    "tasks validate": ("/no/tasks", "/no/tasks", NO_TASK),
    "tasks new": ("a/b /no", "a/b", "expected the id of a task"),
    "agents new": ("my-agent /no", "my-agent", "expected the name of a Python module, such as my_agent"),
    "agents list": ("--lsit", "--lsit", "no such option"),
    "tasks list": ("/no/tasks", "/no/tasks", NO_TASK),
    "images build": ("/no/Dockerfile", "/no/Dockerfile", "correct the path"),
    "images pull": ("/no/image.sif", "/no/image.sif", "neither an address (docker://…) nor a SIF file"),
    "images manifest": ("/no/campaign.yaml", "/no/campaign.yaml", NO_CAMPAIGN),
    "images stage": ("--stagd", "--stagd", "no such option"),
    "images list": ("--stagd", "--stagd", "no such option"),
    "images export": ("nothing -o /no/out.sif", "nothing", "see: megaflow-hpc images list"),
    "images prune": ("deadbeef", "deadbeef", "see: megaflow-hpc images list"),
    "compare": ("/no/run", "/no/run", NO_STORE),
    "report": ("/no/run -o /no/page.html", "/no/run", NO_STORE),
    "track": ("/no/run --to tensorboard", "/no/run", NO_RUN),
    "shell": ("/no/run 0", "/no/run", NO_RUN),
    "usage": ("/no/run", "/no/run", NO_RUN),
    "weights publish": ("/no/run /no/model", "/no/run", NO_RUN),
    "weights list": ("/no/run", "/no/run", NO_RUN),
    "weights send": ("/no/run /no/outbox", "/no/run", NO_RUN),
    "weights receive": ("/no/run /no/inbox", "/no/run", NO_RUN),
    "training fit": ("/no/campaign.yaml", "/no/campaign.yaml", NO_CAMPAIGN),
    "training skip": ("/no/run 12", "/no/run", NO_RUN),
    "training set": ("/no/run lr=1e-6", "/no/run", NO_RUN),
    "janitor": ("--scrtch /no", "--scrtch", "no such option"),
}
"""Verb → arguments of which one is bad, the refused value, and part of the message."""


def verbs(parser: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return every verb that can be called, and its parser."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, below in (pair for group in groups for pair in group.choices.items()):
        yield from verbs(below, f"{words} {name}".strip())
    if not groups:
        yield words, parser


PARSERS = dict(verbs(build_parser()))
NO_JSON = {"completion", "help"}
"""Verbs whose output is itself a text."""


def call(words: str) -> int:
    """Return the exit status of a command line, whether the verb returns or argparse exits."""
    return main(shlex.split(words))


def test_the_table_has_every_verb() -> None:
    assert set(WRONG) == PARSERS.keys() - NO_JSON


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_adds_the_verbs_by_which_it_is_found(group: str) -> None:
    parser = build_parser([GROUPS[group][0]])
    assert tuple(verbs_of(parser)) == (
        tuple(verbs_of(build_parser())) if group in ("completion", "help") else GROUPS[group]
    )


def test_a_verb_is_carried_out_without_the_modules_of_others() -> None:
    code = "import sys; from megaflow_hpc.cli import main; main(['--json', 'du', '/gone']); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "megaflow_hpc.cli.files.store" in modules
    assert [name for name in modules if name.startswith(("megaflow_hpc.cli.making", "rich"))] == []


@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_a_verb_says_what_it_does_and_what_each_of_its_arguments_means(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"{verb} --help") == 0
    assert f"usage: megaflow-hpc {verb}" in capsys.readouterr().out
    parser = PARSERS[verb]
    assert parser.description
    assert [action.dest for action in parser._actions if not action.help] == []
    assert ("--json" in parser._option_string_actions) == (verb not in NO_JSON)


@pytest.mark.parametrize("options", ["", " --json"], ids=["text", "json"])
@pytest.mark.parametrize("verb", sorted(WRONG))
def test_a_bad_argument_is_named_on_stderr_with_the_remedy(
    verb: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, value, remedy = WRONG[verb]
    assert call(f"{verb} {words}{options}") == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = [line for line in said.err.splitlines() if line.startswith("megaflow-hpc") and ": " in line]
    assert value in line
    assert remedy in line
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "words",
    [
        "plan {campaign}",
        "status {run}",
        "status {run} --rollouts",
        "cancel {run}",
        "gather {run}",
        "du {run}",
        "validate {run}/trajectories.h5",
        "weights list {run}",
        "tasks list {tasks}",
        "tasks new mine {tasks}",
        "agents new my_agent {tasks}",
        "agents list",
        "images list",
        "images manifest {campaign}",
        "janitor",
    ],
)
def test_with_json_nothing_else_is_on_stdout(
    words: str, planned: Run, campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.gather()
    line = words.format(run=planned.path, campaign=campaign, tasks=campaign.parent / "tasks")
    assert call(f"{line} --json") == 0, capsys.readouterr().err
    json.loads(capsys.readouterr().out)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import megaflow_hpc

    assert call("--version") == 0
    assert capsys.readouterr().out == f"megaflow-hpc {megaflow_hpc.__version__}\n"


def test_status_lists_rollouts_whose_events_are_condensed(megaflow, tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    Ledger(run).create()
    campaign = config.parse({"name": "x", "tasks": ["t"], "agent": "oracle"})
    write_run(run, RunRecord(campaign=campaign.model_dump(mode="json"), total=6))
    for start in range(6):
        condense(run.events, "7_0", str(start))
        commit(run, "7_0", (0, start, trajectory(start)), start=str(start))
        events = EventWriter(run.event_file("7_0", str(start)))
        events.write(RolloutEvent(id=f"task/default/{start}", status="completed", reward=1.0))
        events.write(PodEvent(state="drained", stored=1))
        events.close()
    status = json.loads(megaflow("status", run, "--rollouts", "--json").stdout)
    assert [each["id"] for each in status["rollout_list"]] == [f"task/default/{start}" for start in range(6)]
    assert status["rollouts"]["completed"] == 6
    [pod] = status["pods"]
    assert (pod["pod"], pod["starts"], pod["stored"]) == ("7_0.5", 6, 6)
