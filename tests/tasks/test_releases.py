"""Tasks from real bugs: the bug file, the reference patch, the verifier, and one real bug from the index to its
reward."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.cli.making import tasks as verbs
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import Budget
from megaflow_hpc.tasks import named_tests
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.releases import image, sdists, tasks
from megaflow_hpc.tasks.releases.bugs import read_bugs, select
from megaflow_hpc.tasks.releases.sdists import Release
from megaflow_hpc.tasks.validation import ValidationRun, judge
from tests.support.archives import hostile
from tests.support.places import ROOT

BUG_FILE = """\
image: one-bug
bugs:
  - id: xmltodict-whitespace
    package: xmltodict
    buggy: 0.14.1
    fixed: 0.14.2
    kind: parsing
    changelog: a line
    failing: [CASE::test_skip_whitespace, CASE::test_keep_whitespace]
    passing: [tests]
    issue: Blanks should not be kept.
""".replace("CASE", "tests/test_xmltodict.py::XMLToDictTestCase")


@pytest.fixture
def bug_file(tmp_path: Path) -> Callable[..., Path]:
    """Write the bug file above with some text replaced."""

    def write(*replacements: tuple[str, str]) -> Path:
        text = BUG_FILE
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "bugs.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def release_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("releases")


def quiet(message: str) -> None:
    pass


# --- the bug file ---------------------------------------------------------------------------------------------------


def test_the_shipped_bugs_are_varied_and_short() -> None:
    content, where = read_bugs(ROOT / "share" / "recipes" / "bug-repair" / "bugs.yaml")
    assert len(content.bugs) >= 12
    assert len({bug.package for bug in content.bugs}) >= 8
    assert len({bug.kind for bug in content.bugs}) >= 4
    starts = [int(where(bug.id).rpartition(":")[2]) for bug in content.bugs]
    assert starts == sorted(starts)
    assert max(after - before for before, after in itertools.pairwise(starts)) <= 18


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("    kind: parsing", "    kind: parsing\n    isue: x", 8, "did you mean 'issue'"),
        ("    fixed: 0.14.2\n", "", 3, "'bugs.0.fixed' is missing"),
        ("    buggy: 0.14.1", "    buggy: 0.14", 5, "put it in quotes"),
        ("    buggy: 0.14.1", "    buggy: 0.14.2", 3, "same release 0.14.2; name the release that fixes"),
        ("    failing: [", "    failing: [] #[", 9, "failing"),
        ("id: xmltodict-whitespace", "id: xml to dict", 3, "xml to dict"),
        ("    passing: [tests]", "    passing: [tests", 11, "not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(
    bug_file: Callable[..., Path], old: str, new: str, line: int, said: str
) -> None:
    path = bug_file((old, new))
    with pytest.raises(ConfigError) as caught:
        read_bugs(path)
    assert str(caught.value).startswith(f"{path}:{line}:"), str(caught.value)
    assert said in str(caught.value)


def test_an_id_given_twice_and_an_unknown_one_are_refused(bug_file: Callable[..., Path]) -> None:
    path = bug_file()
    with pytest.raises(ConfigError, match=r"no such bug; expected one of xmltodict-whitespace"):
        select(read_bugs(path)[0].bugs, ["another"])
    path.write_text(path.read_text() + BUG_FILE.partition("bugs:\n")[2])
    with pytest.raises(ConfigError, match="'xmltodict-whitespace' is given twice"):
        read_bugs(path)


# --- the reference patch --------------------------------------------------------------------------------------------


def test_tests_code_and_other_files_are_told_apart() -> None:
    """Documents, metadata and files of the version are neither."""
    for name in ("tests/a.py", "pkg/test/data.txt", "test_a.py", "pkg/a_test.py", "conftest.py", "tests.py"):
        assert (sdists.is_test(name), sdists.is_code(name)) == (True, False), name
    for name in ("pkg.py", "src/pkg/version.py", "pkg/contest.py", "pkg/a.pyi", "lib/pkg/testament.py"):
        assert (sdists.is_test(name), sdists.is_code(name)) == (False, True), name
    for name in ("setup.py", "PKG-INFO", "docs/conf.py", "src/pkg/_version.py", "CHANGES.rst", "bin/tool.py"):
        assert not sdists.is_code(name), name


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_patch_holds_changed_added_and_removed_code_and_nothing_else(tmp_path: Path) -> None:
    old = {"p/a.py": "__version__ = '1'\nx = 1\n", "p/gone.py": "y = 1\n", "tests/t.py": "1\n", "p/same.py": "z = 1"}
    new = {"p/a.py": "__version__ = '2'\nx = 2\n", "p/new.py": "w = 1\n", "tests/t.py": "2\n", "p/same.py": "z = 1"}
    buggy, fixed = tree(tmp_path / "old", old), tree(tmp_path / "new", new)
    sdists.commit(buggy, "old")
    patch = sdists.difference(buggy, fixed)
    assert patch.files == ("p/a.py", "p/gone.py", "p/new.py")
    assert patch.lines == 4
    assert {name: (buggy / name).read_text() for name in sdists.tree_files(buggy)} == old
    (tmp_path / "fix.patch").write_bytes(patch.text)
    sdists.git(buggy, "apply", str(tmp_path / "fix.patch"))
    patched = {name: (buggy / name).read_text() for name in sdists.tree_files(buggy)}
    assert patched == {**new, "p/a.py": "__version__ = '1'\nx = 2\n", "tests/t.py": "1\n"}


def test_releases_that_are_too_far_apart_or_the_same_are_refused(bug_file: Callable[..., Path]) -> None:
    bug = read_bugs(bug_file())[0].bugs[0]
    tasks.check_patch(bug, sdists.ReleasePatch(b"", tasks.MAX_LINES, ("a.py",)), "bugs.yaml:3")
    with pytest.raises(ConfigError, match=r"bugs.yaml:3: 401 lines of code differ .* choose releases that are closer"):
        tasks.check_patch(bug, sdists.ReleasePatch(b"", tasks.MAX_LINES + 1, ("a.py",)), "bugs.yaml:3")
    with pytest.raises(ConfigError, match=r"no code differs between 0.14.1 and 0.14.2"):
        tasks.check_patch(bug, sdists.ReleasePatch(b"", 0, ()), "bugs.yaml:3")


# --- the verifier ---------------------------------------------------------------------------------------------------


def test_an_entry_stands_for_what_is_inside_it() -> None:
    for entry in ("tests", "tests/a.py", "tests/a.py::C", "tests/a.py::C::t", "tests/a.py::C::t[1-x]"):
        assert named_tests.matches(entry, "tests/a.py::C::t[1-x]")
    for entry in ("test", "tests/a", "tests/a.py::C::t[1", "tests/a.py::C::t[1-xy]"):
        assert not named_tests.matches(entry, "tests/a.py::C::t[1-x]")


def test_pytest_is_asked_once_for_each_test() -> None:
    assert named_tests.selection(["t/a.py::x[1]", "t/a.py::x[2]", "t/b.py::y", "t/b.py"]) == ["t/a.py::x", "t/b.py"]


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        ({"t.py::new": "passed", "t.py::old": "passed", "t.py::skip": "skipped"}, ""),
        ({"t.py::new": "failed", "t.py::old": "passed"}, "t.py::new: failed"),
        ({"t.py::old": "passed"}, "t.py::new: not run"),
        ({"t.py::new": "skipped", "t.py::old": "passed"}, "t.py::new: skipped"),
        ({"t.py::new": "passed", "t.py::old": "error"}, "t.py::old: error"),
        ({"t.py::new": "passed", "t.py::old": "skipped"}, "t.py: none of its tests passed"),
        ({}, "t.py::new: not run"),
    ],
)
def test_the_reward_needs_every_named_test(outcomes: dict[str, str], problem: str) -> None:
    _, _, problems = named_tests.grade(["t.py::new"], ["t.py"], outcomes)
    assert problem in problems if problem else problems == []


def run_verifier(task: Path, workdir: Path, logs: Path) -> dict[str, Any]:
    """Run a task's ``test.sh`` on this interpreter without a sandbox."""
    (logs / "bin").mkdir(parents=True, exist_ok=True)
    wrapper = logs / "bin" / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    env = {**os.environ, "PATH": f"{logs / 'bin'}:{os.environ['PATH']}", "TESTBED": str(workdir)}
    subprocess.run(["sh", task / "tests" / "test.sh"], env={**env, "VERIFIER_LOGS": str(logs)}, check=True)
    results: dict[str, Any] = json.loads((logs / "results.json").read_text())
    assert float((logs / "reward.txt").read_text()) == results["reward"]
    return results


