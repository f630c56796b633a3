"""One running container and its commands: the host side of ``runner.sh`` and ``runner.c``.

::

    CONTROL/            0700 on the host, bound read-only at /.megaflow: processes inside cannot change it
      runner.sh  env    the program of PID 1, and the variables that it exports
      runner            the program that starts commands, if it was built for this architecture
      w0 w1 …           FIFOs: one record per command for worker 0, 1, …, or a line of shell
      i17  c17  s17     standard input of command 17, and text too long for a FIFO; removed when the command ends
      o0 e0 o1 e1 …     FIFOs: pairs of output streams, each used by one command at a time

dispatcher.py runs the commands. When the thread that started the container exits, the kernel kills the container
(launcher.py), unless Apptainer is setuid. The runner also kills all processes when the command pipe closes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import shlex
import subprocess
import sys
import time
import tty
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources

from megaflow_hpc.environments.sandbox.commands.command import read_available
from megaflow_hpc.environments.sandbox.commands.dispatcher import KILL_GRACE_S, CommandDispatcher
from megaflow_hpc.environments.sandbox.launcher import START_TIMEOUT_S, Clone, start_apptainer
from megaflow_hpc.environments.sandbox.processes import namespace_init
from megaflow_hpc.environments.sandbox.spec import check_variables, is_without
from megaflow_hpc.errors import LostError, SandboxError
from megaflow_hpc.host.apptainer import explained, last_line
from megaflow_hpc.host.process import Identity, inherited_descriptor_limit

_STDERR_LIMIT = 16384
"""Maximum number of bytes kept of the container's own standard error."""

_ANSWER = re.compile(rb"(\d{1,6}) (?:(\d{1,3})|(up|dead))")
_MAX_ANSWER_BYTES = 256
MAX_STRAY_LINES = 1000
"""Maximum number of unexpected lines from the runner before the container is killed. Any process in the sandbox can
write to the runner's output."""

NO_WORKDIR = "no-workdir"
"""Line that PID 1 writes before "ready" if the sandbox's workdir cannot be created."""

_RUNNER_READY = b"ready program"
"""Line that the compiled runner writes once it is ready. The shell runner writes ``ready``."""

ENDED_FROM_WITHIN = b"gone"
"""Line that PID 1 writes after a command has killed all other processes."""


