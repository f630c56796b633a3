"""Files in and out of a running sandbox, by its own ``cp`` and ``tar``."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import copy_tree, remove_tree, unpack
from megaflow_hpc.types import ExecResult, Sandbox

Exec = Callable[..., Awaitable[ExecResult]]
"""Runs a command in the sandbox: :meth:`ApptainerSandbox.exec`."""

DOWNLOAD_LIMIT = 256 * 1024 * 1024
"""Bytes that one download may bring to the host."""


async def upload(sandbox: Sandbox, source: str, target: str, control: str, name: str) -> None:
    """Copies a file or a directory's contents into a sandbox; see :meth:`ApptainerSandbox.upload`.

    Args:
        control: the container's control directory on the host, which the sandbox sees read-only.
        name: entry of it that holds the files until they are copied.

    Raises:
        SandboxError: there is nothing at ``source``, or the sandbox cannot take it.
    """
    staged = os.path.join(control, name)
    inside = f"{CONTROL_DIR}/{name}"
    quoted = shlex.quote(target)
    path = Path(source)
    try:
        if path.is_dir():
            await asyncio.to_thread(copy_tree, path, Path(staged))
            script = f"mkdir -p {quoted} && cp -a {inside}/. {quoted}/"
        elif path.is_file():
            os.mkdir(staged, 0o700)
            file_name = "f-" + path.name
            await asyncio.to_thread(shutil.copy2, path, os.path.join(staged, file_name))
            final = shlex.quote(target + path.name) if target.endswith("/") else quoted
            script = (
                f't={final}; if [ -d "$t" ]; then t=$t/{shlex.quote(path.name)}; fi; '
                f'mkdir -p "$(dirname "$t")" && cp -a {inside}/{shlex.quote(file_name)} "$t"'
            )
        else:
            raise SandboxError(f"{source}: nothing to upload: no such file or directory")
        done = await sandbox.exec(script, cwd="/")
        if done.exit_code:
            raise SandboxError(f"{source}: upload to {target} failed: {done.stderr.strip()[-500:]}")
    finally:
        await asyncio.to_thread(remove_tree, staged)


async def download(run: Exec, source: str, target: str) -> None:
    """Copies a file or a directory's contents out of a sandbox; see :meth:`ApptainerSandbox.download`.

    Raises:
        SandboxError: there is nothing at ``source``, or more than :data:`DOWNLOAD_LIMIT` bytes.
    """
    quoted = shlex.quote(source)
    kind = await run(f"if [ -d {quoted} ]; then echo d; elif [ -f {quoted} ]; then echo f; fi")
    if kind.stdout.strip() not in ("d", "f"):
        raise SandboxError(f"{source}: nothing to download: no such file or directory in the sandbox")
    whole = 2 * DOWNLOAD_LIMIT
    if kind.stdout.strip() == "f":
        command = f"head -c {DOWNLOAD_LIMIT + 1} < {quoted}"
    else:
        command = f"tar -C {quoted} -cf - . | head -c {DOWNLOAD_LIMIT + 1}"
    got = await run(command, output_limit=whole)
    if got.exit_code:
        raise SandboxError(f"{source}: download failed: {got.stderr.strip()[-500:]}")
    if len(got.stdout_bytes) > DOWNLOAD_LIMIT:
        raise SandboxError(f"{source}: more than {DOWNLOAD_LIMIT >> 20} MiB; download less")
    if kind.stdout.strip() == "f":
        place = Path(target) / Path(source).name if Path(target).is_dir() else Path(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(place.write_bytes, got.stdout_bytes)
    else:
        await asyncio.to_thread(unpack, got.stdout_bytes, Path(target))
