"""Files in and out of a sandbox: by its own programs while it runs, by the host while it is at rest."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.directory import SandboxDirectory
from megaflow_hpc.environments.sandbox.limits.watchdog import MB
from megaflow_hpc.environments.sandbox.processes import continue_all, stop_all
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths, leads
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SandboxError, SetupError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import copy_tree, remove_tree
from megaflow_hpc.host.tar import RefusedMember
from megaflow_hpc.host.unpack import Budget, TreeWriter, unpack_tar
from megaflow_hpc.types import ExecResult

Fetch = Callable[[str, Callable[[bytes], bool]], Awaitable[ExecResult]]
"""Runs a command in the sandbox and hands its standard output over piece by piece, until it is told ``False``."""

DOWNLOAD_LIMIT = 256 * 1024 * 1024
"""Bytes that one download may bring to the host."""
DOWNLOAD_FILES = 100_000
"""Files, directories and links that it may."""
WORDS_LIMIT = 16384
"""Bytes kept of what its programs say on standard error."""

READ_LIMIT = 1 << 20
"""Bytes that :meth:`SandboxFiles.read` returns at most."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SandboxFiles(ABC):
    """The files of a sandbox, as its users see them."""

    def __init__(self, spec: SandboxSpec, directory: SandboxDirectory) -> None:
        self.spec = spec
        self.workdir = spec.workdir or "/"
        self._dir = directory
        self._at_rest = False
        """Whether there is no container, and the next command starts one."""
        self._uploads = 0
        self._changing = asyncio.Lock()

    @property
    def directory(self) -> str:
        """The sandbox's directory on scratch."""
        return self._dir.directory

    @abstractmethod
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
        output_limit: int | None = None,
        on_output: Callable[[bytes], bool] | None = None,
    ) -> ExecResult:
        """Runs a command and waits for its end."""

    @abstractmethod
    async def end_processes(self, change: Callable[[LayerPaths], None] | None = None) -> None:
        """Ends every process; the next command starts a fresh container on the same writable layer."""

    @abstractmethod
    def _container(self) -> Container | None:
        """The container; ``None`` while the sandbox is at rest."""

    @abstractmethod
    async def control(self) -> str:
        """Returns the control directory of its container, on the host."""

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes | None:
        """Returns the first ``limit`` bytes of a file; ``None`` if there is no regular file.

        Of a sandbox at rest (:meth:`end_processes`) the host reads what the sandbox has written by itself, without a
        container and without any program of the sandbox's; else the sandbox's own ``head`` does.

        Args:
            path: relative to the sandbox's workdir.

        Raises:
            SandboxError: the sandbox is lost.
        """
        place = os.path.join(self.workdir, path)
        if self._at_rest and not self._covered(place):
            known, content = await asyncio.to_thread(self._dir.layer.read, place, limit)
            if known:
                return content
        script = f"if [ -f {shlex.quote(place)} ]; then exec head -c {limit} <{shlex.quote(place)}; else exit 1; fi"
        done = await self.exec(script, cwd="/", output_limit=2 * limit)
        return done.stdout_bytes if done.exit_code == 0 else None

    async def lacks(self, path: str) -> bool:
        """Whether there is certainly nothing at ``path``, or an empty directory, of a sandbox at rest
        (:meth:`end_processes`); it stays at rest. ``False`` where only a command could tell.

        Args:
            path: relative to the sandbox's workdir.
        """
        place = os.path.normpath(os.path.join(self.workdir, path))
        found: list[bool] = []
        if self._at_rest and not self._covered(place):
            await self.end_processes(lambda paths: found.append(_nothing_at(paths, place)))
        return found == [True]

    def _covered(self, path: str) -> bool:
        """Whether a bind of the spec lies over ``path``."""
        places = (bind.split(":")[1] if ":" in bind else bind for bind in self.spec.binds)
        return any(f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(place)}/") for place in places)

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or a directory's contents of the host to ``target``, whose parents are made.

        As ``docker cp``: a directory's contents go *into* ``target``; a file becomes ``target``, or goes into it if
        ``target`` is a directory or ends with ``/``. Symbolic links are copied as links.
        """
        self._uploads += 1
        await _upload(self, source, target, await self.control(), f"u{self._uploads}")

    async def download(self, source: str, target: str, budget: Budget | None = None) -> None:
        """Copies a file, or a directory's contents, out of the sandbox.

        Copies only regular files, directories and symbolic links that stay inside ``target`` (host/unpack.py has the
        rules). Directories need ``tar`` in the image. Existing files and links at ``target`` are replaced.

        Args:
            budget: bytes and files that may be written, counted down. Default: :meth:`download_budget`.

        Raises:
            SetupError: ``source`` does not exist, is larger than ``budget``, or the sandbox's programs sent a stream
                that cannot be unpacked. Part of it may be at ``target`` then.
            SandboxError: the sandbox was lost, or ``target`` cannot be written.
        """

        async def fetch(command: str, on_output: Callable[[bytes], bool]) -> ExecResult:
            return await self.exec(command, output_limit=WORDS_LIMIT, on_output=on_output)

        await _download(fetch, source, target, self.directory, budget or self.download_budget())

    def download_budget(self) -> Budget:
        """Returns what a download may bring to the host: as much as the sandbox may write, and never more than
        :data:`DOWNLOAD_LIMIT` bytes and :data:`DOWNLOAD_FILES` files."""
        allowed = DOWNLOAD_LIMIT if self.spec.disk_mb is None else self.spec.disk_mb * MB
        return Budget(min(allowed, DOWNLOAD_LIMIT), DOWNLOAD_FILES)

    async def snapshot(self, target: str | os.PathLike[str]) -> Snapshot:
        """Copies the writable layer to ``target``, a new directory on the host; processes stand still meanwhile.

        :meth:`ApptainerProvider.start` takes the result. Neither processes nor ``/dev/shm`` are part of it.

        Raises:
            SandboxError: there is something at ``target``, or the copy failed.
        """
        async with self._changing:
            container = self._container()
            init = container.init if container else None
            stopped = await asyncio.to_thread(stop_all, init.pid) if init and init.alive() else []
            try:
                return await self._dir.layer.snapshot(Path(target), self.spec.image)
            finally:
                continue_all(stopped)


async def _upload(sandbox: SandboxFiles, source: str, target: str, control: str, name: str) -> None:
    """Copies a file or a directory's contents into a sandbox; see :meth:`SandboxFiles.upload`.

    Args:
        control: the container's control directory on the host, which the sandbox sees read-only.
        name: entry of it that holds the files until they are copied.

    Raises:
        SandboxError: there is nothing at ``source``, or the sandbox was lost.
        SetupError: the sandbox does not take it.
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
            raise SetupError(f"{source}: upload to {target} failed: {done.stderr.strip()[-500:]}")
    except (OSError, RecursionError) as error:
        raise SandboxError(f"{source}: cannot be copied to be uploaded ({str(error)[:500]})") from error
    finally:
        await asyncio.to_thread(remove_tree, staged, ignore_errors=True)


