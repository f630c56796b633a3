"""What verbs print: JSON alone on stdout under ``--json``, tables and progress for people otherwise.

Tasks, agents, files and logs are somebody else's text, and a terminal obeys control characters: whatever is printed for
a person goes through :func:`say`, :func:`note` or :func:`table`, which show them as escapes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaflow_hpc.texts import in_one_line, printable

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.making import Making

FINAL = ("completed", "truncated", "failed", "cancelled")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def print_json(value: Any, indent: int | None = 1) -> None:
    """Prints ``value`` as JSON; what JSON does not know is printed as text."""
    print(json.dumps(value, indent=indent, default=str))


def say(text: object = "", end: str = "\n") -> None:
    """Prints text for a person on stdout."""
    print(printable(str(text)), end=end)


def note(text: str) -> None:
    """Prints a line for a person on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


class LogFormatter(logging.Formatter):
    """What is logged, as :func:`note` would print it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lays out rows under ``head`` in columns as wide as they need to be; numbers to the right."""
    cells = [[in_one_line(str("" if c is None else c)) for c in row] for row in rows]
    numeric = [
        all(not row[i] or row[i].replace(".", "", 1).replace("-", "", 1).isdigit() for row in cells)
        for i in range(len(head))
    ]
    widths = [max(len(head[i]), *(len(row[i]) for row in cells), 0) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def seconds(value: float | None) -> str:
    """``1:02:03`` or ``4:05`` for a number of seconds; ``?`` for none."""
    if value is None:
        return "?"
    hours, rest = divmod(round(value), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def summary(result: dict[str, Any]) -> str:
    """Lays out the summary of a campaign: one line a policy, then what is worth a note."""
    head = ("policy", "rollouts", "completed", "truncated", "failed", "solved", "mean reward", "pass@k", "turns")
    rows = [
        (
            name,
            row["rollouts"],
            row["statuses"].get("completed", 0),
            row["statuses"].get("truncated", 0),
            row["statuses"].get("failed", 0),
            row["solved"],
            *_evaluated(row.get("evaluation"), row["mean_reward"]),
            row["turns"],
        )
        for name, row in result["policies"].items()
    ]
    notes = [
        f"{name}: {row['inexact']} model calls were recorded without all their token ids (docs/model-service.md)"
        for name, row in result["policies"].items()
        if row.get("inexact")
    ]
    return "\n".join([table(head, rows), *notes])


def _evaluated(found: dict[str, Any] | None, mean: float | None) -> tuple[str, str]:
    """Mean reward and pass@k of a policy, each with half the width of its 95 % interval."""

    def shown(value: float, half: float | None) -> str:
        return f"{value:.3f}" if half is None else f"{value:.3f} ± {half:.3f}"

    if not found:
        return ("-" if mean is None else f"{mean:.3f}"), "-"
    each = [f"@{k} {shown(p['value'], p['ci95'])}" for k, p in found["pass_at"].items()]
    return shown(found["mean"], found["ci95"]), ", ".join(each) or "-"


class Progress:
    """Shows a campaign's status on stderr: a bar on a terminal, a line now and then in a log."""

    LINE_EVERY_S = 15.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._last_line = ("", 0.0)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(in_one_line(name), total=None, detail="")

    def __call__(self, status: dict[str, Any]) -> None:
        counts = status["rollouts"]
        done = sum(counts[state] for state in FINAL)
        serving = sum(server["state"] == "serving" for server in status["servers"])
        pods = sum(pod["state"] in ("started", "draining") for pod in status["pods"])
        parts = [f"{counts['running']} running", f"pods {pods}"]
        broken = [server for server in status["servers"] if server["state"] == "failed"]
        parts += [f"servers {serving}"] if status["servers"] else []
        parts += [f"{broken[0]['server']} cannot start: {broken[0].get('cause', 'see its log')}"] if broken else []
        parts += [f"failed {counts['failed']}"] if counts["failed"] else []
        parts += [f"eta {seconds(status['eta_s'])}"] if status["eta_s"] else []
        detail = ", ".join(parts)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=done, total=counts["total"], detail=in_one_line(f"{status['state']}: {detail}")
            )
            return
        line = f"{self._name}: {status['state']}, {done}/{counts['total']} done, {detail}"
        said, when = self._last_line
        settled = status["state"] in ("finished", "cancelled") or not said
        if line != said and (settled or time.monotonic() - when > self.LINE_EVERY_S):
            note(line)
            self._last_line = (line, time.monotonic())

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()


class ImageProgress:
    """Shows on stderr how the making of images goes: a line in place on a terminal, one every two seconds in a log.

    As a context manager; threads may call it. Nothing is shown before there is something to say.
    """

    EVERY_S = 2.0

    def __init__(self) -> None:
        self._live: Any = None
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()
        self._begun = False

    def __enter__(self) -> ImageProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Prints a line, above that in place."""
        live = self._live
        if live is None:
            note(line)
        else:
            live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        self._said = time.monotonic()

    def show(self, state: Making) -> None:
        """Shows how far it is."""
        if state.looked_up < state.total:
            self._now(f"images: {state.looked_up} of {state.total} looked up")
            return
        if not self._begun:
            self._begun = True
            wrong = state.total - state.there - state.to_make
            line = f"images: {state.total}, {state.there} in the store, {state.to_make or 'none'} to be made"
            if state.to_make or wrong:
                self.say(f"{line}, {wrong} cannot be" if wrong else line)
        done = state.made + state.failed
        figures = f"{state.steps} steps, {state.bytes / 1e6:.1f} MB, {seconds(state.elapsed_s)}"
        figures += f", {state.failed} failed" if state.failed else ""
        if done < state.to_make:
            left = f", {seconds(state.left_s)} left" if state.left_s is not None else ""
            self._now(f"images: {done}/{state.to_make} made, {state.at_work} under way, {figures}{left}")
        else:
            self._begun = False
            self.__exit__()
            if state.to_make:
                self.say(f"images: {done}/{state.to_make} made, {figures}")

    def _now(self, line: str) -> None:
        if self._terminal:
            if self._live is None:
                from rich.console import Console
                from rich.live import Live

                self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
                self._live.start()
            from rich.text import Text

            self._live.update(Text(in_one_line(line), no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._said >= self.EVERY_S:
            self.say(line)


def unstarted_lines(status: Mapping[str, Any]) -> list[str]:
    """Says of pods that ended before any rollout why, and where that stands; those of one cause in one line."""
    causes: dict[str, list[dict[str, Any]]] = {}
    for pod in status["unstarted"]:
        causes.setdefault(pod["cause"], []).append(pod)
    lines = []
    for cause, pods in causes.items():
        first = pods[0]
        who = f"pod {first['pod']}" if len(pods) == 1 else f"{len(pods)} pods, among them {first['pod']},"
        line = f"{who} ended on {first['node']} before any rollout: {cause} (log: {first['log']})"
        lines.append(in_one_line(line))
    return lines


FIGURES = (
    ("reward", "reward"),
    ("passed", "passed"),
    ("staleness", "staleness"),
    ("entropy", "entropy"),
    ("clipped", "clipped"),
    ("mismatch", "mismatch"),
    ("tokens_per_s", "tokens/s"),
    ("wait_share", "waiting"),
)
"""Means over the last steps, and the words before them."""


def training_lines(status: Mapping[str, Any]) -> list[str]:
    """Says of each policy that learns how far it is and how it goes, and what its trainer does."""
    lines = []
    for policy, found in status.get("training", {}).items():
        said = [f"{policy}: step {found['step']} of {found['steps']}, weights {found['weights']}"]
        said += [f"{words} {_figure(name, found[name])}" for name, words in FIGURES if found[name] is not None]
        lines.append(", ".join(said))
        trainer = found["trainer"]
        where = f" on {trainer['node']}" if trainer["state"] == "running" and trainer["node"] else ""
        job = f" (job {trainer['job_id']})" if trainer["job_id"] else ""
        line = f"trainer of {policy}: {trainer['state']}{where}{job}"
        line += f": {trainer['cause']}" if trainer.get("cause") else ""
        word = trainer.get("last_word", {"word": "done"})
        if word["word"] != "done":
            line += f"; its last start that has ended: {word['word']}, {word['cause']} (log: {word['log']})"
        lines.append(in_one_line(line))
    return lines


def _figure(name: str, value: float) -> str:
    if name in ("passed", "clipped", "wait_share"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if name == "tokens_per_s" else f"{value:.3g}"
