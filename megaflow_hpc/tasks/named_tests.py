"""The verifier of tasks made by ``tasks build``. It runs named tests in the sandbox and writes the reward.

This module is copied into each task's ``tests/`` and runs on the image's own Python. It may only import pytest and the
standard library. The directory also contains::

    expected.json     {"source_root", "failing", "passing", "files", "stale"}
    files/            the test files of the fixed release

The reward is 1 if every test listed under ``failing`` now passes and no test listed under ``passing`` is broken.
Outcomes come from pytest's own reports in a child process, never from printed output. The parent process determines the
reward. If the child process dies early, the remaining tests have no outcome and count as not passed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PYTEST_INI = "[pytest]\nfilterwarnings = default\n"
"""pytest settings that replace the project's own settings, because those may require missing plugins or turn warnings
into errors."""


def matches(entry: str, test: str) -> bool:
    """Returns whether the pytest id ``test`` equals ``entry`` or is inside it. An entry is a test, function, class,
    file or directory."""
    return test == entry or any(test.startswith(entry + border) for border in ("[", "::", "/"))


def grade(
    failing: Iterable[str], passing: Iterable[str], outcomes: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Returns the outcomes of the tests listed as failing and as passing, and the problems that prevent a reward."""
    problems: list[str] = []
    chosen: dict[str, str] = {}
    kept: dict[str, str] = {}
    for entry in failing:
        matching = {test: outcome for test, outcome in outcomes.items() if matches(entry, test)}
        chosen |= matching
        if not matching:
            problems.append(f"{entry}: not run")
        problems += [f"{test}: {outcome}" for test, outcome in matching.items() if outcome != "passed"]
    for entry in passing:
        matching = {test: outcome for test, outcome in outcomes.items() if matches(entry, test) and test not in chosen}
        kept |= matching
        if "passed" not in matching.values():
            problems.append(f"{entry}: none of its tests passed")
        problems += [f"{test}: {outcome}" for test, outcome in matching.items() if outcome in ("failed", "error")]
    return chosen, kept, list(dict.fromkeys(problems))


def selection(entries: Iterable[str]) -> list[str]:
    """Returns arguments for pytest: the entries without their parameter sets. Omits entries that are inside other
    entries."""
    plain = list(dict.fromkeys(entry.split("[", 1)[0] for entry in entries))
    return [entry for entry in plain if not any(other != entry and matches(other, entry) for other in plain)]


def place(files: Path, workdir: Path, expected: Mapping[str, Any]) -> None:
    """Copies the fixed release's test files into ``workdir``. Removes files that could interfere, such as a stray
    ``conftest.py``."""
    shipped = set(expected["files"])
    strangers = [path for path in workdir.rglob("conftest.py") if str(path.relative_to(workdir)) not in shipped]
    for path in [*strangers, *(workdir / name for name in expected["stale"])]:
        path.unlink(missing_ok=True)
    for name in expected["files"]:
        target = workdir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(files / name, target)


class TestRecorder:
    """pytest plugin that records the outcome of each test id."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        before = self.outcomes.get(report.nodeid)
        if report.failed:
            self.outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call" and before is None:
            self.outcomes[report.nodeid] = "passed"


def record(target: str, arguments: Sequence[str]) -> int:
    """Runs pytest in the child process and writes its outcomes to ``target``."""
    import pytest

    recorder = TestRecorder()
    status = int(pytest.main(list(arguments), plugins=[recorder]))
    Path(target).write_text(json.dumps(recorder.outcomes))
    return status


def verify(tests: Path, workdir: Path, logs: Path) -> int:
    """Runs the tests that ``tests`` names, in ``workdir``. Writes ``reward.txt`` and ``results.json`` to ``logs``."""
    logs.mkdir(parents=True, exist_ok=True)
    expected = json.loads((tests / "expected.json").read_text())
    place(tests / "files", workdir, expected)
    settings = logs / "pytest.ini"
    settings.write_text(PYTEST_INI)
    outcomes_file = logs / "outcomes.json"
    outcomes_file.unlink(missing_ok=True)
    arguments = ["-c", str(settings), "--rootdir", str(workdir), "--confcutdir", str(workdir), "-p", "no:cacheprovider"]
    arguments += ["-q", "-rf", "--tb=short", *selection([*expected["failing"], *expected["passing"]])]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    env |= {"PYTHONPATH": str(workdir / expected["source_root"]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(Path(__file__).absolute()), "--record", str(outcomes_file), *arguments]
    status = subprocess.run(command, cwd=workdir, env=env, check=False).returncode
    try:
        outcomes = json.loads(outcomes_file.read_text())
    except (OSError, ValueError):
        outcomes = {}
    failing, passing, problems = grade(expected["failing"], expected["passing"], outcomes)
    reward = 0 if problems else 1
    results = {"reward": reward, "problems": problems, "failing": failing, "passing": passing, "pytest_status": status}
    (logs / "results.json").write_text(json.dumps(results, indent=1))
    (logs / "reward.txt").write_text(f"{reward}\n")
    for problem in problems[:20]:
        print(problem)
    print(
        f"reward {reward}: {len(failing)} tests named as failing, {len(passing)} as passing, {len(problems)} problems"
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "--record":
        return record(arguments[1], arguments[2:])
    tests, workdir, logs = (Path(argument).absolute() for argument in arguments)
    return verify(tests, workdir, logs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
