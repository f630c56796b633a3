"""The shell text that the runner of a sandbox sources: what it exports, and one fragment per command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from megaflow_hpc.environments.apptainer import CONTROL_DIR
from megaflow_hpc.environments.spec import check_variables
from megaflow_hpc.errors import SandboxError

MARKER = "MEGAFLOW_COMMAND"
"""Environment variable by which a command's processes are found when it runs out of time."""


def environment_text(env: Mapping[str, str], as_root: bool) -> str:
    """What PID 1 exports. The runtime's own variables tell the host's paths, so they go."""
    lines = [
        "while IFS= read -r line; do",
        "  line=${line#export }; line=${line#declare -x }",
        '  case "$line" in APPTAINER* | SINGULARITY*) unset "${line%%=*}" ;; esac',
        "done <<END",
        "$(export -p)",
        "END",
        "unset line PROMPT_COMMAND PS1",
        'case "$LD_LIBRARY_PATH" in /.singularity.d/libs) unset LD_LIBRARY_PATH ;; esac',
        "ulimit -c 0",
    ]
    if as_root:
        # uid 0 is the only uid there is, so tar must not try to give files to others.
        lines += ["export HOME=/root USER=root LOGNAME=root TAR_OPTIONS=--no-same-owner"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return "\n".join(lines) + "\n"


def command_text(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> str:
    """The shell text of one command: one fork, then ``exec`` to the end; its own session, hence process group."""
    check_variables(env)
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not words or any("\0" in word for word in words):
        raise SandboxError(f"command {command!r}: expected at least one word and no zero byte")
    exports = "".join(f" {name}={shlex.quote(value)}" for name, value in env.items())
    return (
        f"( cd {shlex.quote(cwd)} || exit 126\nexport {MARKER}={number}{exports}\n"
        f"exec $setsid {' '.join(map(shlex.quote, words))} )"
        f" <{stdin} >{CONTROL_DIR}/{streams[0]} 2>{CONTROL_DIR}/{streams[1]}\n"
    )
