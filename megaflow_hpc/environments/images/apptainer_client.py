"""Builds and pulls images with Apptainer's Python client (spython), each in a child process.

The client runs a program named ``singularity``, hides why a call failed and has no timeout. Each child therefore gets a
clean environment and its own process group. Its ``PATH`` starts with a private directory, where ``singularity`` is a
link to the chosen Apptainer. A complete result is renamed to its target. A killed process leaves its private
directories behind, and the next call removes them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.sif import system_partition
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.apptainer import clean_environment, last_line
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.private import BUILD_DIRECTORY, process_directory, sweep_directories

SIF_OPTIONS = ("--mksquashfs-args", "-comp gzip -Xcompression-level 1")
"""Options of ``apptainer build``. Every squashfs version can read gzip, and level 1 is fast."""
TIMEOUT_S = 3600.0
_POLL_INTERVAL_S = 0.5
_ERROR_LINES = 15
_LIBRARY = str(Path(__file__).parents[3])
_PROGRAM = f"""\
import json, sys
request = json.loads(sys.argv[1])
sys.path[:] = request["path"]
from {__name__} import serve
sys.exit(serve(request))
"""


def build(
    apptainer: str,
    target: Path,
    source: str,
    *options: str,
    sandbox: bool = False,
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    stopped: threading.Event | None = None,
) -> None:
    """Builds an image at ``target``.

    Args:
        source: A definition file, an image or a ``docker://`` address.
        options: Additional options for ``apptainer build``.
        sandbox: Build a directory instead of a SIF.
        cwd: Directory against which relative paths in a definition file are resolved.
        timeout_s: Kill the build and all its processes after this many seconds.
        stopped: Kill the build as soon as this event is set.

    Raises:
        SiteError: The build failed. The message contains Apptainer's last lines. ``target`` is unchanged.
    """
    call = {"verb": "build", "source": source, "options": options, "sandbox": sandbox}
    _make(apptainer, target, call, cwd or Path.cwd(), timeout_s, stopped, {})


def pull(
    apptainer: str,
    target: Path,
    address: str,
    *,
    plain_http: bool = False,
    stopped: threading.Event | None = None,
) -> None:
    """Pulls an image from an ``oras://`` or ``library://`` address to a SIF at ``target``.

    Args:
        plain_http: Use HTTP without TLS.
        stopped: Kill the pull as soon as this event is set.

    Raises:
        SiteError: The pull failed. The message contains Apptainer's last lines. ``target`` is unchanged.
    """
    variables = {"APPTAINER_NOHTTPS": "1", "SINGULARITY_NOHTTPS": "1"} if plain_http else {}
    call = {"verb": "pull", "source": address}
    _make(apptainer, target, call, target.parent, TIMEOUT_S, stopped, variables)


def _make(
    apptainer: str,
    target: Path,
    call: dict[str, Any],
    cwd: Path,
    timeout_s: float,
    stopped: threading.Event | None,
    variables: Mapping[str, str],
) -> None:
    target = target.absolute()
    for base in (Path(tempfile.gettempdir()), target.parent):
        sweep_directories(base, BUILD_DIRECTORY)
    private = process_directory(BUILD_DIRECTORY)
    output = process_directory(BUILD_DIRECTORY, target.parent)
    try:
        result = output / target.name
        path = [*filter(os.path.isabs, sys.path), _LIBRARY]
        request = {**call, "result": str(result), "cwd": str(cwd.absolute()), "path": path}
        environment = {**_environment(private, apptainer), **variables}
        name = f"{call['source']}: apptainer {call['verb']}"
        status, output_text = _run(request, environment, name, timeout_s, stopped)
        if not _is_whole(result, status):
            tail = "\n".join(f"  {line}" for line in output_text.rstrip().splitlines()[-_ERROR_LINES:])
            raise SiteError(f"{name} failed: {last_line(output_text)}\n{tail}")
        os.replace(result, target)
    finally:
        remove_tree(private, ignore_errors=True)
        remove_tree(output, ignore_errors=True)


def _environment(private: Path, apptainer: str) -> dict[str, str]:
    programs, temporary = private / "bin", private / "tmp"
    programs.mkdir()
    temporary.mkdir()
    (programs / "singularity").symlink_to(os.path.abspath(apptainer))
    environment = clean_environment(temporary, proxies=True)
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return environment


def _is_whole(result: Path, status: int) -> bool:
    if result.is_dir():
        return status == 0  # a directory, unlike a SIF, does not reveal missing files
    try:
        system_partition(result)
    except SandboxError:
        return False
    return True


def _run(
    request: dict[str, Any],
    environment: dict[str, str],
    name: str,
    timeout_s: float,
    stopped: threading.Event | None,
) -> tuple[int, str]:
    """Runs :func:`serve` in a child process. Returns the child's exit status and output."""
    # Run isolated (-I) and in /, so that Python imports nothing from the definition file's directory.
    process = subprocess.Popen(
        [*dies_with_parent("TERM"), sys.executable, "-I", "-c", _PROGRAM, json.dumps(request)],
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = _output(process, name, timeout_s, stopped)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # The child is not reaped yet, so its group id cannot be reused.
        process.wait()
        raise
    return process.returncode, output.decode("utf-8", "replace")


def _output(process: subprocess.Popen[bytes], name: str, timeout_s: float, stopped: threading.Event | None) -> bytes:
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, end - time.monotonic())
        try:
            return process.communicate(timeout=min(_POLL_INTERVAL_S, left_s))[0]
        except subprocess.TimeoutExpired:
            if stopped is not None and stopped.is_set():
                raise SiteError(f"{name}: interrupted") from None
            if time.monotonic() >= end:
                raise SiteError(f"{name} took more than {timeout_s:g} s") from None


def serve(request: dict[str, Any]) -> int:
    """Runs one client call in the child process. Prints Apptainer's output and returns its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # sent when the parent dies
    from spython.main import Client

    os.chdir(request["cwd"])
    run = Client._run_command
    done: dict[str, Any] = {"return_code": 1, "message": []}

    def keep(command: list[str], **options: Any) -> None:
        # build() and pull() discard the exit status and output that this method returns.
        options |= {"capture": True, "quiet": True, "return_result": True}
        done.update(run(command, **options))

    Client._run_command = keep
    try:
        if request["verb"] == "build":
            options = list(request["options"])
            sandbox = request["sandbox"]
            Client.build(request["source"], request["result"], options=options, sandbox=sandbox, sudo=False, quiet=True)
        else:
            Client.pull(request["source"], name=request["result"], quiet=True)
    except UnicodeDecodeError as error:  # The client decodes output as strict UTF-8.
        sys.stdout.buffer.write(error.object)
    message = done["message"]
    print(message if isinstance(message, str) else "\n".join(message))
    return 1 if done["return_code"] else 0
