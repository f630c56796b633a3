"""SWE-bench lines of somebody else: no field of one runs anything, names a file or ends in a traceback when read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.swebench import package
from megaflow_hpc.tasks.swebench.instances import Instance, Line, parse, read_instances
from megaflow_hpc.tasks.swebench.plan import ask, read_tasks, request_fields

GOOD = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "version": "1.0",
    "problem_statement": "it is broken",
    "patch": "",
    "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["t.py::test"],
    "PASS_TO_PASS": [],
    "runner": "named",
}


def lines(path, *changes):
    path.write_text("".join(json.dumps({**GOOD, **change}) + "\n" for change in changes))
    return path


# --- what a field may not be -----------------------------------------------------------------------------------------

REFUSED = {
    "an image that is the host": {"image": "/"},
    "an image that is a file of the host": {"docker_image": "/home/someone/secret.sif"},
    "an image that climbs out of a mapping's directory": {"image_name": "swebench/../../../home/someone/secret"},
    "an image that is a relative path": {"image": "./secret.sif"},
    "an image of two lines": {"image": "a\n%setup"},
    "a work directory that climbs": {"workdir": "/testbed/../etc"},
    "a work directory of two lines": {"workdir": "/testbed\ntouch /x"},
    "an id that is a directory above": {"instance_id": ".."},
    "an id as long as a file system bears": {"instance_id": "a" * 5000},
    "fields of other kinds": {"FAIL_TO_PASS": {"a": 1}},
    "commands of other kinds": {"test_cmds": [1, 2]},
    "an environment of other kinds": {"env": [1]},
    "another form, of other kinds": {"org": 1, "number": [], "fix_patch": 3, "base": "x", "resolved_issues": 7},
    "tests of other kinds": {"org": "o", "number": 1, "fix_patch": "", "f2p_tests": 5},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_field_that_names_what_it_should_not_is_refused_with_its_line(tmp_path, change):
    with pytest.raises(ConfigError, match=r"lines\.jsonl:2"):
        read_tasks(lines(tmp_path / "lines.jsonl", {"instance_id": "first__one-1"}, change))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        json.dumps({**GOOD, "FAIL_TO_PASS": DEEP}),
        "[" + "[]," * 300_000,
    ],
    ids=["lists", "objects", "a list in a text", "many lists"],
)
def test_deep_and_wide_json_is_an_error_with_its_line(tmp_path, text, capsys):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + text + "\n")
    assert main(["tasks", "import", str(path), "--strict"]) == 2
    assert f"{path}:2: " in capsys.readouterr().err
    assert main(["tasks", "import", str(path)]) == 0
    assert f"left out: {path}:2: " in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    *(f for f in Instance.__dataclass_fields__),
    *("install_config", "docker_image", "image_name", "test_cmds", "fail_to_pass", "pass_to_pass"),
    *("org", "number", "base", "resolved_issues", "f2p_tests", "fix_patch", "title", "body", "fixed_tests"),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(change=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5))
def test_whatever_the_fields_hold_a_line_is_read_or_refused(tmp_path_factory, change):
    data = json.dumps({**GOOD, **change}).encode()
    try:
        instance = parse(Line(tmp_path_factory.getbasetemp() / "x.jsonl", 1, 0, data))
    except ConfigError:
        return
    assert isinstance(instance, Instance)
    assert not instance.image.startswith(("/", "."))


# --- what planning runs ----------------------------------------------------------------------------------------------


def commands(canary) -> list[str]:
    run = f"touch {canary}"
    return [f"$({run})", f"`{run}`", f"; {run} ;", f"'; {run}; '", f'"; {run}; "', f"\n{run}\n", f"%setup\n{run}"]


def test_no_field_is_run_when_a_campaign_is_planned(tmp_path):
    """Planning asks the ``swebench`` package for commands; nothing of a line is a command before there is a sandbox."""
    canary = tmp_path / "canary"
    names = ("instance_id", "repo", "base_commit", "version", "patch", "test_patch", "test_cmd", "eval_script")
    names += ("log_parser", "eval_type", "problem_statement")
    asked = []
    for text in commands(canary):
        for name in names:
            change = {name: GOOD.get(name, "") + text, "runner": ""}
            with suppress(ConfigError):
                asked += [request_fields(line) for _, line in read_instances(lines(tmp_path / "lines.jsonl", change))]
    assert len(asked) > 40
    ask({"op": "plan", "instances": asked})
    assert not canary.exists()


def test_no_module_is_imported_for_a_parser_by_its_name(tmp_path):
    names = ("parse_log_os.system", "os.system", "__import__('os')", "parse_log_pytest ")
    asked = [parse(Line(tmp_path, 1, 0, json.dumps({**GOOD, "log_parser": name}).encode())) for name in names]
    plans = ask({"op": "plan", "instances": list(map(request_fields, asked))})["plans"]
    assert ["error" in plan for plan in plans] == [True] * len(names)


def test_a_line_cannot_ask_the_child_for_anything_else(tmp_path):
    """The child answers plan and grade of fields; a field cannot make it open a file."""
    secret = tmp_path / "secret"
    secret.write_text("PASSED t.py::test\n")
    change = {"op": "grade", "log": str(secret), "plan": {"log_parser": "parse_log_pytest"}}
    instance = parse(Line(tmp_path, 1, 0, json.dumps({**GOOD, **change}).encode()))
    assert not {"op", "log", "plan"} & set(request_fields(instance))


def test_names_of_files_in_patches_reach_the_shell_quoted():
    from megaflow_hpc.tasks.swebench.runs import _place_tests, _script

    for name in ("a b;touch x", "$(touch x)", "-rf", "'; touch x; '", "`touch x`.py"):
        instance = Instance("i", "r", "p", ("t.py::a",), test_patch=f"diff --git a/{name} b/{name}\n", workdir="/a b;c")
        for text in ("\n".join(_place_tests(instance)), _script(instance)):
            check = "rm() { printf 'rm:%s\\n' \"$@\"; }; git() { :; }; cd() { :; }; source() { :; }; conda() { :; }\n"
            done = subprocess.run(
                ["bash", "-c", check + text.replace("set -uxo pipefail", "")],
                capture_output=True,
                text=True,
                env={"PATH": os.environ["PATH"]},
            )
            said = done.stdout.splitlines()
            assert [f"rm:{word}" for word in ("-rf", "--", name)] == [s for s in said if s.startswith("rm:")][:3], said


def test_the_child_imports_nothing_from_where_a_campaign_is_planned(tmp_path):
    (tmp_path / "swebench.py").write_text("raise SystemExit('imported from the work directory')")
    request = json.dumps({"op": "plan", "instances": []}).encode()
    done = subprocess.run([sys.executable, "-P", package.__file__], input=request, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
