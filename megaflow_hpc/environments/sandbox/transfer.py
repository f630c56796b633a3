"""Files in and out of a running sandbox, by its own ``cp`` and ``tar``."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, BinaryIO, cast

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import copy_tree, remove_tree
from megaflow_hpc.host.tar import Refused
from megaflow_hpc.host.unpack import Budget, TreeWriter, unpack_tar
from megaflow_hpc.types import ExecResult, Sandbox

Exec = Callable[..., Awaitable[ExecResult]]
"""Runs a command in the sandbox: :meth:`ApptainerSandbox.exec`."""

Fetch = Callable[[str, Callable[[bytes], bool]], Awaitable[ExecResult]]
"""Runs a command in the sandbox and hands its standard output over piece by piece, until it is told ``False``."""

DOWNLOAD_LIMIT = 256 * 1024 * 1024
"""Bytes that one download may bring to the host."""
DOWNLOAD_FILES = 100_000
"""Files, directories and links that it may."""
WORDS_LIMIT = 16384
"""Bytes kept of what its programs say on standard error."""


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
    except (OSError, RecursionError) as error:
        raise SandboxError(f"{source}: cannot be copied to be uploaded ({str(error)[:500]})") from error
    finally:
        await asyncio.to_thread(remove_tree, staged, ignore_errors=True)


async def download(fetch: Fetch, source: str, target: str, scratch: str, budget: Budget) -> None:
    """Copies a file or a directory's contents out of a sandbox; see :meth:`ApptainerSandbox.download`.

    The sandbox's programs send a stream, which may be anything. It is kept in a file without a name up to a limit, past
    which they are ended, and then unpacked.

    Args:
        scratch: directory for that file.
        budget: what may be written to the host, counted down.

    Raises:
        SandboxError: there is nothing at ``source``, or what was sent is too much or broken.
    """
    quoted = shlex.quote(source)
    script = (
        f"if [ -d {quoted} ]; then echo d; exec tar -C {quoted} -cf - .; "
        f"elif [ -f {quoted} ]; then echo f; exec cat <{quoted}; fi"
    )
    allowed = budget.bytes
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            # A header and the padding of a small file take more than the file.
            spool = _Spool(file, min(2 * allowed, allowed + DOWNLOAD_LIMIT // 4) + (1 << 20))
            done = await fetch(script, spool.take)
            if spool.failed:
                raise spool.failed
            if spool.left < 0:
                raise Refused("more bytes than are allowed")
            await _in_thread(lambda: _receive(file, done, source, target, budget))
    except Refused as error:
        if str(error).startswith("more "):
            raise SandboxError(
                f"{source}: {error}: at most {allowed // 10**6} MB come out of this sandbox (its disk_mb, and never "
                f"more than {DOWNLOAD_LIMIT // 10**6}) in {DOWNLOAD_FILES} files; download less"
            ) from error
        raise SandboxError(f"{source}: what the sandbox sent is refused: {error}") from error
    except OSError as error:
        raise SandboxError(f"{source}: cannot be written to {target} ({error})") from error


class _Spool:
    """Takes what a command prints, up to a limit. Never raises: it is called by the event loop."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self.left = limit
        self.failed: OSError | None = None

    def take(self, data: bytes) -> bool:
        """Writes a piece; ``False`` if there is to be no more."""
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
    said = f": {done.stderr.strip()[-500:]}" if done.stderr.strip() else ""
    if kind == b"d\n":
        try:
            unpack_tar(cast(BinaryIO, file), target, budget)
        except Refused as error:
            raise Refused(f"{error}{said}") from error
    elif kind == b"f\n" and not done.exit_code:
        place = Path(target) / Path(source).name if Path(target).is_dir() else Path(target)
        with TreeWriter(place.parent, budget) as tree:
            tree.file((os.fsencode(place.name),), iter(lambda: file.read(1 << 20), b""))
    elif done.exit_code or kind:
        raise Refused(f"its programs ended with {done.exit_code}{said}")
    else:
        raise SandboxError(f"{source}: nothing to download: no such file or directory in the sandbox")


async def _in_thread(work: Callable[[], None]) -> None:
    """Runs ``work``, which ends by itself; one who gives up waiting finds it ended all the same."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise
