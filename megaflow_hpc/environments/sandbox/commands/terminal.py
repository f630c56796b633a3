"""A shell on a pseudo-terminal in a sandbox, relayed to the user's terminal.

The shell is an ordinary command of the sandbox, subject to all its limits. A helper (:mod:`..helper_python`) opens a
pseudo-terminal inside and passes the controlling end to the host. The other end becomes the shell's terminal. The
user's own terminal is never passed in. A process inside could inject input into it (TIOCSTI), which the user's shell
would later read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import tty
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.types import ExecResult

END_S = 10.0
"""Timeout in seconds for a shell to exit after it has closed its terminal."""
READ_BYTES = 1 << 16
"""Maximum bytes per read. At most one read is buffered for a shell that does not consume its input."""
SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec /bin/sh -i")
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


class Terminal:
    """The controlling end of a pseudo-terminal, and the shell on its other end.

    Args:
        descriptor: The controlling end. :meth:`close` closes it.
        shell: The command that runs the shell.
    """

    def __init__(self, descriptor: int, shell: asyncio.Task[ExecResult]) -> None:
        self.descriptor, self.shell = descriptor, shell
        os.set_blocking(descriptor, False)

    async def relay(self, keyboard: int, screen: int) -> int:
        """Relays the user's terminal until the shell ends or ``keyboard`` closes. Returns the shell's exit status.

        The shell receives every key, including Ctrl-C and Ctrl-D, and each change of the size of ``screen``. The
        settings of the user's terminal are restored afterwards.

        Raises:
            SandboxError: The sandbox was lost.
        """
        loop = asyncio.get_running_loop()
        earlier_settings = termios.tcgetattr(keyboard)
        self.resize(screen)
        loop.add_signal_handler(signal.SIGWINCH, self.resize, screen)
        hung_up = loop.create_future()  # True if the user hung up, False if the shell closed its terminal
        tty.setraw(keyboard)
        try:
            loop.add_reader(self.descriptor, self._show, screen, hung_up)
            loop.add_reader(keyboard, self._type, keyboard, hung_up)
            await asyncio.wait((self.shell, hung_up), return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done() and not hung_up.result():
                await asyncio.wait((self.shell,), timeout=END_S)
            while not hung_up.done() and self._show(screen, hung_up):  # the shell's last output
                pass
        finally:
            loop.remove_reader(keyboard)
            loop.remove_reader(self.descriptor)
            loop.remove_writer(self.descriptor)
            loop.remove_signal_handler(signal.SIGWINCH)
            with contextlib.suppress(termios.error):  # the user's terminal is gone
                termios.tcsetattr(keyboard, termios.TCSADRAIN, earlier_settings)
        if not self.shell.done():
            return 128 + signal.SIGHUP
        return self.shell.result().exit_code

    def resize(self, screen: int) -> None:
        """Copies the size of ``screen`` to the pseudo-terminal."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, fcntl.ioctl(screen, termios.TIOCGWINSZ, bytes(8)))

    def _show(self, screen: int, hung_up: asyncio.Future[bool]) -> bool:
        """Copies the shell's output to the screen. Returns ``False`` if there is nothing to read yet."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # no process inside has it open any longer
            data = b""
        if data and _write(screen, data):
            return True
        asyncio.get_running_loop().remove_reader(self.descriptor)
        if not hung_up.done():
            hung_up.set_result(bool(data))
        return False

    def _type(self, keyboard: int, hung_up: asyncio.Future[bool]) -> None:
        """Copies the user's input to the shell. Reads no more until the pseudo-terminal has accepted it."""
        loop = asyncio.get_running_loop()
        try:
            data = os.read(keyboard, READ_BYTES)
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
        except OSError:  # no process inside reads it any longer
            typed.clear()
        if not typed:
            loop = asyncio.get_running_loop()
            loop.remove_writer(self.descriptor)
            loop.add_reader(keyboard, self._type, keyboard, hung_up)

    async def close(self) -> None:
        """Kills the shell and closes the pseudo-terminal."""
        self.shell.cancel()
        await asyncio.gather(self.shell, return_exceptions=True)
        os.close(self.descriptor)


def _write(screen: int, data: bytes) -> bool:
    """Writes all of ``data``. Returns ``False`` if the screen has been closed."""
    while data:
        try:
            data = data[os.write(screen, data) :]
        except BlockingIOError:  # another program has made the screen non-blocking
            select.select((), (screen,), ())
        except OSError:
            return False
    return True


async def open_terminal(run: helper_python.Exec, control: str, interpreter: Path, env: Mapping[str, str]) -> Terminal:
    """Starts a shell on a pseudo-terminal in a sandbox.

    Args:
        run: Runs a command in the sandbox.
        control: The container's control directory on the host.
        interpreter: The prepared interpreter (:func:`~megaflow_hpc.environments.sandbox.helper_python.prepare`).
        env: Variables added to the sandbox's environment, such as ``TERM``.

    Raises:
        SandboxError: No terminal can be opened, or the shell does not start.
    """
    (descriptor,), shell = await helper_python.run_and_receive(
        run, control, interpreter, _PROGRAM, SHELL, is_wanted=_is_terminal, what="terminal", env=env
    )
    return Terminal(descriptor, shell)


def _is_terminal(descriptor: int) -> bool:
    """Returns whether a descriptor is the controlling end of a pseudo-terminal."""
    try:
        fcntl.ioctl(descriptor, _TIOCGPTN, struct.pack("I", 0))
    except OSError:
        return False
    return True
