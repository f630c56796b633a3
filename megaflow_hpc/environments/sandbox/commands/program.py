"""The program (``runner.c``) that starts commands in place of runner.sh's shells, where one was built."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from importlib import resources

from megaflow_hpc.environments.sandbox.commands.shell import MARKER, one_program
from megaflow_hpc.environments.sandbox.spec import check_variables
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR

NAME = "runner"
"""Its name in a control directory."""

READY = b"ready program"
"""What it says when it runs; the shells say ``ready``."""

LONGEST_RECORD = 4096
"""Bytes that a FIFO takes, and it reads, in one piece."""


def program() -> bytes | None:
    """Returns the program for this machine; ``None`` where none was built, or ``MEGAFLOW_SANDBOX_RUNNER`` is shell.

    Raises:
        ConfigError: the variable has a value that is not known.
        SandboxError: it is ``program``, and there is none.
    """
    named = way()
    found = None if named == "shell" else _built(os.uname().machine)
    if found is None and named == "program":
        raise SandboxError(f"no program was built that starts commands on {os.uname().machine} (hatch_build.py)")
    return found


def way() -> str:
    """Returns what starts commands: ``auto``, or what ``MEGAFLOW_SANDBOX_RUNNER`` (program, shell) decides by hand."""
    named = os.environ.get("MEGAFLOW_SANDBOX_RUNNER", "auto")
    if named not in ("auto", "program", "shell"):
        raise ConfigError(f"MEGAFLOW_SANDBOX_RUNNER={named}: expected program, shell or auto")
    return named


@functools.cache
def _built(machine: str) -> bytes | None:
    file = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath(f"runner-{machine}")
    return file.read_bytes() if file.is_file() else None


def record(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> bytes:
    """Returns what the program reads of one command."""
    check_variables(env)
    words = one_program(command)
    outputs = (f"{CONTROL_DIR}/{name}" for name in streams)
    variables = (f"{name}={value}" for name, value in env.items())
    fields = (stdin, *outputs, f"PWD={cwd}", f"{MARKER}={number}", *variables, "", *words, "")
    return "\0".join(fields).encode("utf-8", "surrogateescape")
