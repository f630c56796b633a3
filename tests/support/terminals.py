"""Terminals: what a view of Textual's shows, and a program in a real one of a given size."""

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
    """What a person sees."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def shows(pilot: Pilot[Any], text: str) -> str:
    """Waits until a text is on the screen, and returns the whole screen."""
    await until_async(lambda: text in screen(pilot.app), f"{text!r} on the screen", 60)
    return screen(pilot.app)


class Terminal:
    """Runs a command in a terminal without colours."""

    def __init__(self, columns: int, lines: int, *command: str, cwd: Path | None = None, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        """All that came."""
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environ}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, cwd=cwd
        )
        os.close(theirs)

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size; the process is told."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)
        if hasattr(self, "_process"):
            os.killpg(self._process.pid, 28)  # SIGWINCH; the kernel tells only a controlling terminal's

    def write(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._ours, keys.encode())

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until a text is on the screen."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} is not on the screen:\n{self.text}"
            self._read(0.1)

    def settle(self, quiet_s: float = 0.3) -> None:
        """Waits until nothing has come for a moment."""
        seen = -1
        while seen != len(self.written):
            seen = len(self.written)
            self._read(quiet_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Waits for the end of the process and returns its exit status."""
        end = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        self._read(0.1)
        os.close(self._ours)
        return self._process.wait(1)

    def hang_up(self, timeout_s: float = 60.0) -> int:
        """Takes the terminal away without a signal and returns the exit status."""
        os.close(self._ours)
        return self._process.wait(timeout_s)

    def _read(self, wait_s: float) -> None:
        while select.select([self._ours], [], [], wait_s)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # nobody holds the other side
                return
            self.written += data
            # A question to the terminal, which pyte takes for text.
            self._stream.feed(data.replace(b"\x1b[>q", b""))
            wait_s = 0.0
