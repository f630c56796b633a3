"""SWE-bench style files: reading, and real instances judged in real sandboxes by the swebench package's own code."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.agents.without_model import NopAgent, OracleAgent
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.images.sources import match_name
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.tasks.swebench import package as swebench_package
from megaflow_hpc.tasks.swebench import runs
from megaflow_hpc.tasks.swebench.instances import Instance, read_instances
from megaflow_hpc.tasks.swebench.plan import load
from megaflow_hpc.tasks.swebench.runs import MARKERS, judge
from megaflow_hpc.types import Task, Verdict
from tests.support.campaigns import verb
from tests.support.swebench_samples import Made, Pair, build_image, make, with_checkout, write_lines

PLAIN = {
    "instance_id": "org__lib-1",
    "repo": "org/lib",
    "problem_statement": "It is wrong.",
    "FAIL_TO_PASS": ["tests/test_a.py::test_new"],
    "PASS_TO_PASS": ["tests/test_a.py::test_old"],
    "base_commit": "abc",
    "version": "1.0",
    "patch": "p",
    "test_patch": "t",
}


def only(path: Path) -> Instance:
    ((_, instance),) = read_instances(path)
    return instance


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"FAIL_TO_PASS": '["a.py::x"]'}, {"FAIL_TO_PASS": ("a.py::x",)}),
        ({"FAIL_TO_PASS": None, "fail_to_pass": "['a.py::x', 'b']"}, {"FAIL_TO_PASS": ("a.py::x", "b")}),
        ({"version": 3.1}, {"version": "3.1"}),
        ({}, {"image": "swebench/sweb.eval.x86_64.org_1776_lib-1:latest", "workdir": "/testbed"}),
        ({"image_name": "a/b"}, {"image": "a/b"}),
        ({"docker_image": "a/c", "image_name": ""}, {"image": "a/c"}),
        (
            {"install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "env_vars": {"A": 1}}},
            {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "env": {"A": "1"}},
        ),
        (
            {"install_config": {"test_cmd": "go test"}, "image_name": "docker.io/swerebenchv2/org-lib:1-abc"},
            {"workdir": "/lib", "image": "docker.io/swerebenchv2/org-lib:1-abc", "test_cmds": "go test"},
        ),
        ({"test_cmds": ["make", "pytest -rA"], "log_parser": "pytest"}, {"test_cmds": "make\npytest -rA"}),
        ({"log_parser": "pytest"}, {"log_parser": "parse_log_pytest"}),
        ({"repo": "swesmith/lib", "test_patch": ""}, {"bug_patch": "p", "patch": "", "test_patch": ""}),
    ],
)
def test_the_data_sets_variants_come_out_in_one_form(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    instance = only(write_lines(tmp_path / "x.jsonl", {**PLAIN, **changes}))
    assert {key: getattr(instance, key) for key in expected} == expected
    # Writing and reading again gives the same.
    assert only(write_lines(tmp_path / "again.jsonl", instance.record())) == instance


LIVE = {"test_cmds": ["pytest -rA"], "log_parser": "pytest"}
REBENCH = {
    "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider -W ignore::DeprecationWarning",
    "log_parser": "parse_log_pytest",
}
SECOND = "docker.io/swerebenchv2/org-lib:1-abc"


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        (LIVE, "pytest -rA"),
        ({"install_config": REBENCH}, f"{REBENCH['test_cmd']} tests/test_a.py"),
        ({"install_config": REBENCH, "image_name": SECOND}, REBENCH["test_cmd"]),
        ({"test_cmd": "pytest -rA -c tests/setup.cfg"}, "pytest -rA -c tests/setup.cfg tests/test_a.py"),
        ({"test_cmd": "python -m pytest --ignore=a/b.py"}, "python -m pytest --ignore=a/b.py tests/test_a.py"),
        ({"test_cmd": "pytest -rA tests/unit"}, "pytest -rA tests/unit"),
        ({"test_cmd": "pytest -rA a.py::test"}, "pytest -rA a.py::test"),
        ({"test_cmd": ["make", "pytest -rA"]}, "make\npytest -rA"),
        ({"test_cmd": "go test ./..."}, "go test ./..."),
    ],
)
def test_the_tests_run_as_in_the_data_sets_own_harness(tmp_path: Path, changes: dict[str, Any], command: str) -> None:
    """SWE-bench-Live lists the tests of the whole suite, whatever the test patch changes."""
    patch = "diff --git a/tests/test_a.py b/tests/test_a.py\n"
    instance = only(write_lines(tmp_path / "x.jsonl", {**PLAIN, **changes, "test_patch": patch}))
    again = only(write_lines(tmp_path / "again.jsonl", instance.fill_in(test_cmd="never").record()))
    for each in (instance, again):
        script = runs._script(each)
        assert script.partition(f": '{MARKERS[0]}'\n")[2].partition("\nSWEBENCH_TEST_EXIT_CODE")[0] == command


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"org": "Cli", "repo": "c:i", "number": 7, "fix_patch": "p", "base": []}, "Cli__c_i-7"),
        ({**PLAIN, "instance_id": "org/lib:1", "repo": ""}, "org_lib_1"),
    ],
)
def test_an_invalid_line_is_excluded_by_the_id_that_its_task_would_have(
    tmp_path: Path, line: dict[str, Any], name: str
) -> None:
    write_lines(tmp_path / "x.jsonl", PLAIN, line)
    left_out: list[str] = []
    (task,) = load_tasks([{"path": "x.jsonl", "exclude": [name], "strict": True}], tmp_path, left_out=left_out)
    assert (task.id, left_out) == ("org__lib-1", [])
    load_tasks([{"path": "x.jsonl", "exclude": ["other"]}], tmp_path, left_out=left_out)
    assert len(left_out) == 1


def test_multi_swe_bench_names_tests_by_their_outcomes(tmp_path: Path) -> None:
    record = {
        "org": "Cli",
        "repo": "cli",
        "number": 7,
        "base": {"sha": "abc"},
        "resolved_issues": [{"title": "Broken", "body": "Indeed."}],
        "fix_patch": "p",
        "test_patch": "t",
        "f2p_tests": {"TestA": {"run": "PASS", "test": "FAIL", "fix": "PASS"}},
        "n2p_tests": {"TestNew": {"run": "NONE", "test": "NONE", "fix": "PASS"}},
        "p2p_tests": {"TestB": {}},
    }
    instance = only(write_lines(tmp_path / "m.jsonl", record))
    assert (instance.instance_id, instance.repo, instance.base_commit) == ("Cli__cli-7", "Cli/cli", "abc")
    assert (instance.FAIL_TO_PASS, instance.PASS_TO_PASS) == (("TestA", "TestNew"), ("TestB",))
    assert (instance.image, instance.workdir) == ("mswebench/cli_m_cli:pr-7", "/home/cli")
    assert instance.problem_statement == "Broken\n\nIndeed."


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("{not json", r"x\.jsonl:3: not JSON .*; expected one JSON object per line"),
        ("[1]", r"x\.jsonl:3: contains list; expected a JSON object"),
        ({**PLAIN, "repo": ""}, r"x\.jsonl:3: repo '': expected a text that is not empty"),
        ({**PLAIN, "FAIL_TO_PASS": "[oops"}, r"x\.jsonl:3: FAIL_TO_PASS '\[oops': expected a list of test names"),
        ({**PLAIN, "FAIL_TO_PASS": []}, r"x\.jsonl:3: FAIL_TO_PASS \[\]: expected at least one test"),
        ({**PLAIN, "patch": ["p"]}, r"x\.jsonl:3: patch \['p'\]: expected a text"),
        ({**PLAIN, "workdir": "repo"}, r"x\.jsonl:3: workdir 'repo': expected an absolute path"),
        (PLAIN, r"x\.jsonl:3: instance_id 'org__lib-1' is also on line 1"),
    ],
)
def test_a_broken_line_is_named_by_number_field_and_value(tmp_path: Path, second: Any, said: str) -> None:
    text = second if isinstance(second, str) else json.dumps(second)
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(PLAIN)}\n\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        load_tasks(["x.jsonl"], tmp_path)


def test_one_broken_line_does_not_refuse_a_file(tmp_path: Path) -> None:
    """Also a line whose tests cannot be run here, and a second line of the same id."""
    java = {**PLAIN, "instance_id": "org__java-1", "FAIL_TO_PASS": ["com.example.TestA"]}
    path = write_lines(tmp_path / "x.jsonl", PLAIN, java, PLAIN, {**PLAIN, "instance_id": "org__lib-2"})
    with path.open("a") as stream:
        stream.write('{"instance_id": "org__lib-3", "repo"\n')
    left_out: list[str] = []
    tasks = load_tasks(["x.jsonl"], tmp_path, left_out=left_out)
    assert [task.id for task in tasks] == ["org__lib-1", "org__lib-2"]
    assert [line.split(": ")[0] for line in left_out] == [f"{path}:{number}" for number in (3, 5, 2)]
    with pytest.raises(ConfigError, match=r"x\.jsonl:3: .*\n.*x\.jsonl:5: .*\n.*x\.jsonl:2: "):
        load_tasks([{"path": "x.jsonl", "strict": True}], tmp_path, left_out=[])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("[]\n[]\n")
    with pytest.raises(ConfigError, match=r"broken\.jsonl:1: contains list.*\n.*broken\.jsonl:2"):
        load_tasks(["broken.jsonl"], tmp_path, left_out=[])


def test_only_the_chosen_lines_must_be_runnable_and_the_others_are_named(tmp_path: Path) -> None:
    java = {**PLAIN, "instance_id": "org__java-1", "FAIL_TO_PASS": ["com.example.TestA"]}
    write_lines(tmp_path / "x.jsonl", PLAIN, java)
    (task,) = load_tasks([{"path": "*.jsonl", "include": ["org__lib*"]}], tmp_path)
    assert (task.id, task.kind, task.metadata["swebench"]["runner"]) == ("org__lib-1", "swebench", "named")
    assert "It is wrong." in task.instruction
    assert task.metadata.keys() & {"patch", "test_patch"} == set()
    assert Task.from_dict(task.to_dict()) == task
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: org__java-1: the swebench package does not know org/lib at"):
        load_tasks(["x.jsonl"], tmp_path)
    broken = {
        **PLAIN,
        "repo": "psf/requests",
        "version": "2.31",
        "test_patch": "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n",
    }
    write_lines(tmp_path / "broken.jsonl", broken)
    with pytest.raises(ConfigError, match=r"broken\.jsonl:1: org__lib-1: the swebench package cannot read it: Unidiff"):
        load_tasks(["broken.jsonl"], tmp_path)
    with pytest.raises(ConfigError, match=r"nothing\*\.jsonl: no such file"):
        load_tasks(["nothing*.jsonl"], tmp_path)


def test_a_line_on_which_the_package_hangs_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(instance: dict[str, Any]) -> dict[str, Any]:
        return {"eval_script": str(re.match(r"(a+)+$", instance["test_patch"]))}  # takes years for many a

    monkeypatch.setattr(swebench_package, "plan", plan)
    monkeypatch.setattr(swebench_package, "PLAN_TIMEOUT_S", 0.3)
    hanging, other = (swebench_package.try_plan({"test_patch": text}) for text in ("a" * 60 + "b", "b"))
    assert hanging == {"error": "the swebench package cannot read it: TimeoutError('not done after 0.3 s')"}
    assert other == {"eval_script": "None"}


def test_a_file_that_changed_after_the_plan_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", PLAIN)
    (task,) = load_tasks(["x.jsonl"], tmp_path)
    assert load(task) == only(path)
    path.write_text(path.read_text().replace("test_old", "test_OLD"))
    with pytest.raises(SandboxError, match=r"x\.jsonl has changed since planning"):
        load(task)


def test_without_the_swebench_package_the_extra_is_named_and_named_tests_still_run(tmp_path: Path) -> None:
    packages = tmp_path / "site"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("swebench", "__editable__")):
            (packages / path.name).symlink_to(path)
    tree = str(Path(swebench_package.__file__).parents[3])
    code = "import sys; from megaflow_hpc.tasks.loading import load_tasks\n"
    code += "print(load_tasks(sys.argv[1:], '/')[0].metadata['swebench']['runner'])"
    env = {**os.environ, "PYTHONPATH": f"{tree}:{packages}"}

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", code, str(path)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    refused = run(write_lines(tmp_path / "x.jsonl", PLAIN))
    assert refused.returncode == 1
    assert "x.jsonl:1: org__lib-1: " in refused.stderr
    assert 'pip install "megaflow-hpc[swebench]"' in refused.stderr
    assert run(write_lines(tmp_path / "y.jsonl", {**PLAIN, "runner": "named"})).stdout == "named\n"


def test_import_checks_files_and_writes_them_in_one_form(tmp_path: Path) -> None:
    gym = {key: value for key, value in PLAIN.items() if key != "patch"}
    source = write_lines(tmp_path / "gym.jsonl", {**gym, "repo": "Org/Lib"}, {**gym, "instance_id": "org__lib-2"})

    def imports(*words: object) -> subprocess.CompletedProcess[str]:
        return verb("tasks", "import", *words)

    checked = imports(source)
    assert checked.returncode == 0, checked.stderr
    assert "2 instances, tested by named: 2" in checked.stdout
    target = tmp_path / "out"
    options = ("--image", "user/{id_s}:1", "--test-cmd", "pytest -rA", "--log-parser", "parse_log_pytest")
    done = imports(source, "--output", target, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert [row["tested_by"] for row in json.loads(done.stdout)] == ["script", "script"]
    first, second = load_tasks([str(target / "gym.jsonl")], "/")
    assert (first.image, second.image) == ("user/org_s_lib-1:1", "user/org_s_lib-2:1")
    assert load(first).test_cmd == "pytest -rA"
    refused = imports(source, "--test-cmd", "make check", "--log-parser", "parse_log_of_nobody")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 2)
    assert "gym.jsonl:1: org__lib-1: log_parser 'parse_log_of_nobody'" in refused.stderr


def test_image_names_are_mapped_by_patterns() -> None:
    mapping = {"*": "docker://*", "swebench/sweb.eval.x86_64.*:latest": "sif/*.sif", "swebench/special": "s.sif"}
    assert match_name("swebench/special", mapping) == "s.sif"
    assert match_name("swebench/sweb.eval.x86_64.a_1776_b-1:latest", mapping) == "sif/a_1776_b-1.sif"
    assert match_name("org/other:2", mapping) == "docker://org/other:2"
    assert match_name("org/other:2", {"swebench/*": "x"}) is None


# --- grading --------------------------------------------------------------------------------------------------------


def ask(request: dict[str, Any], path: str = "") -> Any:
    """Send one request to the child process, with the ``swebench`` of this environment or of ``path``."""
    command = [sys.executable, "-P", swebench_package.__file__]
    env = {**os.environ, "PYTHONPATH": path}
    return json.loads(subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, env=env).stdout)


def log_of(tests: dict[str, str], status: int) -> str:
    lines = "\n".join(f"{outcome} {test}" for test, outcome in tests.items())
    return f": '{MARKERS[0]}'\n{lines}\n: '{MARKERS[1]}'\n{MARKERS[2]}: {status}\n"


def test_both_versions_of_the_package_grade_a_log_alike(tmp_path: Path) -> None:
    five = tmp_path / "five"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(five), "swebench==5.0.2"]
    subprocess.run([*pip, "unidiff"], check=True, capture_output=True)
    (tmp_path / "log").write_text(log_of({"t.py::a": "PASSED", "t.py::b": "FAILED"}, 1))
    for failing, resolved in ((["t.py::a"], True), (["t.py::a", "t.py::b"], False), (["t.py::gone"], False)):
        instance = {"instance_id": "i", "repo": "org/lib", "FAIL_TO_PASS": failing}
        plan = {"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
        request = {"op": "grade", "instance": instance, "plan": plan, "log": str(tmp_path / "log")}
        answers = [ask(request), ask(request, str(five))]
        assert answers[0] == answers[1]
        assert answers[0]["resolved"] is resolved
    known = {**PLAIN, "repo": "psf/requests", "version": "2.31", "test_patch": ""}
    (four_plan,) = ask({"op": "plan", "instances": [known]})["plans"]
    (five_plan,) = ask({"op": "plan", "instances": [known]}, str(five))["plans"]
    assert four_plan["log_parser"] == five_plan["log_parser"] == "parse_log_pytest_options"
    assert "pytest -rA" in four_plan["eval_script"]
    assert five_plan["eval_script"] == ""
    refused = ask({"op": "plan", "instances": [{**known, "log_parser": "parse_log_nonsense"}]})["plans"][0]["error"]
    assert "log_parser 'parse_log_nonsense'" in refused


def test_named_tests_are_graded_as_the_package_would(tmp_path: Path) -> None:
    chance = random.Random(7)
    words = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED"}
    for number in range(12):
        failing, passing = [f"t.py::f{n}" for n in range(2)], [f"t.py::p{n}" for n in range(3)]
        outcomes = {test: chance.choice(["passed", "passed", "passed", "failed", "error"]) for test in failing}
        outcomes |= {test: chance.choice(["passed"] * 6 + ["skipped", "failed", "error"]) for test in passing}
        if number % 4 == 0:
            outcomes.pop(chance.choice([*failing, *passing]))
        instance = Instance("i", "org/lib", "s", tuple(failing), tuple(passing))
        (tmp_path / "log").write_text(log_of({test: words[outcome] for test, outcome in outcomes.items()}, 1))
        plan = {"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
        request = {"op": "grade", "instance": instance.record(), "plan": plan, "log": str(tmp_path / "log")}
        problems, _ = judge(instance, outcomes)
        assert ask(request)["resolved"] is (not problems), (outcomes, problems)


# --- in sandboxes ---------------------------------------------------------------------------------------------------

MARSHMALLOW = Pair("marshmallow", "3.12.0", "3.12.1", ("tests/test_fields.py",))
XMLTODICT = Pair("xmltodict", "0.14.1", "0.14.2", ("tests/test_xmltodict.py",))
CASE = "tests/test_xmltodict.py::XMLToDictTestCase"
CONFIG = {"test_cmd": "pytest --no-header -rA --tb=line -p no:cacheprovider", "log_parser": "parse_log_pytest"}
PARENT = "tests/test_fields.py::TestParentAndName"


class World:
    """The images and instances of these tests, and one way to run an agent on an instance."""

    def __init__(self, rootfs: str, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root, scratch
        self.images: dict[str, Path] = {}
        self.made: dict[str, Made] = {}
        pairs = MARSHMALLOW, XMLTODICT
        with ThreadPoolExecutor() as pool:
            building = pool.submit(build_image, rootfs, root / "image", ("pytz", "simplejson"))
            making = [pool.submit(make, pair, root / f"releases-{pair.package}", root / pair.package) for pair in pairs]
        image = building.result()
        for pair, future in zip(pairs, making, strict=True):
            made = future.result()
            self.made[pair.package] = made
            self.images[pair.package] = with_checkout(image, made.buggy, root / f"image-{pair.package}")
        # Multi-SWE-bench's images have the checkout in another directory.
        shutil.copytree(made.buggy, self.images["xmltodict"] / "home" / "xmltodict", symlinks=True)
        # SWE-smith's images contain the correct package with its tests; the instance adds the bug.
        patched = root / "fixed"
        subprocess.run(["cp", "-a", str(made.buggy), str(patched)], check=True)
        for patch in (made.patch, made.test_patch):
            subprocess.run(["git", "apply"], cwd=patched, input=patch.encode(), check=True)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run([*git, "commit", "-qam", "whole"], cwd=patched, check=True)
        self.images["swesmith"] = with_checkout(image, patched, root / "image-swesmith")

    def record(self, form: str) -> tuple[dict[str, Any], Path]:
        package = "marshmallow" if form in ("swe-bench 4", "swe-bench 5") else "xmltodict"
        made = self.made[package]
        record = {
            "instance_id": f"real__{package}-{form.replace(' ', '-')}",
            "repo": "marshmallow-code/marshmallow" if package == "marshmallow" else "martinblech/xmltodict",
            "version": "3.12",
            "base_commit": made.commit,
            "problem_statement": "See the title.",
            "patch": made.patch,
            "test_patch": made.test_patch,
            "FAIL_TO_PASS": [f"{CASE}::test_skip_whitespace", f"{CASE}::test_keep_whitespace"],
            "PASS_TO_PASS": [f"{CASE}::test_force_list_basic", f"{CASE}::test_streaming"],
        }
        if package == "marshmallow":
            record["FAIL_TO_PASS"] = json.dumps([f"{PARENT}::test_field_named_parent_has_root"])
            record["PASS_TO_PASS"] = json.dumps([f"{PARENT}::test_simple_field_parent_and_name"])
        if form == "swe-gym":
            record |= {"hints_text": "", "created_at": "2024-10-01 00:00:00"}
        if form == "multi-swe-bench":
            ran = {"run": "PASS", "test": "FAIL", "fix": "PASS"}
            record = {
                "org": "martinblech",
                "repo": "xmltodict",
                "number": 362,
                "instance_id": record["instance_id"],
                "state": "closed",
                "title": "Strip whitespace",
                "base": {"label": "martinblech:master", "ref": "master", "sha": made.commit},
                "resolved_issues": [{"number": 1, "title": "Blanks", "body": "See the title."}],
                "fix_patch": made.patch,
                "test_patch": made.test_patch,
                "fixed_tests": {test: ran for test in record["FAIL_TO_PASS"]},
                "f2p_tests": {test: ran for test in record["FAIL_TO_PASS"]},
                "p2p_tests": {test: {**ran, "test": "PASS"} for test in record["PASS_TO_PASS"]},
                **CONFIG,
            }
        if form == "swe-bench 5":
            script = ["#!/bin/bash", "set -uxo pipefail", "cd /testbed", "git apply -v - <<'EOF_PATCH'"]
            script += [made.test_patch, "EOF_PATCH", f": '{MARKERS[0]}'", "pytest -rA tests/test_fields.py"]
            script += [f": '{MARKERS[1]}'", f"git checkout {made.commit} tests/test_fields.py"]
            record |= {"eval_script": "\n".join(script), "log_parser": "parse_log_marshmallow"}
        if form == "swe-rebench":
            record["install_config"] = CONFIG
        if form == "swe-smith":
            back = ["git", "diff", "--no-color", "HEAD", "HEAD~1", "--", "xmltodict.py"]
            bug = subprocess.run(back, cwd=self.root / "fixed", capture_output=True, text=True, check=True).stdout
            record |= {"repo": "swesmith/xmltodict.1", "patch": bug, "test_patch": ""}
        return record, self.images["swesmith" if form == "swe-smith" else package]

    def judge(
        self, form: str, agent: Callable[[Task, ApptainerSandbox], Any], **changes: Any
    ) -> tuple[Verdict, list[Any]]:
        """Return the verdict on an agent's run of an instance, and the agent's result."""
        record, image = self.record(form)
        path = write_lines(self.scratch / f"{record['instance_id']}.jsonl", {**record, **changes})
        (task,) = load_tasks([str(path)], "/")
        returned: list[Any] = []

        async def main() -> Verdict:
            async with ApptainerProvider(self.scratch) as provider:
                spec = SandboxSpec(str(image), workdir=task.workdir, env=task.env)
                async with await provider.start(spec) as sandbox:
                    await prepare(task, sandbox)
                    returned.append(await agent(task, sandbox))
                    return await verify(task, sandbox)

        return asyncio.run(main()), returned


@pytest.fixture(scope="session")
def world(rootfs: str, scratch: Path) -> Iterator[World]:
    root = scratch / "swebench"
    root.mkdir()
    yield World(rootfs, root, scratch)
    subprocess.run(["chmod", "-R", "u+w", str(root)], check=False)
    subprocess.run(["rm", "-rf", str(root)], check=False)


async def oracle(task: Task, sandbox: ApptainerSandbox) -> Any:
    return await OracleAgent().run(task, sandbox, None)


async def nop(task: Task, sandbox: ApptainerSandbox) -> Any:
    return await NopAgent().run(task, sandbox, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["swe-bench 4", "swe-bench 5", "swe-rebench", "swe-gym", "swe-smith", "multi-swe-bench"]
)
def test_real_instances_are_solved_by_their_patch_and_by_nothing_else(world: World, form: str) -> None:
    verdict, (ended,) = world.judge(form, oracle)
    assert (ended.exit_code, ended.error) == (0, "")
    assert (verdict.reward, verdict.error) == (1.0, ""), verdict.output[-3000:]
    assert verdict.rewards == {"reward": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}
    verdict, _ = world.judge(form, nop)
    assert verdict.rewards == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}, verdict.output[-3000:]
    assert verdict.error == ""


def test_only_the_agents_patch_counts_and_not_what_it_did_to_its_container(world: World) -> None:
    async def cheat(task: Task, sandbox: ApptainerSandbox) -> Any:
        script = """
        printf '#!/bin/sh\\necho "PASSED %s"\\n' > /usr/local/bin/pytest; cp /usr/local/bin/pytest /usr/local/bin/python
        echo 'raise SystemExit(0)' > /usr/lib/python3/dist-packages/sitecustomize.py
        for f in tests/test_xmltodict.py; do rm $f; mkdir $f; echo > $f/x; done
        git config --global core.hooksPath /tmp; git update-ref refs/megaflow-hpc/start HEAD
        git rm -rq --cached . ; echo broken > .git/index
        """
        return await sandbox.exec(script)

    verdict, _ = world.judge("named", cheat)
    assert verdict.rewards == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}, verdict.output[-2000:]


def test_commits_and_new_files_are_part_of_the_patch_and_a_broken_test_costs_the_reward(world: World) -> None:
    async def commit(task: Task, sandbox: ApptainerSandbox) -> Any:
        await OracleAgent().run(task, sandbox, None)
        return await sandbox.exec(
            "mv xmltodict.py new.py; printf 'from new import *\\nfrom new import _DictSAXHandler' > xmltodict.py\n"
            "git add -A; git -c user.name=a -c user.email=a@b commit -qm done; echo more > untracked"
        )

    verdict, _ = world.judge("swe-rebench", commit)
    assert verdict.reward == 1.0, verdict.output[-3000:]

    async def half(task: Task, sandbox: ApptainerSandbox) -> Any:
        await OracleAgent().run(task, sandbox, None)
        return await sandbox.exec("echo 'del parse' >> xmltodict.py")

    verdict, _ = world.judge("named", half)
    assert verdict.reward == 0.0
    assert verdict.rewards["pass_to_pass"] < 1.0


def test_a_swe_smith_bug_leaves_no_trace_of_its_solution(world: World) -> None:
    async def look(task: Task, sandbox: ApptainerSandbox) -> Any:
        found = await sandbox.exec("git log --all --oneline | wc -l; git reflog | wc -l; ls tests; git status --short")
        return found.stdout.split()

    _, (seen,) = world.judge("swe-smith", look)
    commits, reflog, *rest = seen
    assert (commits, int(reflog) <= 1) == ("1", True)
    assert "test_xmltodict.py" not in rest


@pytest.mark.slow
def test_a_hanging_patch_is_not_resolved_and_a_wrong_image_is_infrastructure(world: World, rootfs: str) -> None:
    async def hang(task: Task, sandbox: ApptainerSandbox) -> Any:
        object.__setattr__(task, "verifier_timeout_s", 3.0)
        return await sandbox.exec("echo 'import time; time.sleep(600)' >> xmltodict.py")

    verdict, _ = world.judge("named", hang)
    assert (verdict.reward, verdict.error) == (0.0, "the tests ran longer than 3 s")
    assert verdict.rewards == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
    world.images["nothing"], kept = Path(rootfs), world.images["xmltodict"]
    world.images["xmltodict"] = Path(rootfs)
    try:
        with pytest.raises(SandboxError, match=r"/testbed in image .* is not the instance's checkout"):
            world.judge("named", nop)
    finally:
        world.images["xmltodict"] = kept