@pytest.fixture
def small_task(tmp_path: Path) -> Path:
    """Make the ``tests/`` of a task whose test file imports the package ``p``."""
    task = tmp_path / "task"
    test = "import p\n\ndef test_new():\n    assert p.x == 2\n\ndef test_old():\n    assert p.y == 1\n"
    tree(task / "tests" / "files", {"tests/test_p.py": test})
    expected = {"source_root": ".", "failing": ["tests/test_p.py::test_new"], "passing": ["tests/test_p.py"]}
    expected |= {"files": ["tests/test_p.py"], "stale": ["tests/test_removed.py"]}
    (task / "tests" / "expected.json").write_text(json.dumps(expected))
    (task / "tests" / "named_tests.py").write_text(Path(named_tests.__file__).read_text())
    tasks._script(task / "tests" / "test.sh", tasks.TEST)
    return task


@pytest.mark.parametrize(
    ("code", "failing", "reward"),
    [
        ("x, y = 1, 1", {"tests/test_p.py::test_new": "failed"}, 0),
        ("x, y = 2, 1", {"tests/test_p.py::test_new": "passed"}, 1),
        ("x, y = 2, 2", {"tests/test_p.py::test_new": "passed"}, 0),
        ("import nothing_of_that_name", {}, 0),
        ("import os; os._exit(0)", {}, 0),
    ],
    ids=["not mended", "mended", "another thing broken", "tests cannot be collected", "pytest dies"],
)
def test_the_verifier_judges_single_tests(
    tmp_path: Path, small_task: Path, code: str, failing: dict[str, str], reward: int
) -> None:
    workdir = tree(tmp_path / "testbed", {"p.py": code, "tests/test_p.py": "def test_new():\n    pass\n"})
    results = run_verifier(small_task, workdir, tmp_path / "logs")
    assert (results["failing"], results["reward"]) == (failing, reward)


