"""A Python that has imported large modules, and forks a process for each program that it runs.

The program's limits, variables, streams and exit status are its own. Only the imports are shared, which take seconds of
CPU for vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_LOOP = """
import json, os, sys
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    program, arguments, variables, folder, streams = json.loads(line)
    child = os.fork()
    if not child:
        break
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(variables)
os.chdir(folder)
for number, stream in enumerate(streams):
    opened = os.open(stream, os.O_RDWR)
    os.dup2(opened, number)
    os.close(opened)
sys.argv[1:] = arguments
exec(program, {"__name__": "__main__"})
"""


class WarmPython:
    """Imports ``modules`` once. Use it as a context manager, or let it end with this process.

    Args:
    variables: added to the environment. A library may read some of them when it is imported.
    """

    def __init__(self, *modules: str, python: str = sys.executable, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._loop = subprocess.Popen(
            [python, "-c", _LOOP, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._variables},
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.communicate(timeout=60)

    def run(
        self, program: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python source with ``arguments`` as its ``sys.argv[1:]``."""
        environment = {**os.environ, **self._variables, **(variables or {})}
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("output", "errors")]
            for stream in streams:
                stream.touch()
            asked = [program, arguments, environment, os.getcwd(), [os.devnull, *map(str, streams)]]
            assert self._loop.stdin
            assert self._loop.stdout
            self._loop.stdin.write(json.dumps(asked) + "\n")
            self._loop.stdin.flush()
            for line in self._loop.stdout:  # a library may have printed lines when it was imported
                if line.startswith("status "):
                    output, errors = (stream.read_text(errors="replace") for stream in streams)
                    return subprocess.CompletedProcess([program, *arguments], int(line[7:]), output, errors)
        raise AssertionError(f"the Python that has imported the modules ended: {self._loop.wait(60)}")
