"""Prints the results of verbs: pure JSON on stdout with ``--json``, otherwise lines and tables.

Text from tasks, agents, files and logs is untrusted, and terminals interpret control characters. All human-readable
text must therefore go through :func:`say`, :func:`note` or :func:`table`, which escape control characters.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import docs
from megaflow_hpc.rundir.budget import use_lines
from megaflow_hpc.texts import in_one_line, printable

FINAL = ("completed", "truncated", "failed", "cancelled")
"""Final states of a rollout."""
ROLE_COLOURS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
"""Maps each message role to the colour of its heading."""


def print_json(value: Any, indent: int | None = 1) -> None:
    """Prints ``value`` as JSON. Converts NaN and infinity to ``null``, and unsupported types to strings."""
    text = json.dumps(value, indent=indent, default=str)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent)
    print(text)


def print_result(as_json: bool, value: Any, text: object, hint: str = "") -> None:
    """Prints a verb's result: ``value`` as JSON, or else ``text`` on stdout and ``hint`` on stderr, if not empty."""
    if as_json:
        print_json(value)
        return
    if text not in ("", None):
        say(text)
    if hint:
        note(hint)


def say(text: object = "", end: str = "\n") -> None:
    """Prints human-readable text to stdout."""
    print(printable(str(text)), end=end)


