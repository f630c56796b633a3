"""Terminals: the screen of a Textual app, and a program in a real terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pyte
from textual.app import App
from textual.pilot import Pilot

from tests.support.waiting import until_async


def screen(app: App[Any]) -> str:
    """Return the text of the screen."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def shows(pilot: Pilot[Any], text: str) -> str:
    """Wait until a text is on the screen; return the whole screen."""
    await until_async(lambda: text in screen(pilot.app), f"{text!r} on the screen", 60)
    return screen(pilot.app)


class Terminal:
    """Runs a command in a terminal without colours."""

    def __init__(self, columns: int, lines: int, *command: str, cwd: Path | None = None, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        """All output so far."""
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environ}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, cwd=cwd
        )
        os.close(theirs)

    def resize(self, columns: int, lines: int) -> None:
        """Resize the terminal and notify the process."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)
        if hasattr(self, "_process"):
            os.killpg(self._process.pid, 28)  # the kernel sends SIGWINCH only to processes of a controlling terminal

    def write(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    @property
    def text(self) -> str:
        """Return the text of the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a text is on the screen."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} is not on the screen:\n{self.text}"
            self._read(0.1)

    def settle(self, quiet_s: float = 0.3) -> None:
        """Wait until the output pauses."""
        seen = -1
        while seen != len(self.written):
            seen = len(self.written)
            self._read(quiet_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the process; return its exit status."""
        end = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        self._read(0.1)
        os.close(self._ours)
        return self._process.wait(1)

    def hang_up(self, timeout_s: float = 60.0) -> int:
        """Close the terminal without a signal; return the exit status."""
        os.close(self._ours)
        return self._process.wait(timeout_s)

    def _read(self, wait_s: float) -> None:
        while select.select([self._ours], [], [], wait_s)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # no process has the other end open
                return
            self.written += data
            # A query to the terminal, which pyte would print as text.
            self._stream.feed(data.replace(b"\x1b[>q", b""))
            wait_s = 0.0