class Container:
    """One container, from :meth:`start` to :meth:`kill`. It belongs to the event loop that started it."""

    def __init__(self, control: str, on_started: Callable[[Identity], None]) -> None:
        self.control = control
        self.init: Identity | None = None
        """The container's PID 1, as identified on the host. ``None`` until it is known."""
        self._on_started = on_started
        self._process: subprocess.Popen[bytes] | Clone | None = None
        self._stderr_pipe = -1
        self.commands = CommandDispatcher(control, self._spawn, self._why_ended, self._give_up)
        self._answer = b""
        self._stray_lines = 0
        self._stderr = bytearray()
        self._ready: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._killing = False
        self._judgement: asyncio.Task[None] | None = None
        self._breach = ""
        self._from_within = False
        self.lost = ""
        """Reason why the container was killed from outside, such as the end of its job. Empty otherwise."""

    @property
    def alive(self) -> bool:
        """True if any process of the container is running. A command can kill all of them (``kill -9 -1``)."""
        return self._process is not None and not self._ended.is_set()

    # --- life ---------------------------------------------------------------------------------------------------

    def prepare(self, env: Mapping[str, str], as_root: bool, workdir: str | None, settings: str) -> None:
        """Writes the files that PID 1 reads.

        Args:
            workdir: Directory that PID 1 creates.
            settings: Shell lines of the image, which PID 1 sources.
        """
        check_variables(env)
        os.mkdir(self.control, 0o700)
        shell = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath("runner.sh").read_bytes()
        text = environment_text(env, as_root, workdir, settings).encode("utf-8", "surrogateescape")
        files = {"runner.sh": shell, "env": text}
        program = None if is_without("program") else compiled_runner(os.uname().machine)
        if program is not None:
            files["runner"] = program
        for name, content in files.items():
            with open(os.path.join(self.control, name), "xb") as file:
                file.write(content)
                if name == "runner":
                    os.fchmod(file.fileno(), 0o755)

    async def start(
        self,
        argv: Sequence[str],
        *,
        temporary: str,
        prefix: Sequence[str] = (),
        clone: Callable[[int, Callable[[Identity], None]], Awaitable[Clone]] | None = None,
    ) -> None:
        """Runs ``argv``, which must end with the runner's command, and waits until the runner is ready.

        Only two processes exist before ``commands.prepare()``, so limits set on them apply to all later processes.

        Args:
            prefix: Argv prefix that changes the uid, which resets the parent-death signal.
            clone: Starts the runner in place of ``argv``. Receives the descriptor of standard error and a callback for
                the process's identity.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._stderr_pipe, errors = _terminal()
        try:
            if clone is not None:
                self._process = await clone(errors, self._on_started)
                self.init = Identity.of(self._process.pid)
            else:
                pipe = subprocess.PIPE
                self._process = start_apptainer(argv, prefix, temporary, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            os.close(self._stderr_pipe)
            raise SandboxError(f"{argv[0]}: cannot be run ({error})") from error
        except BaseException:
            os.close(self._stderr_pipe)
            raise
        finally:
            os.close(errors)
        assert self._process.stdout
        answers = self._process.stdout.fileno()
        os.set_blocking(answers, False)
        os.set_blocking(self._stderr_pipe, False)
        loop.add_reader(answers, self._read_answers, answers)
        loop.add_reader(self._stderr_pipe, self._read_stderr, self._stderr_pipe)
        try:
            identity = Identity.of(self._process.pid)
            if clone is None and identity is not None:
                self._on_started(identity)
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready
        except TimeoutError:
            await self.kill()
            raise SandboxError(
                f"the container was not ready after {START_TIMEOUT_S:g} s: {self.last_words()}"
            ) from None
        except BaseException:
            await self.kill()
            raise
        if clone is None:
            init = namespace_init(self._process.pid)
            self.init = Identity.of(init) if init else None
        self.commands.init = self.init

    def _why_ended(self) -> str | None:
        return None if self.alive else self.last_words()

    def last_words(self) -> str:
        """Describes why the container failed, from its standard error."""
        text = self._stderr.decode("utf-8", "replace")
        if "/bin/sh" in text and "no such file" in text.lower():
            return f"the image has no /bin/sh, which every command needs ({last_line(text)})"
        return explained(text)

    async def kill(self) -> None:
        """Kills all processes of the container and waits for them to exit. Idempotent."""
        process = self._process
        if process is None or self._killing:
            return
        self._killing = True
        if self.init is None:
            pid = namespace_init(process.pid)
            self.init = Identity.of(pid) if pid else None
        if self.init is not None:
            self.init.kill()
        else:
            process.kill()
        try:
            async with asyncio.timeout(KILL_GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            process.kill()
            self._end()
        await self._reap(process)
        self._release()

    async def _reap(self, process: subprocess.Popen[bytes] | Clone) -> None:
        """Waits until all processes of the container and of Apptainer have exited."""
        deadline = time.monotonic() + KILL_GRACE_S
        pause = 0.0002
        while process.poll() is None or (self._ended.is_set() and self.init is not None and self.init.alive()):
            if time.monotonic() > deadline:
                process.kill()
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    def _end(self) -> None:
        """Handles end-of-file on the status pipe, which means that PID 1 and all other processes have exited."""
        loop = asyncio.get_running_loop()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        loop.remove_reader(process.stdout.fileno())
        self._ended.set()
        while self._read_stderr(self._stderr_pipe):
            pass
        loop.remove_reader(self._stderr_pipe)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxError(f"the container did not start: {self.last_words()}"))
        if self._killing:
            self.commands.fail("the sandbox was stopped or reset while a command ran")
        else:
            self._judgement = loop.create_task(self._judge(process))

    async def _judge(self, process: subprocess.Popen[bytes] | Clone) -> None:
        """Determines why the container ended. PID 1 has reported it if a command killed all other processes."""
        await self._reap(process)
        if self._from_within or self._breach:
            self.commands.everyone_killed(self._breach)
        else:
            self.lost = "the container was killed from outside (its job was killed or preempted, or memory ran out)"
            self.commands.fail(self.lost)

    def mark_breached(self, breach: str) -> None:
        """Records the exceeded limit for which the container is killed, so that running commands return a result."""
        self._breach = breach

    def _give_up(self, reason: str) -> None:
        self.mark_breached(reason)
        if self.init is not None:
            self.init.kill()

    async def check(self) -> None:
        """Raises :class:`LostError` if the container was ended from outside."""
        if self._judgement is not None:
            await self._judgement
        if self.lost:
            raise LostError(self.lost)

    def _release(self) -> None:
        process = self._process
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        os.close(self._stderr_pipe)
        self.commands.close()

    # --- lines from the runner ----------------------------------------------------------------------------------

    def _read_answers(self, descriptor: int) -> None:
        data = read_available(descriptor)
        if data is None:
            return
        if not data:
            self._end()
            return
        if self._stray_lines > MAX_STRAY_LINES:  # the container is being killed
            return
        *lines, self._answer = (self._answer + data).split(b"\n")
        self._stray_lines += len(self._answer) > _MAX_ANSWER_BYTES
        self._answer = self._answer[-_MAX_ANSWER_BYTES:]
        try:
            for line in lines:
                self._stray_lines += not self._take(line)
        except Exception as error:  # a bug in this package: stop here rather than fail on every further line
            print(
                f"{self.control}: a line of the runner cannot be handled, so the container is killed: {error!r:.500}",
                file=sys.stderr,
            )
            self._stray_lines = MAX_STRAY_LINES + 1
        if self._stray_lines > MAX_STRAY_LINES:
            self._give_up("the sandbox filled its control channel")

    def _take(self, line: bytes) -> bool:
        """Handles one line from the runner. Returns whether it was expected."""
        answer = _ANSWER.fullmatch(line)
        if answer:
            worker, status, word = answer.groups()
            if word == b"up":
                return False
            return self.commands.answered(int(worker), None if word else int(status))
        if self._ready is None or self._ready.done():
            self._from_within |= line == ENDED_FROM_WITHIN
            return False
        if line == _RUNNER_READY:
            self.commands.by_program = True
            self._ready.set_result(None)
        elif line == b"ready":
            self._ready.set_result(None)
        elif line == NO_WORKDIR.encode():
            while self._read_stderr(self._stderr_pipe):
                pass
            self._ready.set_exception(SandboxError(f"its workdir cannot be created: {self.last_words()}"))
        return True

    def _read_stderr(self, descriptor: int) -> bool:
        try:
            data = read_available(descriptor)
        except OSError:  # a terminal whose other end has been closed by all processes
            data = b""
        if data:
            self._stderr += data
            del self._stderr[:-_STDERR_LIMIT]
            return True
        if data == b"":
            asyncio.get_running_loop().remove_reader(descriptor)
        return False

    def _spawn(self, number: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b"%d\n" % number)
        except BrokenPipeError:
            pass  # the status pipe reports the end and its cause


@functools.cache
def compiled_runner(machine: str) -> bytes | None:
    """Returns the program built from runner.c for an architecture, or ``None`` if it was not built."""
    file = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath(f"runner-{machine}")
    return file.read_bytes() if file.is_file() else None


def _terminal() -> tuple[int, int]:
    """Opens the container's standard error. Returns its host end and its container end.

    It is a pseudo-terminal, for job control in runner.sh, or a pipe if the node has no free pseudo-terminal.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:  # the node has no free pseudo-terminal
        return os.pipe()
    tty.setraw(theirs)
    return ours, theirs


def environment_text(env: Mapping[str, str], as_root: bool, workdir: str | None = None, settings: str = "") -> str:
    """Returns the shell text that PID 1 sources: the image's ``settings``, exports, and ``mkdir`` of ``workdir``."""
    lines = [settings.rstrip("\n"), "ulimit -c 0"]
    if (descriptors := inherited_descriptor_limit()) is not None:
        lines += [f"ulimit -Sn {descriptors}"]  # only the runner needs a larger limit
    if as_root:
        # Uid 0 is the only uid here, so tar must not try to change file owners.
        lines += ["export HOME=/root USER=root LOGNAME=root TAR_OPTIONS=--no-same-owner"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if workdir:
        quoted = shlex.quote(workdir)
        lines += [f"[ -d {quoted} ] || mkdir -p {quoted} || echo {NO_WORKDIR}"]
    return "\n".join(lines) + "\n"
