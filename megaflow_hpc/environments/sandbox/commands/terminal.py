"""A shell on a terminal of the sandbox's own, and that terminal joined to the user's.

The shell is a command of the sandbox like any other, under all its limits. A helper, which brings its interpreter
along (:mod:`..helper_python`), opens a pseudo-terminal in there, passes our end out over a Unix socket in the control
directory, makes the other the shell's terminal, and waits for the shell. The user's own terminal is never inside: what
runs there could push characters into its input (TIOCSTI), which the user's shell would read afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import termios
import tty
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.types import ExecResult

OPEN_S = 20.0
END_S = 10.0
"""A shell that has let go of its terminal ends within so long, or is ended."""
PIECE = 1 << 16
"""Bytes that are read at once; so many wait at most for a shell that does not read."""
SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec /bin/sh -i")
_NAME = "terminal"
_TIOCGPTN = 0x80045430

_PROGRAM = """
import _signal, _socket as socket, fcntl, os, sys
out = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
out.connect(sys.argv[1])
ours = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
fcntl.ioctl(ours, 0x40045431, bytes(4))  # TIOCSPTLCK: unlocks the other end
theirs = fcntl.ioctl(ours, 0x5441, os.O_RDWR | os.O_NOCTTY)  # TIOCGPTPEER: opens it, whatever /dev/pts shows
out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ours.to_bytes(4, sys.byteorder))])
out.close()
os.close(ours)
shell = os.fork()
if shell == 0:
    os.setsid()
    fcntl.ioctl(theirs, 0x540E, 0)  # TIOCSCTTY
    for number in (0, 1, 2):
        os.dup2(theirs, number)
    os.close(theirs)
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGQUIT):
        _signal.signal(number, _signal.SIG_DFL)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "LD_PRELOAD")}
    os.execve(sys.argv[2], sys.argv[2:], env)
os.close(theirs)
status = os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1])
os._exit(status if status >= 0 else 128 - status)
"""


class _Exec(Protocol):
    async def __call__(self, command: Sequence[str], /, *, env: Mapping[str, str], output_limit: int) -> ExecResult: ...


class Terminal:
    """Our end of a terminal, and the shell on the other.

    Args:
        descriptor: our end, which :meth:`close` closes.
        shell: ends with the shell.
    """

    def __init__(self, descriptor: int, shell: asyncio.Task[ExecResult]) -> None:
        self.descriptor, self.shell = descriptor, shell
        os.set_blocking(descriptor, False)

    async def relay(self, keyboard: int, screen: int) -> int:
        """Joins it to a user's terminal until the shell ends or ``keyboard`` does; returns the shell's exit status.

        Every key is the shell's, Ctrl-C and Ctrl-D too; the size of ``screen`` is passed on as it changes. The
        terminal is left as it was found.

        Raises:
            SandboxError: the sandbox was lost.
        """
        loop = asyncio.get_running_loop()
        found = termios.tcgetattr(keyboard)
        self.resize(screen)
        loop.add_signal_handler(signal.SIGWINCH, self.resize, screen)
        hung_up = loop.create_future()  # True: by the user
        tty.setraw(keyboard)
        try:
            loop.add_reader(self.descriptor, self._show, screen, hung_up)
            loop.add_reader(keyboard, self._type, keyboard, hung_up)
            await asyncio.wait((self.shell, hung_up), return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done() and not hung_up.result():
                await asyncio.wait((self.shell,), timeout=END_S)
            while not hung_up.done() and self._show(screen, hung_up):  # what the shell said last
                pass
        finally:
            loop.remove_reader(keyboard)
            loop.remove_reader(self.descriptor)
            loop.remove_writer(self.descriptor)
            loop.remove_signal_handler(signal.SIGWINCH)
            with contextlib.suppress(termios.error):  # it is gone itself
                termios.tcsetattr(keyboard, termios.TCSADRAIN, found)
        if not self.shell.done():
            return 128 + signal.SIGHUP
        return self.shell.result().exit_code

    def resize(self, screen: int) -> None:
        """Gives it the size of ``screen``."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, fcntl.ioctl(screen, termios.TIOCGWINSZ, bytes(8)))

    def _show(self, screen: int, hung_up: asyncio.Future[bool]) -> bool:
        """Passes on what the shell prints; ``False`` if there is nothing now."""
        try:
            data = os.read(self.descriptor, PIECE)
        except BlockingIOError:
            return False
        except OSError:  # nobody in there has it open any more
            data = b""
        if data and _write(screen, data):
            return True
        asyncio.get_running_loop().remove_reader(self.descriptor)
        if not hung_up.done():
            hung_up.set_result(bool(data))
        return False

    def _type(self, keyboard: int, hung_up: asyncio.Future[bool]) -> None:
        """Passes on what the user types, as fast as the terminal takes it: there is room where it can be written to."""
        loop = asyncio.get_running_loop()
        try:
            data = os.read(keyboard, PIECE)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(keyboard)
            if not hung_up.done():
                hung_up.set_result(True)
            return
        loop.remove_reader(keyboard)
        loop.add_writer(self.descriptor, self._pass, bytearray(data), keyboard, hung_up)

    def _pass(self, typed: bytearray, keyboard: int, hung_up: asyncio.Future[bool]) -> None:
        try:
            del typed[: os.write(self.descriptor, typed)]
        except BlockingIOError:
            return
        except OSError:  # nobody reads there any more
            typed.clear()
        if not typed:
            loop = asyncio.get_running_loop()
            loop.remove_writer(self.descriptor)
            loop.add_reader(keyboard, self._type, keyboard, hung_up)

    async def close(self) -> None:
        """Ends the shell and gives the terminal back."""
        self.shell.cancel()
        await asyncio.gather(self.shell, return_exceptions=True)
        os.close(self.descriptor)


