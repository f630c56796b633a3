"""The help of every verb: required parts, forbidden words, and examples that parse."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import SECTIONS, build_parser, main
from megaflow_hpc.cli.parser import verbs_of

Capture = pytest.CaptureFixture[str]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for below in verbs_of(parser).values():
        yield from parsers(below)


TOP = build_parser()
EVERY = {parser.prog: parser for parser in parsers(TOP)}


def call(*words: str) -> int:
    return main(words)


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return name → help of each argument and verb of a parser."""
    lines = {"/".join(action.option_strings) or action.dest: str(action.help) for action in parser._actions}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines |= {line.dest: str(line.help) for line in action._choices_actions}
    return {name: line for name, line in lines.items() if line not in ("None", argparse.SUPPRESS)}


@pytest.mark.parametrize("prog", sorted(EVERY))
def test_help_is_plain_text_that_fits_the_terminal(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = EVERY[prog]
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    assert not re.search(r"`|:\w+:`|\*\*|%\(", text)
    epilog = parser.epilog or ""
    long = [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  ") and line not in epilog]
    assert long == []
    for name, line in helps(parser).items():
        assert line[0].islower() or line.split()[0].isupper() or (line[0].isupper() and not line[1].islower()), name
        assert not line.endswith("."), name


@pytest.mark.parametrize("prog", sorted(EVERY.keys() - {"megaflow-hpc"}))
def test_every_example_is_a_command_line_that_parses(
    prog: str, planned: Run, campaign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(campaign.parent)  # if latest is a run
    examples = (EVERY[prog].epilog or "").splitlines()[1:]
    assert examples
    own = prog.removeprefix("megaflow-hpc ")
    assert f"{own} " in f"{examples[0]} "
    for line in examples:
        words = shlex.split(line, comments=True)
        words = words[words.index("megaflow-hpc") + 1 :]
        end = next((place for place, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
        TOP.parse_args(words[:end])


def test_types_of_arguments_say_what_they_expected() -> None:
    """``argparse`` would say "invalid _limit value": a function's name without a remedy."""
    silent = []
    for prog, parser in EVERY.items():
        for action in parser._actions:
            try:
                parser._get_value(action, "no such value")
            except argparse.ArgumentError as error:
                silent += [] if ": no such value: " in str(error) else [(prog, action.option_strings)]
    assert silent == []


def test_the_bare_command_and_help_print_the_verbs_by_what_people_do(capsys: Capture) -> None:
    assert call() == 0
    said = capsys.readouterr()
    assert said.err == ""
    titles = re.findall(r"^([a-z, ]+):$", said.out, re.MULTILINE)
    assert [title for title in titles if title in SECTIONS] == [*SECTIONS]
    listed = [verb for verbs in SECTIONS.values() for verb in verbs]
    assert sorted(listed) == sorted(verbs_of(build_parser())), (
        "SECTIONS of megaflow_hpc/cli/__init__.py lists each verb"
    )
    assert call("help") == 0
    assert capsys.readouterr().out == said.out
    for words in (["run"], ["images", "build"]):
        assert call("help", *words) == 0
        shown = capsys.readouterr().out
        assert call(*words, "--help") == 0
        assert shown == capsys.readouterr().out
    assert call("help", "variables") == 0
    printed = capsys.readouterr().out
    assert "  MEGAFLOW_SCRATCH\n      node-local directory for sandboxes" in printed
    assert "MEGAFLOW_POD\n" not in printed
    assert call("images") == 0
    assert "usage: megaflow-hpc images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sttus RUN", "megaflow-hpc: sttus: no such verb; did you mean status?; see: megaflow-hpc --help"),
        ("frobnicate", "megaflow-hpc: frobnicate: no such verb; see: megaflow-hpc --help"),
        ("images lst", "megaflow-hpc images: lst: no such verb; did you mean list?; see: megaflow-hpc images --help"),
        ("help sttus", "megaflow-hpc: sttus: no such verb; did you mean status?; see: megaflow-hpc --help"),
        ("help run it", "megaflow-hpc run: it: one argument too many; see: megaflow-hpc run --help"),
        (
            "status RUN --rollots",
            "megaflow-hpc status: --rollots: no such option; did you mean --rollouts?; see: megaflow-hpc status --help",
        ),
        ("status RUN -x", "megaflow-hpc status: -x: no such option; see: megaflow-hpc status --help"),
        ("status RUN --roll", "megaflow-hpc status: --roll: no such option; did you mean --rollouts?; see: "),
        ("--jsn status RUN", "megaflow-hpc: --jsn: no such option; did you mean --json?; see: megaflow-hpc --help"),
        ("status", "megaflow-hpc status: missing: RUN; see: megaflow-hpc status --help"),
        ("status RUN RUN", "megaflow-hpc status: RUN: one argument too many; see: megaflow-hpc status --help"),
        (
            "run F --launcher slrm",
            "megaflow-hpc run: --launcher: slrm: expected auto, local or slurm; did you mean slurm",
        ),
        ("--json", "megaflow-hpc: missing: VERB; see: megaflow-hpc --help"),
        ("images --json", "megaflow-hpc images: missing: VERB; see: megaflow-hpc images --help"),
        ("--json help", "megaflow-hpc help: --json: this verb prints no JSON; see: megaflow-hpc help --help"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: str, said: str, capsys: Capture) -> None:
    assert call(*words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith(said)


def test_wrong_words_that_steer_a_terminal_are_shown_as_escapes(capsys: Capture) -> None:
    assert call("status\n\x1b[2J") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line
    assert "no such verb" in line


def test_output_that_nobody_takes_is_no_traceback() -> None:
    command = [sys.executable, "-m", "megaflow_hpc", "help", "variables"]
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "megaflow-hpc: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_json_and_debug_may_stand_anywhere(planned: Run, capsys: Capture) -> None:
    shown = []
    for words in ("--json status {}", "status --json {}", "status {} --json", "--debug status {} --json --debug"):
        assert call(*words.format(planned.path).split()) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0].startswith("{")
    assert len({text.partition('"rate_per_s"')[0] for text in shown}) == 1
    assert call("images", "--json", "list") == 0
    assert capsys.readouterr().out.startswith("{")
    for words in (["--debug", "status", "/no/run"], ["status", "/no/run", "--debug"]):
        with pytest.raises(Exception, match="/no/run"):
            main(words)


def filled(action: argparse.Action) -> list[str]:
    """Return words that an argument accepts: an option with its values, or the values alone."""
    values = list(map(str, action.choices or ())) or ["1", "a", "core_hours=1", "1/2", "steps=1"]
    count = action.nargs if isinstance(action.nargs, int) else 2 if action.nargs in ("+", "*") else 1
    for value in ["latest"] if action.dest == "run_dir" else values:
        try:
            TOP._get_value(action, value)
        except argparse.ArgumentError:
            continue
        return [*action.option_strings[-1:], *[value] * count]
    raise AssertionError(f"no value for {action.option_strings or action.dest}")


def test_options_may_stand_before_between_and_behind_what_a_verb_needs(
    planned: Run, campaign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options with any number of values are the hard case: they could take the campaign file as a value."""
    monkeypatch.chdir(campaign.parent)
    tried = 0
    for parser in (parser for parser in EVERY.values() if not verbs_of(parser)):
        options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        required = [word for action in options if action.required for word in filled(action)]
        own = [
            word for a in parser._actions if not a.option_strings and a.nargs not in ("?", "*") for word in filled(a)
        ]
        for action in (action for action in options if not action.required):
            option = filled(action)
            orders = [[*own, *option], [*option, *own], [*own[:1], *option, *own[1:]]]
            if not parser._mutually_exclusive_groups:
                found = [vars(TOP.parse_args([*parser.prog.split()[1:], *required, *words])) for words in orders]
                assert found[0] == found[1] == found[2], option
                tried += 1
    assert tried > 100


def test_an_option_of_several_values_leaves_a_verb_what_it_needs(capsys: Capture) -> None:
    parse = TOP.parse_args
    for words in (["c.yaml", "--only", "a", "b"], ["--only", "a", "b", "c.yaml"], ["--only", "a", "b", "--", "c.yaml"]):
        found = parse(["submit", "--json", *words])
        assert (found.campaign, found.only, found.json) == ("c.yaml", ["a", "b"], True)
    assert parse(["tasks", "validate", "--only", "-", "tasks"]).only == ["-"]
    assert parse(["list", "a", "--json", "b"]).directories == ["a", "b"]
    with pytest.raises(SystemExit):
        parse(["submit", "--only", "c.yaml"])
    assert capsys.readouterr().err == "megaflow-hpc submit: missing: CAMPAIGN; see: megaflow-hpc submit --help\n"
