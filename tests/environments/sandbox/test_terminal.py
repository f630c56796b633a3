"""A shell on a terminal inside, relayed to a terminal outside."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox.commands import terminal
from megaflow_hpc.errors import SandboxError

ASK_S = 30.0


class Person:
    """Types and reads at a terminal of this host. A thread reads, because the shell's output is written blockingly."""

    def __init__(self) -> None:
        self.keys, self.screen = pty.openpty()
        self.seen = b""
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self.keys, 65536):
                with self._lock:
                    self.seen += data

    def leaves(self) -> None:
        os.close(self.screen)
        self._reader.join(ASK_S)
        os.close(self.keys)

    async def reads(self, words: str) -> str:
        """Waits until ``words`` are on the screen. Returns and forgets all output until then."""
        end = asyncio.get_running_loop().time() + ASK_S
        while words.encode() not in self.seen:
            assert asyncio.get_running_loop().time() < end, self.seen[-2000:].decode(errors="replace")
            await asyncio.sleep(0.01)
        with self._lock:
            found, _, self.seen = self.seen.partition(words.encode())
        return found.decode(errors="replace")

    def types(self, words: bytes) -> None:
        os.write(self.keys, words)

    def resizes(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def at_terminal(rootfs: str, scratch: Path) -> Callable[..., Any]:
    """Runs ``use(person, shell)`` with a shell in a sandbox. Returns the shell's exit status."""

    def run(use: Callable[..., Any], image: str = rootfs, **spec: Any) -> int:
        async def main() -> int:
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(image, **spec)) as sandbox:
                    person = Person()
                    person.resizes(33, 111)
                    before = termios.tcgetattr(person.screen)
                    joined = await provider.terminal(sandbox, {"TERM": "dumb"})
                    try:
                        relay = asyncio.ensure_future(joined.relay(person.screen, person.screen))
                        await person.reads("$ " if spec.get("user") else "# ")
                        await use(person, joined)
                        status = await asyncio.wait_for(relay, ASK_S)
                        assert termios.tcgetattr(person.screen) == before
                        return status
                    finally:
                        await joined.close()
                        person.leaves()

        return asyncio.run(main())

    return run


@pytest.mark.parametrize(("image", "user"), [("rootfs", None), ("busybox_rootfs", "someone")])
def test_a_shell_has_a_terminal_job_control_and_its_own_exit_status(
    at_terminal: Callable[..., Any], request: pytest.FixtureRequest, image: str, user: str | None
) -> None:
    async def use(person: Person, joined: terminal.Terminal) -> None:
        person.types(b"stty size; tty; pwd; echo is${A}here $PYTHONHOME.\r")
        said = await person.reads("isonehere .")
        assert "33 111" in said
        assert "/dev/pts/" in said
        assert "/w" in said
        person.resizes(20, 55)
        joined.resize(person.screen)
        person.types(b"stty size; echo got''it\r")
        assert "20 55" in await person.reads("gotit")
        person.types(b"sleep 600; echo no\r")
        await person.reads("echo no")
        await asyncio.sleep(0.3)
        person.types(b"\x03")
        person.types(b"echo status $?\r")
        await person.reads("status 130")
        person.types(b"yes | head -c 3000000; echo; echo en''d\r")
        assert len(await person.reads("end")) >= 3_000_000
        person.types(b"(exit 7)\r")
        person.types(b"\x04")

    status = at_terminal(use, request.getfixturevalue(image), workdir="/w", env={"A": "one"}, user=user)
    assert status == 7


async def test_a_sandbox_without_a_shell_or_a_terminal_says_so(
    at_terminal: Callable[..., Any], rootfs: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs)) as sandbox:
            for program, why in (
                ("import sys; sys.exit('no /dev/ptmx here')", "no terminal in the sandbox: no /dev/ptmx here"),
                (
                    "import _socket as s, sys; o = s.socket(s.AF_UNIX); o.connect(sys.argv[1]); "
                    "o.sendmsg([b'x'], [(s.SOL_SOCKET, s.SCM_RIGHTS, (1).to_bytes(4, sys.byteorder))])",
                    "no terminal in the sandbox: no answer",
                ),
            ):
                monkeypatch.setattr(terminal, "_PROGRAM", program)
                with pytest.raises(SandboxError, match=why):
                    await provider.terminal(sandbox, {})
            assert not Path(await sandbox.control(), "helper").exists()