def test_what_an_agent_left_for_pytest_does_not_count(tmp_path: Path, small_task: Path) -> None:
    cheat = "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
    cheat += "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    files = {"p.py": "x, y = 1, 1", "conftest.py": cheat, "tests/conftest.py": cheat, "tests/test_removed.py": "1/0"}
    workdir = tree(tmp_path / "testbed", {**files, "pytest.ini": "[pytest]\naddopts = --deselect tests/test_p.py\n"})
    results = run_verifier(small_task, workdir, tmp_path / "logs")
    assert results["reward"] == 0
    assert not (workdir / "tests" / "test_removed.py").exists()


# --- validation -----------------------------------------------------------------------------------------------------


def test_a_task_is_valid_only_if_its_tests_fail_before_and_pass_after() -> None:
    before = ValidationRun(reward=0.0, failing={"t::a": "failed"}, passing={"t::b": "passed"})
    after = ValidationRun(reward=1.0, failing={"t::a": "passed"}, passing={"t::b": "passed"})
    assert judge(before, after) == []
    assert "reward 0.0, expected 1.0" in judge(before, before)[0]
    missing = judge(ValidationRun(reward=0.0, passing={"t::b": "passed"}), after)
    assert missing == ["t::a: not run without the solution and passed with it; expected failed and passed"]
    broken = judge(ValidationRun(reward=0.0, failing={"t::a": "failed"}, passing={"t::b": "failed"}), after)
    assert broken == ["t::b: failed without the solution; expected passed, since `passing` names it"]
    assert judge(ValidationRun(error="lost"), after)[0] == "without the solution: lost"


def test_a_package_with_a_bug_that_gets_into_the_image_is_noticed(bug_file: Callable[..., Path]) -> None:
    content, _ = read_bugs(bug_file(("package: xmltodict", "package: XML.To_Dict")))
    assert image.under_test(content, ["pytest-8.4.2-py3-none-any.whl", "pip-25.0-py3-none-any.whl"]) == []
    assert image.under_test(content, ["xml_to_dict-1.0-py3-none-any.whl"]) == ["XML.To_Dict"]


# --- a real bug -----------------------------------------------------------------------------------------------------


def test_a_real_bug_becomes_a_task_that_its_patch_solves(
    bug_file: Callable[..., Path], tmp_path: Path, release_cache: Path
) -> None:
    content, where = read_bugs(bug_file())
    output = tmp_path / "tasks"
    (built,) = tasks.build_tasks(content, content.bugs, output, release_cache, where, quiet)
    assert built.fresh
    assert built.lines == 2
    assert [path.name for path in output.iterdir()] == ["xmltodict-whitespace"]
    task = read_harbor_task(built.path)
    assert (task.image, task.workdir) == ("one-bug", "/testbed")
    assert HarborData.of(task).upload_environment
    assert task.env["PYTHONPATH"] == "/testbed"
    assert "Blanks should not be kept." in task.instruction
    assert tomllib.loads((built.path / "task.toml").read_text())["metadata"]["kind"] == "parsing"
    workdir = built.path / "environment"
    assert sdists.git(workdir, "status", "--porcelain") == b""
    assert run_verifier(built.path, workdir, tmp_path / "before")["reward"] == 0
    sdists.git(workdir, "reset", "--hard", "-q")
    env = {**os.environ, "TESTBED": str(workdir)}
    subprocess.run(["sh", built.path / "solution" / "solve.sh"], env=env, check=True)
    assert sdists.git(workdir, "diff", "--name-only") == b"xmltodict.py\n"
    results = run_verifier(built.path, workdir, tmp_path / "after")
    assert results["problems"] == []
    assert len(results["passing"]) > 40

    (again,) = tasks.build_tasks(content, content.bugs, output, release_cache, where, quiet)
    assert not again.fresh
    changed, where = read_bugs(bug_file(("Blanks should", "Line breaks should")))
    (rebuilt,) = tasks.build_tasks(changed, changed.bugs, output, release_cache, where, quiet)
    assert rebuilt.fresh
    assert sdists.git(rebuilt.path / "environment", "status", "--porcelain") == b""
    assert tasks.strangers(changed.model_copy(update={"bugs": ()}), output) == [built.path]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "0.14.2", "0.14.999", r":3: xmltodict==0\.14\.999 has no source distribution in pip's index; "
            "list the available releases with: pip index versions xmltodict$",
        ),
        (
            "tests/test_xmltodict.py::", "tests/test_other.py::",
            r":3: 'tests/test_other.py::.* has no test file tests/test_other.py",
        ),
    ],
    ids=["release", "tests"],
)  # fmt: skip
def test_a_release_or_tests_that_do_not_exist_are_named_with_their_line(
    bug_file: Callable[..., Path], tmp_path: Path, release_cache: Path, old: str, new: str, said: str
) -> None:
    path = bug_file((old, new))
    content, where = read_bugs(path)
    with pytest.raises(ConfigError, match=re.escape(str(path)) + said):
        tasks.build_tasks(content, content.bugs, tmp_path / "tasks", release_cache, where, quiet)
    assert not list((tmp_path / "tasks").glob("*"))


def test_where_pip_changed_inside_its_download_command_is_used(tmp_path: Path) -> None:
    name = sdists._pip_download(Release("xmltodict", "0.14.2"), tmp_path)
    assert name is not None
    assert (sdists.unpack(tmp_path / name, tmp_path / "tree") / "xmltodict.py").is_file()
    assert sdists._pip_download(Release("xmltodict", "0.14.999"), tmp_path) is None


def test_an_archive_that_is_damaged_says_so(tmp_path: Path) -> None:
    archive = tmp_path / "p-1.tar.gz"
    archive.write_bytes(b"not a tar")
    with pytest.raises(ConfigError, match=r"p-1.tar.gz: not a source distribution .*; delete it and try again"):
        sdists.unpack(archive, tmp_path / "tree")


def test_a_hostile_archive_is_damaged_too_and_stays_inside(tmp_path: Path) -> None:
    small = Budget(1 << 20, 1000)
    taken = set()
    for name, data in hostile().items():
        path = tmp_path / "p-1.tar.gz"
        path.write_bytes(gzip.compress(data, 1))
        with contextlib.suppress(ConfigError):
            sdists.unpack(path, tmp_path / "tree" / name, replace(small))
            taken.add(name)
    assert taken == {"a file and below it", "a file through a link", "a file through a later link"}  # without the link
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("p/zeros", bytes(20 << 20))
        bundle.writestr("../escape", b"")
    with pytest.raises(ConfigError, match="more bytes than are allowed"):
        sdists.unpack(bomb, tmp_path / "tree" / "bomb", replace(small))
    with pytest.raises(ConfigError, match="leaves the directory"):
        sdists.unpack(bomb, tmp_path / "tree" / "outside", Budget(1 << 30, 1000))
    assert {path.name for path in tmp_path.iterdir() if path.suffix not in (".gz", ".zip")} == {"tree"}


@pytest.mark.slow
def test_the_verbs_build_prove_and_list_a_bug_in_the_sandbox(
    bug_file: Callable[..., Path],
    tmp_path: Path,
    slim_rootfs: str,
    release_cache: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(scratch))
    parser = argparse.ArgumentParser()
    verbs.register(parser.add_subparsers(required=True))

    def call(*words: str) -> tuple[int, Any]:
        arguments = parser.parse_args(["tasks", *words, "--json"])
        status = int(arguments.run(arguments))
        return status, json.loads(capsys.readouterr().out)

    output = str(tmp_path / "tasks")
    build = ("build", str(bug_file()), "--output", output, "--base", slim_rootfs, "--cache", str(release_cache))
    status, built = call(*build)
    assert status == 0
    assert built["image"] == str(tmp_path / "images" / "one-bug.sif")
    made = os.stat(built["image"]).st_mtime_ns
    assert call(*build)[1]["tasks"][0]["built"] is False
    assert os.stat(built["image"]).st_mtime_ns == made

    status, proof = call("validate", output)
    assert (status, proof["valid"]) == (0, True)
    (task,) = proof["tasks"]
    assert (task["reward_before"], task["reward_after"]) == (0.0, 1.0)
    assert list(task["failing"].values()) == [["failed", "passed"]] * 2
    assert call("list", output)[1][0]["changelog"] == "a line"

    patch = tmp_path / "tasks" / "xmltodict-whitespace" / "solution" / "fix.patch"
    patch.write_text(patch.read_text().replace("and data:", "and data and item:"))
    status, proof = call("validate", output)
    assert (status, proof["valid"]) == (1, False)
