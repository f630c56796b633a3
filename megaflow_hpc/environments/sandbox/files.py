"""Copies files into and out of a sandbox, using programs of its image."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, BinaryIO, cast

from megaflow_hpc.errors import SandboxError, SetupError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import copy_tree, remove_tree
from megaflow_hpc.host.tar import Budget, RefusedMember, TreeWriter, unpack_tar
from megaflow_hpc.types import ExecResult

Run = Callable[..., Awaitable[ExecResult]]
"""Runs a command in the sandbox, with the arguments of :meth:`.ApptainerSandbox.exec`."""

MAX_DOWNLOAD_BYTES = 256 * 1024 * 1024
MAX_DOWNLOAD_FILES = 100_000
"""Maximum number of files, directories and symlinks in one download."""
_STDERR_LIMIT = 16384
"""Maximum number of bytes kept of the standard error of a download's programs."""


async def upload(run: Run, source: str, target: str, control: str, name: str) -> None:
    """Copies a file or a directory's contents into a sandbox. See :meth:`.ApptainerSandbox.upload`.

    Args:
        control: The container's control directory on the host, which the sandbox sees read-only.
        name: Name of the entry in ``control`` that holds the files until they are copied.
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
        done = await run(script, cwd="/")
        if done.exit_code:
            raise SetupError(f"{source}: upload to {target} failed: {done.stderr.strip()[-500:]}")
    except (OSError, RecursionError) as error:
        raise SandboxError(f"{source}: cannot be copied to be uploaded ({str(error)[:500]})") from error
    finally:
        await asyncio.to_thread(remove_tree, staged, ignore_errors=True)


async def download(run: Run, source: str, target: str, scratch: str, budget: Budget) -> None:
    """Copies a file or a directory's contents out of a sandbox. See :meth:`.ApptainerSandbox.download`.

    Programs in the sandbox send an untrusted stream, which is written to an unnamed file and then unpacked. The
    programs are killed if the stream exceeds a limit.

    Args:
        scratch: Directory for the unnamed file.
    """
    quoted = shlex.quote(source)
    script = (
        f"if [ -d {quoted} ]; then echo d; exec tar -C {quoted} -cf - .; "
        f"elif [ -f {quoted} ]; then echo f; exec cat <{quoted}; fi"
    )
    allowed = budget.bytes
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            # In an archive, the header and padding of a small file take up more bytes than the file itself.
            spool = _Spool(file, min(2 * allowed, allowed + MAX_DOWNLOAD_BYTES // 4) + (1 << 20))
            done = await run(script, output_limit=_STDERR_LIMIT, on_output=spool.take)
            if spool.failed:
                raise spool.failed
            if spool.left < 0:
                raise RefusedMember("more bytes than are allowed")
            await _in_thread(lambda: _receive(file, done, source, target, budget))
    except RefusedMember as error:
        if str(error).startswith("more "):
            raise SetupError(
                f"{source}: {error}: at most {allowed // 10**6} MB come out of this sandbox (its disk_mb, and never "
                f"more than {MAX_DOWNLOAD_BYTES // 10**6}) in {MAX_DOWNLOAD_FILES} files; download less"
            ) from error
        raise SetupError(f"{source}: the data that the sandbox sent is invalid: {error}") from error
    except OSError as error:
        raise SandboxError(f"{source}: cannot be written to {target} ({error})") from error


class _Spool:
    """Writes a command's output to a file, up to a limit. Never raises, because the event loop calls it."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self.left = limit
        self.failed: OSError | None = None

    def take(self, data: bytes) -> bool:
        """Appends a chunk of output. Returns ``False`` if the limit is exceeded or a write failed. The caller must then
        kill the command."""
        self.left -= len(data)
        try:
            if self.left >= 0 and self.failed is None:
                self._file.write(data)
        except OSError as error:
            self.failed = error
        return self.left >= 0 and self.failed is None


def _receive(file: IO[bytes], done: ExecResult, source: str, target: str, budget: Budget) -> None:
    file.seek(0)
    kind = file.read(2)
    reason = f": {done.stderr.strip()[-500:]}" if done.stderr.strip() else ""
    if kind == b"d\n":
        try:
            unpack_tar(cast(BinaryIO, file), target, budget)
        except RefusedMember as error:
            raise RefusedMember(f"{error}{reason}") from error
    elif kind == b"f\n" and not done.exit_code:
        path = Path(target) / Path(source).name if Path(target).is_dir() else Path(target)
        with TreeWriter(path.parent, budget) as tree:
            tree.file((os.fsencode(path.name),), iter(lambda: file.read(1 << 20), b""))
    elif done.exit_code or kind:
        raise RefusedMember(f"its programs ended with {done.exit_code}{reason}")
    else:
        raise SetupError(f"{source}: nothing to download: no such file or directory in the sandbox")


async def _in_thread(work: Callable[[], None]) -> None:
    """Runs ``work`` in a thread. On cancellation, waits until ``work`` has finished."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise
