"""The container that sandboxes are cloned from: the host's side of ``cloner.py``."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megaflow_hpc.environments.sandbox.commands.launcher import launcher
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import clean_environment, last_line
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.process import Identity

APPTAINER_ENVIRONMENT = {"GOMAXPROCS": "1", "GOGC": "off"}
"""Turns off threads and garbage collection, which Apptainer does not need in its 50 ms."""

_MAX_PENDING_REQUESTS = 32
"""More requests wait, so that the socket never fills."""

MAX_REQUEST_BYTES = 65536
"""Maximum bytes of a request; ``cloner.py`` reads as many."""

END_S = 10.0
"""Seconds that the template gets to end."""


class Clone:
    """The first process of a cloned sandbox, with the interface of :class:`subprocess.Popen`.

    It is a child of the template and not of this process.
    """

    def __init__(self, pidfd: int, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Returns ``None`` while the process runs."""
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(0):
                return None
            os.close(self._pidfd)
            self._pidfd = -1
        return 0

    def kill(self) -> None:
        """Kills every process of the sandbox."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Template:
    """A container whose only process waits for requests to clone. It belongs to the event loop that started it.

    Args:
        log: file for Apptainer's output.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._number = 0
        self._answer_timeout_s = END_S
        self._slots = asyncio.Semaphore(_MAX_PENDING_REQUESTS)
        self._pending: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """True while it accepts requests."""
        return self._socket is not None and self._ready.done() and not self._ready.exception()

    async def start(
        self,
        argv: Sequence[str],
        *,
        temporary: str,
        timeout_s: float,
        prefix: Sequence[str],
        on_started: Callable[[Identity], None],
    ) -> None:
        """Runs ``argv``, whose last words must be the cloner, until the cloner is ready.

        Raises:
            SandboxError: it is not ready in time; with Apptainer's last line.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log, "wb") as log:
            self._process = launcher(filtered=True).call(
                lambda: subprocess.Popen(
                    [*prefix, *dies_with_parent(), *argv],
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=log,
                    env={**clean_environment(temporary), **APPTAINER_ENVIRONMENT},
                    cwd="/",
                    start_new_session=True,
                )
            )
        self._socket = ours
        self._answer_timeout_s = timeout_s
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        if identity := Identity.of(self._process.pid):
            on_started(identity)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise SandboxError(f"no template was ready after {timeout_s:g} s: {self._last_words()}") from None

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
                # The caller was cancelled. It has closed the pipe that the clone waits for, so the clone ends.
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
        """Starts a sandbox.

        Args:
            fields: fields of the request after its number.
            errors: standard error of the sandbox.
            on_started: called with the first process before it does anything, so limits set then hold for all.

        Raises:
            SandboxError: the template has ended or does not answer, or a field holds a zero byte.
        """
        if any("\0" in field for field in fields):  # a zero byte separates fields
            raise SandboxError("a request whose field holds a zero byte")
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
                    raise SandboxError(f"a request of {len(message)} bytes; its template reads {MAX_REQUEST_BYTES}")
                try:
                    sending = self._send(message, [stdin, stdout, errors, go], answer)
                    pidfd = await asyncio.wait_for(sending, self._answer_timeout_s)
                except TimeoutError:
                    raise SandboxError(f"its template did not answer within {self._answer_timeout_s:g} s") from None
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
            except OSError:  # the template has ended, before its end was read
                self._end()
        return await answer

    async def stop(self) -> None:
        """Ends the container and every sandbox that was cloned from it. Idempotent."""
        self._end()
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
