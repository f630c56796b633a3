"""The shell text that the runner of a sandbox evaluates: what it exports, and one line per command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from megaflow_hpc.environments.sandbox.spec import check_variables
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.descriptors import inherited

MARKER = "MEGAFLOW_COMMAND"
"""Environment variable by which a command's processes are found when it runs out of time."""

NO_WORKDIR = "no-workdir"
"""What PID 1 says before "ready" if the sandbox's workdir cannot be made."""

LONGEST_LINE = 2000
"""Bytes of a command handed over through a FIFO, which takes 4096 in one piece."""

_ONE_PROGRAM = re.compile(r"[\w.+-]*/[\w./+-]*(?: [\w./:=@%,+-]+)*", re.ASCII)
"""A path and plain words: ``/bin/sh -c`` would do nothing but start that program."""


def environment_text(env: Mapping[str, str], as_root: bool, workdir: str | None = None, settings: str = "") -> str:
    """Returns what PID 1 sources: exports, and making ``workdir``. ``settings`` are the image's lines, before
    ``env``."""
    lines = [settings.rstrip("\n"), "ulimit -c 0"]
    if (descriptors := inherited()) is not None:
        lines += [f"ulimit -Sn {descriptors}"]  # the runner's own need is no program's
    if as_root:
        # uid 0 is the only uid there is, so tar must not try to give files to others.
        lines += ["export HOME=/root USER=root LOGNAME=root TAR_OPTIONS=--no-same-owner"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if workdir:
        quoted = shlex.quote(workdir)
        lines += [f"[ -d {quoted} ] || mkdir -p {quoted} || echo {NO_WORKDIR}"]
    return "\n".join(lines) + "\n"


def command_text(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> str:
    """Returns the shell text of one command, for the child that waits for it and becomes it."""
    words = one_program(command)
    exports = ""
    if env:
        check_variables(env)
        exports = "".join(f" {name}={shlex.quote(value)}" for name, value in env.items())
    return (
        f"exec <{stdin} >{CONTROL_DIR}/{streams[0]} 2>{CONTROL_DIR}/{streams[1]}; cd {shlex.quote(cwd)} || exit 126; "
        f"export {MARKER}={number}{exports}; exec $_mf_s {' '.join(map(shlex.quote, words))}"
    )


def one_program(command: str | Sequence[str]) -> list[str]:
    """Returns the words of the one program that a command is: ``/bin/sh -c`` for a string that is more than words."""
    if isinstance(command, str):
        words = command.split(" ") if _ONE_PROGRAM.fullmatch(command) else ["/bin/sh", "-c", command]
    else:
        words = list(command)
    if not words or any("\0" in word for word in words):
        raise SandboxError(f"command {command!r}: expected at least one word and no zero byte")
    return words


def one_line(text: str) -> bytes | None:
    """Returns the text as a line that ``read`` takes byte by byte; ``None`` if it had better be a file to source."""
    if len(text) > LONGEST_LINE or not text.isascii():
        return None
    return text.replace("\n", "'\"$_mf_n\"'").encode() + b"\n"


def session_text(lines: str) -> str:
    """Returns what a session's shell runs: it evaluates each line of the FIFO ``lines`` and answers with its status."""
    # What the line redirects holds for it alone; 8 and 9 are closed for what it runs.
    return (
        f"exec 8<{lines} 9>&1 >/dev/null 2>&1; _mf_n='\n'\n"
        'while IFS= read -r _mf_line <&8; do eval "$_mf_line"; echo "$?" >&9; done'
    )


def session_line(command: str, streams: tuple[str, str]) -> str:
    """Returns the line of one command of a session."""
    return f"eval {shlex.quote(command)} </dev/null >{CONTROL_DIR}/{streams[0]} 2>{CONTROL_DIR}/{streams[1]} 8<&- 9>&-"
