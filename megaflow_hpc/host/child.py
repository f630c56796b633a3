"""A program of ours beside this process, which must not wait for it: it imports little and starts fast."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from megaflow_hpc.host.apptainer import clean_environment
from megaflow_hpc.host.parent_death import dies_with_parent

_LIBRARY = str(Path(__file__).parents[2])


def argv_of(module: ModuleType) -> list[str]:
    """Returns the command line, up to its arguments, of a module's ``main`` that imports little and starts fast."""
    program = f"import sys; sys.path.append(sys.argv.pop(1)); from {module.__name__} import main; main()"
    return [*dies_with_parent(), sys.executable, "-S", "-E", "-c", program, _LIBRARY]


async def run(argv: Sequence[str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Runs a program to its end, and returns its exit status and both streams; it ends with this task."""
    import asyncio  # which the program itself, who imports this module for nothing else, is spared

    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment(),
        cwd="/",
        start_new_session=True,
    )
    try:
        said, errors = await process.communicate(stdin)
    except BaseException:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, said, errors
