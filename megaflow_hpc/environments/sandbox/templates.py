"""Decides which sandboxes are cloned, and manages the template container from which they are cloned.

Apptainer uses about 80 ms of CPU time to start a container. It therefore starts only one container, the template.
Further containers are clones of the template's process. Each has its own overlay and its own user, mount, PID, IPC and
network namespaces.

The template sees the scratch of all sandboxes and uses the host's network. It therefore contains nothing from any
image: its root is an empty tree, and its only program is cloner.py. Images also define environment variables. The
variables of an image are read from its first container, which Apptainer starts under the usual limits. They are read
before any command runs and only on an empty layer, so no rollout can change another rollout's environment.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.launcher import (
    ROOT_MAY,
    START_TIMEOUT_S,
    Clone,
    exec_argv,
    launcher,
    namespace_limits,
    start_apptainer,
)
from megaflow_hpc.environments.sandbox.processes import kernel_version
from megaflow_hpc.environments.sandbox.rootfs.overlay import MOUNT_POINTS, Overlay
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.spec import SandboxSpec, is_without
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR, last_line, unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

_MAX_ENVIRONMENT_BYTES = 32768
"""Maximum size of an environment in bytes, so that a request fits into one message."""

_KERNEL = (5, 9)
"""First Linux version with pidfds, openat2 and close_range."""
_SHM = Path("/dev/shm")
_HOST_SHM = "/host-shm"
"""Where a template sees the host's ``/dev/shm``, which holds the scratch directory on nodes without a disk."""
_CAPABILITIES = dict(zip(ROOT_MAY, (0, 1, 3, 4, 5, 10, 6, 7, 18), strict=True))

_MAX_PENDING_REQUESTS = 32
"""Maximum number of pending requests. Further requests wait, so that the socket never fills up."""

MAX_REQUEST_BYTES = 65536
"""Maximum size of a request in bytes. ``cloner.py`` reads a request in one piece."""

END_S = 10.0
"""Timeout in seconds for a template to exit."""

StartClone = Callable[[int, Callable[[Identity], None]], Awaitable[Clone]]
"""Function that starts a clone.

Its arguments are the descriptor of the clone's standard error, and a callback. The callback receives the clone's first
process before that process runs any program.
"""

_Trees = tuple[str, ...]
"""The directories of an unpacked image, topmost first, which identify the image."""

ImageEnvironment = asyncio.Future[tuple[str, ...] | None]
"""Future for the environment variables of an image, read from its first container. Its result is ``None`` if they
could not be read."""


