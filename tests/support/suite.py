"""How launchers/test runs the whole suite: several tests at a time, failed ones once more, and where the time went.

A pytest plugin, loaded by ``-p tests.support.suite`` alone. With pytest-xdist, a unit of work is a file, or all of
``tests/lab``, whose tests share one Slurm and mostly wait for it. What takes long begins first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import pytest

LAB = "tests/lab"
LONG = ("lab", "engine", "slow")
"""Marks of tests that begin first, in this order."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption(
        "--once-more", type=int, default=0, metavar="N",
        help="run failed tests once more, each by itself, unless more than N failed",
    )  # fmt: skip
    group.addoption(
        "--quick-limit", type=float, default=0, metavar="SECONDS",
        help="name passed tests that took longer: they should be marked slow",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with long tests first; the order within a file stays."""
    ranks: dict[str, int] = {}
    for item in items:
        rank = next((n for n, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG))
        ranks[_unit(item.nodeid)] = min(rank, ranks.get(_unit(item.nodeid), rank))
    items.sort(key=lambda item: ranks[_unit(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    return Units(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says where the time went, then runs failed tests once more and counts those that pass as passed."""
    stats = terminalreporter.stats
    seconds = _seconds(report for reports in stats.values() for report in reports)
    if seconds:
        terminalreporter.section("where the time went")
        limit = config.getoption("quick_limit")
        slow = [f"should be marked slow ({s:.0f} s): {name}" for name, s in sorted(seconds.items()) if 0 < limit < s]
        for line in [*_by_room(seconds), "", *_slowest(seconds), *slow]:
            terminalreporter.write_line(line)
    failed = _failed(stats)
    if 0 < len(failed) <= config.getoption("once_more"):
        terminalreporter.section("failed tests, each once more by itself")
        for name in failed:
            if _passes_alone(name, config):
                _count_as_passed(stats, name)
                terminalreporter.write_line(f"passed only alone: {name}")
        session = terminalreporter._session
        if not _failed(stats) and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK


def _unit(nodeid: str) -> str:
    return LAB if nodeid.startswith(f"{LAB}/") else nodeid.partition("::")[0]


def _failed(stats: dict[str, list[Any]]) -> list[str]:
    """Ids of failed tests, and of files that could not be collected, each once."""
    return list(dict.fromkeys(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())))


def _passes_alone(name: str, config: pytest.Config) -> bool:
    """Whether a test passes in a pytest of its own; what that one printed is shown if not."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", name]
    done = subprocess.run(command, cwd=config.rootpath, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    passed = done.returncode == 0 and re.search(r"\b1 passed", done.stdout.rstrip().rpartition("\n")[2]) is not None
    if not passed:
        print(done.stdout, flush=True)
    return passed


def _count_as_passed(stats: dict[str, list[Any]], name: str) -> None:
    kinds = [kind for kind in ("failed", "error", "passed") if stats.get(kind)]
    reports = [report for kind in kinds for report in stats[kind] if report.nodeid == name]
    for kind in kinds:
        stats[kind] = [report for report in stats[kind] if report.nodeid != name]
    stats["passed"] = [*stats.get("passed", ()), reports[0]]


def _seconds(reports: Iterable[Any]) -> dict[str, float]:
    """Seconds of each test, its setup and teardown included."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    return seconds


def _by_room(seconds: dict[str, float]) -> list[str]:
    rooms: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for name, spent in seconds.items():
        path = PurePosixPath(name.partition("::")[0])
        room = "/".join(path.parts[:2]) if len(path.parts) > 2 else str(path)
        rooms[room] += spent
        tests[room] += 1
    total = sum(rooms.values())
    return [
        f"{spent:8.1f} s {spent / total:6.1%}  {room} ({tests[room]} tests)"
        for room, spent in sorted(rooms.items(), key=lambda entry: -entry[1])
    ]


def _slowest(seconds: dict[str, float], count: int = 10) -> list[str]:
    slowest = sorted(seconds.items(), key=lambda entry: -entry[1])[:count]
    return [f"{spent:8.1f} s  {name}" for name, spent in slowest]
