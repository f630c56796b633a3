"""Prints or saves artifacts of a rollout, and prints the end of its verifier log."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.texts import printable

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.reading.store import Row

VERIFIER_LOG = "verifier.log"
TAIL_LINES = 20
"""Default number of lines to show from the end of the verifier log."""


def artifact(row: Row, name: str) -> bytes:
    """Returns the content of an artifact. If several share the name, the last one wins.

    Raises:
        ConfigError: There is no such artifact. The error lists the existing names.
    """
    by_name = {item.name: item.data for item in row.artifacts}
    if name not in by_name:
        there = ", ".join(by_name) or "none"
        raise ConfigError(f"{row.id}: no artifact {name!r}; there are: {there}")
    return by_name[name]


def hand_out(row: Row, name: str, output: str | None, as_json: bool) -> None:
    """Writes an artifact to ``output`` or stdout. It is unchanged in a pipe or file, and escaped on a terminal."""
    data = artifact(row, name)
    if output is not None:
        write_atomic(Path(output), data)
    if as_json:
        record = {"id": row.id, "name": name, "bytes": len(data)}
        print_json(record | ({"base64": base64.b64encode(data).decode()} if output is None else {"path": output}))
    elif output is not None:
        note(f"{name}: {len(data)} bytes")
        say(output)
    elif sys.stdout.isatty():
        text = data.decode("utf-8", "surrogateescape")
        say(text, end="" if text.endswith("\n") else "\n")
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def verifier_lines(row: Row, full: bool) -> Iterator[str]:
    """Yields the end of the verifier log, or all of it, if the reward is 0 or the verifier failed."""
    if row.reward != 0 and row.error_kind != "verifier":
        return
    data = next((item.data for item in reversed(row.artifacts) if item.name == VERIFIER_LOG), b"").rstrip()
    lines = printable(data.decode("utf-8", "surrogateescape")).split("\n") if data else []
    if len(lines) > TAIL_LINES and not full:
        yield f"… {len(lines) - TAIL_LINES} lines before (--artifact {VERIFIER_LOG})"
        lines = lines[-TAIL_LINES:]
    yield from lines