class Template:
    """A container whose only process waits for clone requests. It belongs to the event loop that started it.

    Args:
        log: File for Apptainer's output.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._number = 0
        self._slots = asyncio.Semaphore(_MAX_PENDING_REQUESTS)
        self._pending: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """True if the template accepts requests."""
        return self._socket is not None and self._ready.done() and not self._ready.exception()

    async def start(
        self,
        argv: Sequence[str],
        *,
        temporary: str,
        prefix: Sequence[str],
        on_started: Callable[[Identity], None],
    ) -> None:
        """Runs ``argv``, which must end with the cloner's command, and waits until the cloner is ready.

        Raises:
            SandboxError: The cloner is not ready in time. The message includes Apptainer's last line.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log, "wb") as log:
            output = log.fileno()
            self._process = start_apptainer(
                argv, prefix, temporary, stdin=theirs.fileno(), stdout=output, stderr=output
            )
        self._socket = ours
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        if identity := Identity.of(self._process.pid):
            on_started(identity)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxError(f"no template was ready after {START_TIMEOUT_S:g} s: {self._last_words()}") from None

    def _last_words(self) -> str:
        with open(self._log, "rb") as log:
            return last_line(log.read(16384).decode("utf-8", "replace"))

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._end()
        elif data == b"ready":
            self._ready.set_result(None)
        else:
            number, _, reason = data.partition(b"\0")
            answer = self._pending.pop(int(number), None)
            if answer is None or answer.done():
                # The caller was cancelled and has closed the pipe that the clone is waiting for, so the clone exits.
                for descriptor in descriptors:
                    os.close(descriptor)
            elif descriptors:
                answer.set_result(descriptors[0])
            else:
                answer.set_exception(SandboxError(f"it cannot be cloned: {reason.decode(errors='replace')}"))

    def _end(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        error = SandboxError(f"its template has ended: {self._last_words()}")
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._pending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()
        self._pending.clear()

    async def clone(self, fields: Sequence[str], errors: int, on_started: Callable[[Identity], None]) -> Clone:
        """Clones a sandbox from the template.

        Args:
            fields: Fields of the request after its number.
            errors: Descriptor for the sandbox's standard error.
            on_started: Called with the first process before it runs any program, so that limits set on it apply to all
                processes.

        Raises:
            SandboxError: The template has ended or does not respond, or a field contains a zero byte.
        """
        if any("\0" in field for field in fields):  # zero bytes separate fields
            raise SandboxError("a field of the clone request contains a zero byte")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        go, our_go = os.pipe()
        to_close = {stdin, stdout, go, our_go, our_stdin, our_stdout}
        pidfd = -1
        try:
            async with self._slots:
                if self._socket is None:
                    raise SandboxError(f"its template has ended: {self._last_words()}")
                self._number += 1
                self._pending[self._number] = answer
                message = os.fsencode("\0".join((str(self._number), *fields)))
                if len(message) > MAX_REQUEST_BYTES:
                    raise SandboxError(
                        f"a clone request of {len(message)} bytes; at most {MAX_REQUEST_BYTES} are supported"
                    )
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        pidfd = await self._send(message, [stdin, stdout, errors, go], answer)
                except TimeoutError:
                    raise SandboxError(f"its template did not answer within {START_TIMEOUT_S:g} s") from None
            with open(f"/proc/self/fdinfo/{pidfd}") as file:
                pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
            if identity := Identity.of(pid):
                on_started(identity)
            os.write(our_go, b"x")
            to_close -= {our_stdin, our_stdout}
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            raise
        finally:
            for descriptor in to_close:
                os.close(descriptor)
        return Clone(pidfd, pid, our_stdin, our_stdout)

    async def _send(self, message: bytes, descriptors: Sequence[int], answer: asyncio.Future[int]) -> int:
        while self._socket is not None:
            try:
                socket.send_fds(self._socket, [message], descriptors)
                break
            except BlockingIOError:  # the template has not read earlier requests
                await asyncio.sleep(0.005)
            except OSError:  # the template has ended, but its end has not been noticed yet
                self._end()
        return await answer

    async def stop(self) -> None:
        """Kills the container and every sandbox cloned from it. Idempotent."""
        self._end()
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)


@dataclass
class _RunningTemplate:
    template: Template
    directory: Path
    starting: asyncio.Task[None]


