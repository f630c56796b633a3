"""What Apptainer builds: one ``apptainer build``, and the definition files that it is given.

It ends with whoever asked for it, and its temporary files with it. Apptainer leaves them where it is killed: so they
lie in a directory that bears the name of this process, which goes with the build, with the next one on this node, or by
the janitor. A definition file is known by what goes into its image.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer, last_line
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.cleanup import BUILD_DIRECTORY, make_directory, sweep_directories
from megaflow_hpc.host.files import remove_tree

SIF_OPTIONS = ("--mksquashfs-args", "-comp gzip -Xcompression-level 1")
BUILD_OPTIONS = ("--fakeroot", *SIF_OPTIONS)
"""Fast compression: an image is packed once and unpacked on every node; readable by every squashfs there is."""
_GROUP = """trap 'kill -KILL 0' TERM; "$@" & wait "$!\""""
"""Runs a command, and ends its whole process group when it is told to: programs that Apptainer starts outlive it."""


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
        timeout_s: longest time; what it has started ends with it, and with this process.
        stopped: ends it once it is set.

    Raises:
        SiteError: with Apptainer's own last lines; nothing is left at ``target``.
    """
    sweep_directories(tempfile.gettempdir(), BUILD_DIRECTORY)
    temporary = make_directory(BUILD_DIRECTORY)
    try:
        _run([apptainer, "build", *options, str(target), source], cwd, temporary, timeout_s, stopped)
    finally:
        remove_tree(temporary, ignore_errors=True)


def _run(
    argv: Sequence[str], cwd: Path | None, temporary: Path, timeout_s: float, stopped: threading.Event | None
) -> None:
    source = argv[-1]
    process = subprocess.Popen(
        [*dies_with_parent("TERM"), "/bin/sh", "-c", _GROUP, "sh", *argv],
        cwd=cwd,
        env=clean_environment(temporary, proxies=True),
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
    if process.returncode:
        output = said.decode("utf-8", "replace")
        tail = "\n".join("  " + line for line in output.splitlines()[-15:])
        raise SiteError(f"{source}: apptainer build failed: {last_line(output)}\n{tail}")


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


def definition_digest(path: Path) -> str:
    """SHA-256 of a definition file, of the local image it starts from and of the files it copies in."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    digest = hashlib.sha256(b"definition\0" + text.encode("utf-8", "surrogateescape"))
    local = re.search(
        r"^\s*Bootstrap:\s*(localimage|oci-archive|docker-archive)\s*$", text, re.IGNORECASE | re.MULTILINE
    )
    start = re.search(r"^\s*From:\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    if local and start:
        digest.update(identity(path.parent / start[1]).encode())
    section = ""
    for line in text.splitlines():
        if line.startswith("%"):
            section = line.split()[0]
        elif section == "%files" and line.strip() and not line.lstrip().startswith("#"):
            source = path.parent / line.split()[0]
            for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if file.is_file():
                    digest.update(
                        f"\0{file.relative_to(path.parent) if file.is_relative_to(path.parent) else file}\0".encode()
                    )
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def identity(path: Path) -> str:
    """Returns what stands for a base image in a key: the digest in its name, else path, size and time of change."""
    try:
        found = path.stat()
    except OSError:
        return path.name
    return digest_in(path) or f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"


def build_definition(target: Path, definition: Path, stopped: threading.Event) -> None:
    """Builds a SIF at ``target``, until ``stopped`` is set."""
    # Relative paths in a definition are relative to it.
    apptainer = find_apptainer()
    build(apptainer, target, str(definition), *BUILD_OPTIONS, cwd=definition.parent, stopped=stopped)