def note(text: str) -> None:
    """Prints a human-readable line to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def confirmed(question: str, option: str) -> bool:
    """Asks for confirmation of an irreversible action on the terminal.

    Args:
        question: The action and its effect, as a question.
        option: The command-line option that confirms it.

    Raises:
        ConfigError: Standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Confirm with {option}, since standard input is not a terminal")
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class LogFormatter(logging.Formatter):
    """Formats log records like :func:`note`."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Formats rows as a table with the header ``head``. Numeric columns are right-aligned."""
    cells = [[in_one_line(str("" if c is None else c)) for c in row] for row in rows]
    numeric = [
        all(not row[i] or row[i].replace(",", "").replace(".", "", 1).replace("-", "", 1).isdigit() for row in cells)
        for i in range(len(head))
    ]
    widths = [max(len(head[i]), *(len(row[i]) for row in cells), 0) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def seconds(value: float | None) -> str:
    """Formats a duration in seconds as ``1:02:03`` or ``4:05``. ``None`` becomes ``?``."""
    if value is None:
        return "?"
    hours, rest = divmod(round(value), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def used(cpu_s: float | None, memory_peak_mb: float | None, disk_peak_mb: float | None) -> str:
    """Formats resource use as ``12.5 s of CPU, at most 103 MB of memory``. Omits values that are NaN or ``None``."""
    parts = (
        (cpu_s, "{:.1f} s of CPU"),
        (memory_peak_mb, "at most {:.0f} MB of memory"),
        (disk_peak_mb, "{:.0f} MB of disk"),
    )
    return ", ".join(template.format(value) for value, template in parts if value is not None and value == value)


def summary(result: dict[str, Any]) -> str:
    """Formats the summary of a campaign: one line per policy, then notes."""
    head = ("policy", "rollouts", "completed", "truncated", "failed", "solved", "mean reward", "pass@k", "turns")
    rows = [
        (
            name,
            row["rollouts"],
            row["statuses"].get("completed", 0),
            row["statuses"].get("truncated", 0),
            row["statuses"].get("failed", 0),
            f"{row['solved']} of {(row.get('evaluation') or {}).get('samples', 0)}",
            *_evaluated(row.get("evaluation"), row["mean_reward"]),
            row["turns"],
        )
        for name, row in result["policies"].items()
    ]
    notes = [
        f"{name}: {row['inexact']} model calls were recorded without all their token ids "
        f"({docs('explanation/model-service.md')})"
        for name, row in result["policies"].items()
        if row.get("inexact")
    ]
    notes += [
        f"{name}: {row['constrained']} model calls constrained their tokens or overrode the policy's sampling; their "
        f"tokens have loss mask 0 ({docs('reference/request-options.md')})"
        for name, row in result["policies"].items()
        if row.get("constrained")
    ]
    return "\n".join([table(head, rows), *use_lines(result.get("models", {})), *notes])


def _evaluated(evaluation: dict[str, Any] | None, mean: float | None) -> tuple[str, str]:
    if not evaluation:
        return ("-" if mean is None else f"{mean:.3f}"), "-"
    each = [f"@{k} {estimate(p['value'], p['low'], p['high'])}" for k, p in evaluation["pass_at"].items()]
    return estimate(evaluation["mean"], evaluation["low"], evaluation["high"]), ", ".join(each) or "-"


def estimate(value: float, low: float | None, high: float | None) -> str:
    """Formats an estimate, with its interval if known: ``0.500 [0.095, 0.905]``."""
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def failure_lines(status: Mapping[str, Any], key: str = "first_failures") -> list[str]:
    """Formats each cause of failure: the first failed rollout, its error, and the log to read.

    Args:
        key: Section of the status to format: ``first_failures``, or ``errors`` for errors in verified rollouts.
    """
    lines, run = [], status["run"]
    for cause in status.get(key, ()):
        lines.append(in_one_line(f"first of {cause['kind'] or 'no cause'}: {cause['id']}: {cause['error']}"))
        if cause["log"]:
            lines.append(f"  log: {cause['log']}")
        lines.append(f"  more: megaflow-hpc show {run} {cause['id']}; megaflow-hpc logs {run} {cause['id']}")
    return lines


def unstarted_lines(status: Mapping[str, Any]) -> list[str]:
    """Explains why pods ended before any rollout started, and names their logs.

    Pods with the same cause share a line.
    """
    causes: dict[str, list[dict[str, Any]]] = {}
    for pod in status["unstarted"]:
        causes.setdefault(pod["cause"], []).append(pod)
    lines = []
    for cause, pods in causes.items():
        first = pods[0]
        who = f"pod {first['pod']}" if len(pods) == 1 else f"{len(pods)} pods (such as {first['pod']})"
        line = f"{who} ended on {first['node']} before any rollout: {cause} (log: {first['log']})"
        lines.append(in_one_line(line))
    return lines


def stop_lines(status: Mapping[str, Any]) -> list[str]:
    """Explains why pods ended before their work was done. Pods with the same reason share a line."""
    reasons: dict[str, list[str]] = {}
    for pod in status["pods"]:
        if pod.get("why") and pod["state"] in ("paused", "lost", "gone"):
            reasons.setdefault(pod["why"], []).append(pod["pod"])
    lines = []
    for why, pods in reasons.items():
        who = f"pod {pods[0]}" if len(pods) == 1 else f"{len(pods)} pods (such as {pods[0]})"
        lines.append(in_one_line(f"{who} ended: {why}"))
    return lines


def status_parts(status: Mapping[str, Any]) -> list[str]:
    """Returns the parts of a status line that follow the number of stored rollouts."""
    counts, servers = status["rollouts"], status["servers"]
    pods = [pod["state"] for pod in status["pods"]]
    parts = [f"{counts['running']} running", f"pods {sum(state in ('started', 'draining') for state in pods)}"]
    parts += [f"{state} {pods.count(state)}" for state in ("silent", "gone", "lost") if state in pods]
    if servers:
        parts.append(f"engines {sum(server['state'] == 'serving' for server in servers)}")
    failed = [server for server in servers if server["state"] == "failed"]
    if failed:
        parts.append(f"{failed[0]['server']} cannot start: {failed[0].get('cause', 'see its log')}")
    if status["tokens_per_s"]:
        parts.append(f"{status['tokens_per_s']:,.0f} tokens/s")
    if counts["failed"]:
        causes = ", ".join(f"{cause} {count}" for cause, count in status["failures"].items())
        parts.append(f"failed {counts['failed']} ({causes})")
    for policy, training in status.get("training", {}).items():
        parts.append(f"{policy} step {training['step']} of {training['steps']}")
    if not counts["running"]:
        return parts + queue_lines(status)[:1]
    if status["eta_s"]:
        parts.append(f"about {seconds(status['eta_s'])} to go")
    return parts


def status_line(name: str, status: Mapping[str, Any]) -> str:
    """Formats the status of the campaign ``name`` as a single line."""
    counts = status["rollouts"]
    done = sum(counts[state] for state in FINAL)
    return in_one_line(f"{name}: {status['state']}, {done}/{counts['total']} done, {', '.join(status_parts(status))}")


def queue_lines(status: Mapping[str, Any]) -> list[str]:
    """Lists pending jobs, with the reason, a remedy, and the expected start."""
    lines = []
    for group in status.get("queue", ()):
        who = group["first"] if group["jobs"] == 1 else f"{group['jobs']} (among them {group['first']})"
        line = f"{group['role']} in the queue: {who}: {group['reason']}"
        line += f" ({group['means']})" if group["means"] else ""
        line += f"; {group['remedy']}" if group["remedy"] else ""
        if group["starts_at"] is not None:
            line += f"; expected to start {time.strftime('%a %H:%M', time.localtime(group['starts_at']))}"
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
"""(Key, label) of the training metrics to show, averaged over the last steps."""


def training_lines(status: Mapping[str, Any]) -> list[str]:
    """Formats the progress and metrics of each trained policy, and the state of its trainer."""
    lines = []
    for policy, state in status.get("training", {}).items():
        parts = [f"{policy}: step {state['step']} of {state['steps']}, weights {state['weights']}"]
        parts += [f"{words} {_figure(name, state[name])}" for name, words in FIGURES if state[name] is not None]
        lines.append(", ".join(parts))
        lines += [f"{policy}: {warning}" for warning in state["warnings"]]
        trainer = state["trainer"]
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
