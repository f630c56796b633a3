"""How launchers/test runs the whole suite: several tests at a time, failed ones once more, and where the time went.

A pytest plugin, loaded by ``-p tests.support.suite`` alone. With pytest-xdist, a unit of work is a file, or a lane of
``tests/lab``: files whose tests share one Slurm, wait for it most of the time, and so run one after another beside all
the rest. What takes long begins first, as ``seconds.json`` beside this file knows; ``--record-seconds`` writes it anew.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

LAB = "tests/lab"
LANES = 2
"""So many labs run side by side, each of a worker of its own (the fixture ``slurm``)."""
SECONDS = Path(__file__).with_name("seconds.json")
"""File → seconds that its tests take, of those that take long enough to matter."""
MATTERS_S = 5.0
LONGEST_S = 900.0
"""A test that is not over by then has hung: its own limit of ten minutes was swallowed, as an event loop does with what
is raised in a callback. The process that runs it says where it is and ends, and the others go on."""
_STDERR = os.dup(2)
"""Standard error before pytest captures what tests print."""
LIKELY_S = {"lab": 60.0, "engine": 30.0, "slow": 10.0}
"""By mark, of a file that ``SECONDS`` does not know."""


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
    group.addoption(
        "--hung-after", type=float, default=LONGEST_S, metavar="SECONDS",
        help="end the process in which a test takes longer than that (%(default)s)",
    )  # fmt: skip
    group.addoption(
        "--record-seconds", action="store_true", help=f"write what each file took to {SECONDS.name} (of a whole run)"
    )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the units that take longest first; the order within a unit stays."""
    files: dict[str, float] = {}
    for item in items:
        likely = max([LIKELY_S[mark] for mark in LIKELY_S if item.get_closest_marker(mark)], default=0.0)
        name = _file(item.nodeid)
        files[name] = recorded_seconds().get(name) or max(likely, files.get(name, 0.0))
    units: dict[str, float] = defaultdict(float)
    for name, spent in files.items():
        units[_unit(name)] += spent
    items.sort(key=lambda item: (-units[_unit(item.nodeid)], _unit(item.nodeid)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a process whose test has hung, with the stacks of its threads on standard error."""
    faulthandler.dump_traceback_later(item.config.getoption("hung_after"), exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Gives the rest of a worker's unit to others, without the test in which it ended, which would end them."""
            left = (unit for unit in self.assigned_work[node].values())
            ended_in = next(((unit, name) for unit in left for name, done in unit.items() if not done), None)
            if ended_in is None:
                super().remove_node(node)
                return None
            unit, name = ended_in
            unit[name] = True
            super().remove_node(node)
            return str(name)

        def _reschedule(self, node: Any) -> None:
            """Gives a worker its next unit with its last test, which it could not begin else, and not before."""
            if self._pending_of(self.assigned_work[node]) != 2 or not self.workqueue:
                super()._reschedule(node)

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
    if config.getoption("record_seconds"):
        _record(seconds)
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


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _unit(nodeid: str) -> str:
    name = _file(nodeid)
    return f"{LAB} {file_lanes().get(name, 0)}" if name.startswith(f"{LAB}/") else name


@functools.cache
def recorded_seconds() -> dict[str, float]:
    """What ``SECONDS`` says."""
    found: dict[str, float] = json.loads(SECONDS.read_text())
    return found


@functools.cache
def file_lanes() -> dict[str, int]:
    """File of the lab → its lane, of which all take about as long."""
    lanes, full = {}, [0.0] * LANES
    for name, spent in sorted(recorded_seconds().items(), key=lambda entry: -entry[1]):
        if name.startswith(f"{LAB}/"):
            lanes[name] = full.index(min(full))
            full[lanes[name]] += spent
    return lanes


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


def _record(seconds: dict[str, float]) -> None:
    files: dict[str, float] = defaultdict(float)
    for name, spent in seconds.items():
        files[_file(name)] += spent
    longest = sorted(files.items(), key=lambda entry: -entry[1])
    SECONDS.write_text(
        json.dumps({name: round(spent) for name, spent in longest if spent >= MATTERS_S}, indent=1) + "\n"
    )


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