class Templates:
    """The template container of one provider, and the environment variables of images.

    If the template has ended, the next clone starts a new one.

    Args:
        own: The provider's directory, in which each template gets a directory, like a sandbox.
        visible: Directories that hold layers and unpacked images. A template sees no other directory of the host,
            except all of ``/dev/shm`` if one of them is there.
        scratch: Directory of the interpreter that templates run.
    """

    def __init__(self, own: Path, visible: Sequence[Path], apptainer: str, scratch: Path) -> None:
        self._own = own
        first, *others = (Path(os.path.realpath(directory)) for directory in visible)
        self._visible = [first, *(directory for directory in others if not _below(directory, [first]))]
        self._apptainer = apptainer
        self._scratch = scratch
        self._environments: dict[_Trees, ImageEnvironment] = {}
        self._current: _RunningTemplate | None = None
        self._number = 0
        self._supported: bool | None = None
        self.refused: dict[_Trees, str] = {}
        """Maps an image's trees to the reason why sandboxes over it cannot be cloned. Apptainer starts these
        sandboxes."""

    def expect_environment(self, rootfs: Rootfs, spec: SandboxSpec, mounted: Overlay | None) -> ImageEnvironment | None:
        """Returns a future to pass to :meth:`read_environment` once the first container over an image runs.

        Clones over the image wait for this future. Returns ``None`` if there is no need to read the environment.
        """
        trees = _trees(rootfs)
        if trees in self._environments or not self._can_clone(rootfs, spec, mounted):
            return None
        environment: ImageEnvironment = asyncio.get_running_loop().create_future()
        self._environments[trees] = environment
        return environment

    def read_environment(self, rootfs: Rootfs, environment: ImageEnvironment, init: Identity | None) -> None:
        """Reads the environment that a container started with, before it runs a command.

        Args:
            environment: The future from :meth:`expect_environment`, which receives the result.
            init: The container's first process, or ``None`` if it did not start.
        """
        data = _initial_environment(init) if init is not None else None
        if data is None:
            self._environments.pop(_trees(rootfs), None)
            environment.set_result(None)
        elif len(data) > _MAX_ENVIRONMENT_BYTES:
            self.refused[_trees(rootfs)] = f"its environment has more than {_MAX_ENVIRONMENT_BYTES} bytes"
            environment.set_result(None)
        else:
            environment.set_result(tuple(entry for entry in os.fsdecode(data).split("\0") if "=" in entry[1:]))

    async def find(
        self, rootfs: Rootfs, spec: SandboxSpec, mounted: Overlay | None, control: str, command: Sequence[str]
    ) -> StartClone | None:
        """Returns a function that starts a container as a clone, or ``None`` if Apptainer must start it.

        Args:
            mounted: The overlay that the container would be started on (:meth:`.Rootfs.command_line`).
        """
        expected = self._environments.get(_trees(rootfs))
        if expected is None or not self._can_clone(rootfs, spec, mounted):
            return None
        assert mounted is not None
        if self._supported is None:
            self._supported = await asyncio.to_thread(supported)
        if not self._supported:
            return None
        try:
            template = await self._running()
        except (SandboxError, OSError) as error:
            self.refuse(rootfs, error)
            return None
        environment = await asyncio.shield(expected)
        if environment is None:
            return None
        capabilities = ",".join(str(_CAPABILITIES[name]) for name in ROOT_MAY)
        binds = (f"{control}:{CONTROL_DIR}:ro", *spec.binds)
        limits = " ".join(f"{name}={number}" for name, number in namespace_limits(spec).items())
        fields = (
            spec.network,
            *mounted,
            capabilities,
            limits,
            " ".join(command),
            str(len(binds)),
            *binds,
            *environment,
        )
        return functools.partial(self._clone, template, fields)

    async def _running(self) -> Template:
        """Returns the running template, starting one if necessary."""
        while self._current is not None and self._current.starting.done() and not self._current.template.alive:
            await self.close()
        if self._current is None:
            self._current = self._begin()
        current = self._current
        await asyncio.shield(current.starting)
        return current.template

    async def _clone(
        self, template: Template, fields: Sequence[str], errors: int, on_started: Callable[[Identity], None]
    ) -> Clone:
        try:
            return await template.clone(fields, errors, on_started)
        except SandboxError:
            if template.alive:
                raise
        # The template ended before this process noticed. Use a new one.
        return await (await self._running()).clone(fields, errors, on_started)

    def refuse(self, rootfs: Rootfs, error: Exception) -> None:
        """Records that sandboxes over an image cannot be cloned."""
        self.refused[_trees(rootfs)] = str(error)

    def _can_clone(self, rootfs: Rootfs, spec: SandboxSpec, mounted: Overlay | None) -> bool:
        trees = _trees(rootfs)
        if is_without("clones") or mounted is None or trees in self.refused or rootfs.namespace is not None:
            return False
        if not spec.as_root or spec.nested or spec.fakeroot:
            return False
        return self._sees(trees) and self._sees(bind.source for bind in spec.parsed_binds())

    def _sees(self, sources: Iterable[str]) -> bool:
        return all(_below(Path(os.path.realpath(source)), self._visible) for source in sources)

    def _begin(self) -> _RunningTemplate:
        self._number += 1
        directory = self._own / f"t{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
        template = Template(str(directory / "log"))
        starting = asyncio.ensure_future(self._start(template, directory))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return _RunningTemplate(template, directory, starting)

    async def _start(self, template: Template, directory: Path) -> None:
        await asyncio.to_thread(self._create_files, directory)
        # It runs only cloner.py, which creates user namespaces. Clones with network "host" need the host's network.
        binds = tuple(f"{visible}:{visible}" for visible in self._visible if not _below(visible, [_SHM]))
        if len(binds) < len(self._visible):  # Apptainer mounts an empty /dev/shm; the cloner replaces it
            binds += (f"{_SHM}:{_HOST_SHM}",)
        root = str(directory / "root")
        spec = SandboxSpec(root, network="host", nested=True, processes=None, binds=binds)
        argv = exec_argv(
            self._apptainer,
            spec,
            root,
            overlay=None,
            control=str(directory / "control"),
            command=(*helper_python.INTERPRETER, f"{CONTROL_DIR}/cloner.py"),
        )
        # Needed to map uid 0 in a nested namespace. The clones do not get this capability.
        option = argv.index("--add-caps")
        argv[option + 1] += ",CAP_SETFCAP"
        argv[option:option] = ["--env", f"PYTHONHOME={helper_python.HOME}"]

        def started(identity: Identity) -> None:
            (directory / "owner").write_text(f"{identity}\n")

        temporary = str(directory / "tmp")
        try:
            await template.start(
                argv,
                temporary=temporary,
                prefix=unshare(),  # without namespace limits, because all clones would share them
                on_started=started,
            )
        except BaseException:
            await template.stop()
            raise

    def _create_files(self, directory: Path) -> None:
        interpreter = helper_python.prepare(self._scratch)
        for name in ("", "tmp", "control", "root"):
            os.mkdir(directory / name, 0o700)
        for path in (*MOUNT_POINTS, CONTROL_DIR, _HOST_SHM, *map(str, self._visible)):
            os.makedirs(directory / "root" / path.lstrip("/"), exist_ok=True)
        (directory / "root" / "etc" / "resolv.conf").touch()
        helper_python.link_into(interpreter, directory / "control")
        program = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath("cloner.py").read_bytes()
        (directory / "control" / "cloner.py").write_bytes(program)

    async def close(self) -> None:
        """Stops the template. Idempotent."""
        current, self._current = self._current, None
        if current is not None:
            try:
                await asyncio.wait((current.starting,))
            finally:
                await current.template.stop()
                await asyncio.to_thread(remove_tree, current.directory, ignore_errors=True)


@functools.cache
def supported() -> bool:
    """Returns whether this node's kernel, its user namespaces and this Python support clones."""
    return (
        kernel_version() >= _KERNEL
        and os.uname().machine in ("x86_64", "aarch64")
        and bool(unshare())
        and os.geteuid() != 0
        and launcher(filtered=True).holds_filter()
        and not helper_python.why_not()
    )


def _initial_environment(init: Identity) -> bytes | None:
    """Returns the environment that a process started with, or ``None`` if it has exited. Truncates it above the size
    limit."""
    try:
        with open(f"/proc/{init.pid}/environ", "rb") as file:
            data = file.read(_MAX_ENVIRONMENT_BYTES + 1)
    except OSError:
        return None
    return data if init.alive() else None


def _trees(rootfs: Rootfs) -> _Trees:
    return (*rootfs.layers, rootfs.base)


def _below(path: Path, directories: Sequence[Path]) -> bool:
    return any(path == directory or directory in path.parents for directory in directories)
