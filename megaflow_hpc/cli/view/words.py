"""Formats the status as lines above the list, for terminals of at least 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from megaflow_hpc.cli.output import FINAL, queue_lines, seconds, training_lines, unstarted_lines
from megaflow_hpc.monitor.live import PRESENT, RunSnapshot
from megaflow_hpc.texts import in_one_line

STYLES = {
    "running": "cyan",
    "completed": "green",
    "truncated": "yellow",
    "failed": "red",
    "cancelled": "red",
    "silent": "yellow",
    "gone": "red",
    "lost": "red",
    "down": "red",
    "serving": "green",
    "draining": "yellow",
}
"""Maps each state to its colour. The state's name is always shown too, for terminals without colours."""


def head(name: str, snapshot: RunSnapshot, size: tuple[int, int], problem: str = "") -> list[Text]:
    """Formats the lines above the list.

    Args:
        name: Name of the campaign.
        size: Columns and lines of the screen. Most lines are reserved for the list.
        problem: Reason why the shown state is out of date. Empty if it is current.
    """
    status, (width, height) = snapshot.status, size
    lines = [progress(name, status, width), counts(status), means(snapshot)]
    notes = []
    if problem:
        notes.append(Text(in_one_line(problem), "bold red"))
    notes += [Text(in_one_line(note), "yellow") for note in remarks(snapshot)]
    most = max(2, height // 4)
    if len(notes) > most:
        notes[most - 1 :] = [Text(f"… {len(notes) - most + 1} more: megaflow-hpc status", "yellow")]
    lines += notes
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def progress(name: str, status: Mapping[str, Any], width: int) -> Text:
    """Formats the name, the state, a progress bar and the remaining time."""
    rollouts, state = status["rollouts"], status["state"]
    done = sum(rollouts[final] for final in FINAL)
    share = min(1.0, done / rollouts["total"]) if rollouts["total"] else 0.0
    text = f" {done}/{rollouts['total']} {int(share * 100)}%"  # show 100 % only if all are done
    if per_minute := status["rate_per_s"] * 60:
        text += f"  {per_minute:.1f}/min" if per_minute < 100 else f"  {per_minute:,.0f}/min"
    if status["eta_s"]:
        text += f"  {seconds(status['eta_s'])} to go"
    line = Text.assemble((in_one_line(name), "bold"), " ", (state, f"bold {STYLES.get(state, '')}"), "  ")
    room = min(40, width - len(line) - len(text))
    if room >= 5:
        full = round(share * room)
        line.append("█" * full, "green").append("░" * (room - full), "dim")
    return line.append(text)


def counts(status: Mapping[str, Any]) -> Text:
    """Formats the number of rollouts in each state."""
    line = Text()
    for state in ("pending", "running", *FINAL):
        count = status["rollouts"][state]
        line.append(f"{state} {count}", STYLES.get(state, "") if count else "dim").append("  ")
    return line


def means(snapshot: RunSnapshot) -> Text:
    """Formats the number of pods, slots and engines, and the engines' throughput."""
    status = snapshot.status
    pods = [pod for pod in status["pods"] if pod["state"] in PRESENT]
    slots = sum(pod["slots"] for pod in pods)
    running = sum(pod["running"] for pod in pods)
    parts = [_numbered("pods", status["pods"], "started")]
    if slots:
        parts.append(f"slots {running}/{slots} ({running / slots:.0%})")
    if status["servers"]:
        parts.append(_numbered("engines", status["servers"], "serving"))
    if status["servers"] or status["tokens_per_s"]:
        parts.append(f"{status['tokens_per_s']:,.0f} tokens/s")
    line = Text(in_one_line("  ".join(parts)))  # a pod's state is untrusted text
    if stuck := snapshot.rollouts.stuck:
        line.append(f"  stuck {stuck}", "bold red")
    return line


def _numbered(what: str, things: list[dict[str, Any]], normal: str) -> str:
    """Formats ``pods 3 (1 silent, 2 done)``: the number in the normal state, followed by the other states."""
    states = Counter(thing["state"] for thing in things)
    others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if state != normal)
    return f"{what} {states[normal]}" + (f" ({others})" if others else "")


def remarks(snapshot: RunSnapshot) -> Iterator[str]:
    """Yields notable conditions: failures, waiting jobs, unhealthy pods and engines."""
    status = snapshot.status
    if status["failed_at"]:
        causes = []
        for cause, nodes in status["failed_at"].items():
            where = ", ".join(f"{node or '?'} {count}" for node, count in list(nodes.items())[:3])
            causes.append(f"{cause} {sum(nodes.values())} ({where}{', …' if len(nodes) > 3 else ''})")
        yield "failed attempts: " + ", ".join(causes)
    if snapshot.unlisted:
        yield f"{snapshot.unlisted} successful rollouts are not listed: megaflow-hpc status RUN --rollouts"
    if status.get("waits_for"):
        yield f"waits for {', '.join(status['waits_for'])} to add rollouts"
    yield from queue_lines(status)
    yield from training_lines(status)
    yield from unstarted_lines(status)
    for pod in status["pods"]:
        if pod["state"] == "silent":
            yield f"pod {pod['pod']} on {pod['node']} is silent for {pod['silent_s']} s"
        for node, why in pod.get("excluded", {}).items():
            yield f"{node} gets no more work: {why}"
    for server in status["servers"]:
        if server.get("cause"):
            yield f"engine {server['server']}: {server['cause']}"
    if snapshot.unasked:
        yield f"turns of running rollouts are not shown: {snapshot.unasked}"
