"""A Python that has imported large modules, and forks a process for each program that it runs.

The program's limits, variables, streams and exit status are its own. Only the imports are shared, which take seconds of
CPU for vLLM or transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_LOOP = """
import ctypes, json, os, signal, sys, tempfile, types
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    program, arguments, folder, children = json.loads(line)
    running = set()
    for variables, streams in children:
        child = os.fork()
        if not child:
            break
        running.add(child)
    else:
        ended = 0
        while running:
            child, status = os.wait()
            running.discard(child)
            if status and not ended:
                ended = os.waitstatus_to_exitcode(status)
                for other in running:
                    os.kill(other, signal.SIGKILL)
        print("status", ended, flush=True)
        continue
    break
else:
    sys.exit()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.environ.clear()
os.environ.update(variables)
tempfile.tempdir = None  # perhaps that of the test during which the modules were imported
os.chdir(folder)
for number, stream in enumerate(streams):
    opened = os.open(stream, os.O_RDWR)
    os.dup2(opened, number)
    os.close(opened)
sys.argv[1:] = arguments
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(program, "<program>", "exec"), sys.modules["__main__"].__dict__)
"""

COMMAND_LINE = "import sys; from megaflow_hpc.cli import main; sys.exit(main())"
"""A program: ``megaflow-hpc`` with the program's arguments."""


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
        return self.run_several(program, *arguments, variables=[variables or {}])

    def run_several(
        self,
        program: str,
        *arguments: str,
        variables: Sequence[Mapping[str, str]],
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program in one process for each of ``variables``. If one fails, the others are killed.

        Returns the output of the first process, and the errors of all.
        """
        with tempfile.TemporaryDirectory() as place:
            children, streams = [], []
            for number, own in enumerate(variables):
                streams.append([Path(place, f"{name}{number}") for name in ("output", "errors")])
                for stream in streams[-1]:
                    stream.touch()
                environment = {**os.environ, **self._variables, **own}
                children.append([environment, [os.devnull, *map(str, streams[-1])]])
            asked = [program, arguments, str(folder or os.getcwd()), children]
            assert self._loop.stdin
            assert self._loop.stdout
            self._loop.stdin.write(json.dumps(asked) + "\n")
            self._loop.stdin.flush()
            try:
                for line in self._loop.stdout:  # a library may have printed lines when it was imported
                    if line.startswith("status "):
                        output = streams[0][0].read_text(errors="replace")
                        errors = "".join(own[1].read_text(errors="replace") for own in streams)
                        return subprocess.CompletedProcess([program, *arguments], int(line[7:]), output, errors)
            except BaseException:  # such as a test's own limit; the next program must not get this one's answer
                self._loop.kill()
                raise
        raise AssertionError(f"the Python that has imported the modules ended: {self._loop.wait(60)}")

    def alive(self) -> bool:
        """Returns whether it can run another program."""
        return self._loop.poll() is None