async def _download(fetch: Fetch, source: str, target: str, scratch: str, budget: Budget) -> None:
    """Copies a file or a directory's contents out of a sandbox; see :meth:`SandboxFiles.download`.

    The sandbox's programs send an untrusted stream. It is written to an unnamed file, and then unpacked. If the stream
    exceeds a limit, the programs are killed.

    Args:
        scratch: directory for that file.
        budget: bytes and files that may be written to the host, counted down.

    Raises:
        SetupError: ``source`` does not exist, or the stream is too large or broken.
        SandboxError: ``target`` cannot be written.
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
                raise RefusedMember("more bytes than are allowed")
            await _in_thread(lambda: _receive(file, done, source, target, budget))
    except RefusedMember as error:
        if str(error).startswith("more "):
            raise SetupError(
                f"{source}: {error}: at most {allowed // 10**6} MB come out of this sandbox (its disk_mb, and never "
                f"more than {DOWNLOAD_LIMIT // 10**6}) in {DOWNLOAD_FILES} files; download less"
            ) from error
        raise SetupError(f"{source}: what the sandbox sent is refused: {error}") from error
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
        except RefusedMember as error:
            raise RefusedMember(f"{error}{said}") from error
    elif kind == b"f\n" and not done.exit_code:
        place = Path(target) / Path(source).name if Path(target).is_dir() else Path(target)
        with TreeWriter(place.parent, budget) as tree:
            tree.file((os.fsencode(place.name),), iter(lambda: file.read(1 << 20), b""))
    elif done.exit_code or kind:
        raise RefusedMember(f"its programs ended with {done.exit_code}{said}")
    else:
        raise SetupError(f"{source}: nothing to download: no such file or directory in the sandbox")


async def _in_thread(work: Callable[[], None]) -> None:
    """Runs ``work``, which ends by itself; one who gives up waiting finds it ended all the same."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise


def _nothing_at(paths: LayerPaths, path: str) -> bool:
    """Returns whether nothing is at the absolute ``path``, or an empty directory that the layer alone has.

    Also ``False`` if a link or a deletion is in the way, or if the image has something there. No process may run in the
    sandbox. No link of the layer is followed.
    """
    parts = PurePosixPath(path).parts[1:]
    return ".." not in parts and _nothing_in_layer(paths, parts) and not leads(paths.image, parts)


def _nothing_in_layer(paths: LayerPaths, parts: tuple[str, ...]) -> bool:
    try:
        place = os.open(paths.upper, _DIRECTORY)
    except OSError:
        return False
    try:
        for part in parts:
            below = os.open(part, _DIRECTORY, dir_fd=place)
            os.close(place)
            place = below
        return not os.listdir(place)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(place)
