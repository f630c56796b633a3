"""How the suite is run (tests/support/suite.py): failed tests once more by themselves, long ones first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT
from tests.support.suite import LANES, file_lanes, recorded_seconds

FLAKY = """
import pathlib, pytest
here = pathlib.Path(__file__).parent

def test_sound():
    assert True

@pytest.mark.parametrize("name", ["a b", "c[d]"])
def test_fails_the_first_time(name):
    mark = here / f"{name} was here"
    if not mark.exists():
        mark.touch()
        assert False
"""
FLAKY_TESTS = [f"test_flaky.py::test_fails_the_first_time[{name}]" for name in ("a b", "c[d]")]
BROKEN = """
import pytest

def test_broken():
    assert False

@pytest.fixture
def missing():
    raise OSError("no such thing")

def test_without_its_fixture(missing):
    pass
"""
HUNG = """
import asyncio, time

class Raised(BaseException):
    pass

def fails():
    raise Raised("the test's own limit, in a callback")

def test_hangs():
    async def wait():
        loop = asyncio.get_running_loop()
        loop.call_soon(fails)
        await loop.create_future()
    asyncio.run(wait())

def test_after_it():
    pass
"""


def suite(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  lab\n  engine\n  slow\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.suite", "-ra", "--color=no", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def passed_only_alone(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the tests that passed only alone."""
    return [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("passed only alone: ")]


def test_what_passes_alone_passes_and_is_named(tmp_path: Path) -> None:
    done = suite(tmp_path, {"test_flaky.py": FLAKY}, "--once-more", "20", "-n", "1", "--dist", "loadscope")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sorted(passed_only_alone(done)) == FLAKY_TESTS
    assert " 3 passed in " in lines[-1]
    assert not any(line.startswith("FAILED") for line in lines)


def test_what_fails_twice_fails_the_suite(tmp_path: Path) -> None:
    files = {"test_broken.py": BROKEN, "test_torn.py": "import nothing_of_this_name"}
    done = suite(tmp_path, files, "--once-more", "20", "--continue-on-collection-errors")
    assert done.returncode == 1
    assert passed_only_alone(done) == []
    assert " 1 failed, 2 errors in " in done.stdout.splitlines()[-1]


def test_more_failures_than_allowed_are_not_run_again(tmp_path: Path) -> None:
    done = suite(tmp_path, {"test_flaky.py": FLAKY}, "--once-more", "1")
    assert done.returncode == 1
    assert "once more" not in done.stdout
    assert " 2 failed, 1 passed in " in done.stdout.splitlines()[-1]


def test_a_test_that_hangs_ends_its_process_and_the_others_run(tmp_path: Path) -> None:
    done = suite(
        tmp_path, {"test_hung.py": HUNG, "test_flaky.py": FLAKY}, "-n", "2", "--hung-after", "3", "-k", "not fails"
    )
    assert done.returncode == 1
    assert "crashed while running 'test_hung.py::test_hangs'" in done.stdout
    assert " 1 failed, 2 passed in " in done.stdout.splitlines()[-1]
    assert re.search(r"test_hung\.py.* in test_hangs", done.stderr), "where it hung"


def test_long_tests_begin_first_and_time_is_added_up_by_room(tmp_path: Path) -> None:
    short = "def test_it():\n    pass\n"
    files = {
        "tests/a/test_short.py": short,
        "tests/b/test_slow.py": f"import pytest\n@pytest.mark.slow\n{short}",
        "tests/b/test_engine.py": f"import pytest\npytestmark = pytest.mark.engine\n{short}",
        "tests/lab/test_lab.py": f"import pytest\npytestmark = pytest.mark.lab\n{short}",
    }
    done = suite(tmp_path, files, "-v", "--quick-limit", "0.000001")
    ran = [line.split("::")[0] for line in done.stdout.splitlines() if " PASSED " in line]
    assert ran == ["tests/lab/test_lab.py", "tests/b/test_engine.py", "tests/b/test_slow.py", "tests/a/test_short.py"]
    assert "tests/b (2 tests)" in done.stdout
    assert done.stdout.count("should be marked slow") == 4


def test_files_of_the_lab_run_in_lanes_and_each_lane_with_one_worker(tmp_path: Path) -> None:
    lanes = [[name for name, lane in file_lanes().items() if lane == number][:2] for number in range(LANES)]
    assert all(len(lane) == 2 for lane in lanes)
    done = suite(tmp_path, {name: "def test_it():\n    pass\n" for lane in lanes for name in lane}, "-v", "-n", "2")
    told = [line.split() for line in done.stdout.splitlines() if " PASSED " in line]
    workers = {words[-1].partition("::")[0]: words[0] for words in told}
    assert len(workers) == 2 * LANES, done.stdout
    assert [len({workers[name] for name in lane}) for lane in lanes] == [1] * LANES
    assert len(set(workers.values())) == LANES


def test_what_is_recorded_are_files_that_are_there() -> None:
    assert [name for name in recorded_seconds() if not (ROOT / name).is_file()] == []
    full = [sum(recorded_seconds()[name] for name, lane in file_lanes().items() if lane == n) for n in range(LANES)]
    assert max(full) < 1.2 * min(full)