def _write(screen: int, data: bytes) -> bool:
    """Writes all of it; ``False`` if nobody is there any more."""
    while data:
        try:
            data = data[os.write(screen, data) :]
        except BlockingIOError:  # another program has left it so
            select.select((), (screen,), ())
        except OSError:
            return False
    return True


async def open_terminal(
    run: _Exec, control: str, interpreter: Path, env: Mapping[str, str], command: Sequence[str] = SHELL
) -> Terminal:
    """Starts a shell on a terminal of its own in a sandbox.

    Args:
        run: runs a command of the sandbox.
        control: the container's control directory on the host; it gets the interpreter, and for a moment a socket.
        interpreter: the interpreter (:func:`~megaflow_hpc.environments.sandbox.helper_python.prepare`).
        env: added to the sandbox's environment, as ``TERM``.
        command: the shell; its first word is a path.

    Raises:
        SandboxError: no terminal can be opened in there, or no shell be started.
    """
    await asyncio.to_thread(helper_python.link_into, interpreter, Path(control))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(control, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.bind(f"/proc/self/fd/{directory}/{_NAME}")  # its own path may be longer than a socket's may be
        server.listen(1)
        server.setblocking(False)
        words, own = helper_python.command(CONTROL_DIR, _PROGRAM)
        argv = [*words, f"{CONTROL_DIR}/{_NAME}", *command]
        shell = asyncio.ensure_future(run(argv, env={**env, **own}, output_limit=4096))
        try:
            descriptor = await _received(server, shell)
        except BaseException:
            shell.cancel()
            await asyncio.gather(shell, return_exceptions=True)
            raise
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NAME, dir_fd=directory)
        os.close(directory)
    return Terminal(descriptor, shell)


async def _received(server: socket.socket, shell: asyncio.Task[ExecResult]) -> int:
    """Our end of the terminal, which the helper passes."""
    accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(server))
    try:
        await asyncio.wait((accepting, shell), timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
        if not accepting.done():
            said = shell.result().stderr.strip().splitlines() if shell.done() else []
            raise SandboxError(f"no terminal in the sandbox: {said[-1] if said else 'no answer'}")
        connection, _ = accepting.result()
    finally:
        accepting.cancel()
    with connection:
        connection.settimeout(OPEN_S)
        try:
            _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 1, 4)
        except TimeoutError:
            descriptors = []
    found = [descriptor for descriptor in descriptors if _is_ours(descriptor)]
    for descriptor in descriptors:
        if descriptor not in found[:1]:
            os.close(descriptor)
    if not found:
        await asyncio.wait((shell,), timeout=1.0)
        said = shell.result().stderr.strip().splitlines() if shell.done() else []
        raise SandboxError(f"no terminal in the sandbox: {said[-1] if said else 'none was passed'}")
    os.set_inheritable(found[0], False)
    return found[0]


def _is_ours(descriptor: int) -> bool:
    """Whether this is the controlling end of a pseudo-terminal."""
    try:
        fcntl.ioctl(descriptor, _TIOCGPTN, struct.pack("I", 0))
    except OSError:
        return False
    return True
