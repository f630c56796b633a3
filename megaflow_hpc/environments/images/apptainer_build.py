"""``apptainer build``: with a place of its own for what Apptainer unpacks, which goes whoever is killed, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.leftovers import BUILD_DIRECTORY, make_directory, sweep_directories


def build(
    apptainer: str,
    target: Path,
    source: str,
    *options: str,
    cwd: Path | None = None,
    timeout_s: float = 3600,
    stopped: threading.Event | None = None,
) -> None:
    """Runs ``apptainer build``; ``source`` is a definition file, an image or a ``docker://`` address.

    Args:
        stopped: ends it once it is set.

    Raises:
        SiteError: with Apptainer's own last lines; nothing is left at ``target``.
    """
    sweep_directories(tempfile.gettempdir(), BUILD_DIRECTORY)
    temporary = make_directory(BUILD_DIRECTORY)
    try:
        process = subprocess.Popen(
            [apptainer, "build", *options, str(target), source],
            cwd=cwd,
            env=runtime.clean_environment(temporary, proxies=True),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said = _output(process, source, timeout_s, stopped)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started: it is not reaped yet
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise SiteError(f"{source}: apptainer build took more than {timeout_s:g} s") from None
            raise
    finally:
        remove_tree(temporary, ignore_errors=True)
    if process.returncode:
        output = said.decode("utf-8", "replace")
        tail = "\n".join("  " + line for line in output.splitlines()[-15:])
        raise SiteError(f"{source}: apptainer build failed: {runtime.last_line(output)}\n{tail}")


def _output(process: subprocess.Popen[bytes], source: str, timeout_s: float, stopped: threading.Event | None) -> bytes:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return process.communicate(timeout=min(0.5, end - time.monotonic()) if stopped else timeout_s)[0]
        except subprocess.TimeoutExpired:
            if stopped is not None and stopped.is_set():
                raise SiteError(f"{source}: interrupted") from None
            if time.monotonic() >= end:
                raise
