"""The compiled program (``runner.c``) that starts commands. The shells of runner.sh replace it if none was built."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from importlib import resources

from megaflow_hpc.environments.sandbox.commands.command import MARKER, one_program
from megaflow_hpc.environments.sandbox.spec import check_variables
from megaflow_hpc.environments.sandbox.without import is_without
from megaflow_hpc.host.apptainer import CONTROL_DIR

NAME = "runner"
"""File name in a control directory."""

READY = b"ready program"
"""Line that the program writes when it runs; the shells write ``ready``."""

MAX_RECORD_BYTES = 4096
"""Bytes that a FIFO takes, and the program reads, in one piece."""


def program() -> bytes | None:
    """Returns the program for this machine; ``None`` if none was built, or if sandboxes must do without it."""
    return None if is_without("program") else _built(os.uname().machine)


@functools.cache
def _built(machine: str) -> bytes | None:
    file = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath(f"runner-{machine}")
    return file.read_bytes() if file.is_file() else None


def record(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> bytes:
    """Returns the record of one command, as the program reads it."""
    check_variables(env)
    words = one_program(command)
    outputs = (f"{CONTROL_DIR}/{name}" for name in streams)
    variables = (f"{name}={value}" for name, value in env.items())
    fields = (stdin, *outputs, f"PWD={cwd}", f"{MARKER}={number}", *variables, "", *words, "")
    return "\0".join(fields).encode("utf-8", "surrogateescape")
