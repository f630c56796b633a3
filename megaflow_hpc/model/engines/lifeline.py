"""Runs an engine as its parent process. Stops all of the engine's processes on a signal, or when its own parent exits.

``python -m megaflow_hpc.model.engines.lifeline COMMAND…`` starts the command in a new session and waits for it.
SIGTERM, SIGINT, SIGHUP or end-of-file on standard input (the server died) stops it: the lifeline sends SIGTERM to the
session and, after :data:`GRACE_S` seconds, SIGKILL to all remaining processes. These include processes in other
sessions, because the lifeline is a subreaper and inherits orphans. The exit code is the command's, or 128+n for signal
n. The command's standard input is closed first, so that lifelines on other nodes, started by ``srun``, stop too.

A lifeline that gets SIGKILL cannot stop anything. The kernel then kills the command itself (parent-death signal), but
not the command's children: vLLM's EngineCore, for instance, would wait for requests forever. A guardian, forked before
the command, therefore waits until the lifeline has ended. It then kills every process whose environment contains the
lifeline's mark, regardless of session and parent. Processes in containers inherit the mark too, and processes that
rename themselves (as vLLM's do) keep it.

Engines pass tensors through files in ``/dev/shm``, which outlive killed processes and occupy the node's memory. The
lifeline removes all such files that its descendants had mapped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from megaflow_hpc.host.child import adopt_orphans, die_with_parent
from megaflow_hpc.host.process import descendants, environment, kill_each, mapped_files, processes

GRACE_S = 8.0
"""Seconds that an engine gets to release its GPU memory and shared memory."""
SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-")
"""Path prefixes of shared memory and semaphores created by Python's multiprocessing."""
POLL_INTERVAL_S = 5.0
"""Seconds between polls of the files that the processes have mapped."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MARK = "MEGAFLOW_LIFELINE"
"""Environment variable that the engine's processes inherit. Its value is a random string that identifies the
lifeline."""
ROUND_S = 0.05
"""Seconds between rounds of killing. Several rounds are needed, because a process may fork before it is killed."""
QUIET_ROUNDS = 3
"""The guardian exits after this many consecutive rounds without a process to kill."""


def _mapped() -> set[str]:
    """Returns the shared-memory files that descendants currently have mapped."""
    files = set().union(*map(mapped_files, descendants(os.getpid())))
    return {path for path in files if path.startswith(SHARED)}


def _kill_all() -> None:
    """Sends SIGKILL to all descendants. Orphans are reparented to this process and killed in the next round."""
    for _ in range(100):
        kill_each(descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _marking(mark: str) -> dict[str, str]:
    """Returns the environment variables that mark the command's processes.

    ``SPT_NOENV`` keeps setproctitle from overwriting a process's environment in ``/proc``. Apptainer and Singularity
    pass on only variables with their prefix.
    """
    variables = {MARK: mark, "SPT_NOENV": "1"}
    inside = {f"{runtime}ENV_{name}": variables[name] for runtime in ("APPTAINER", "SINGULARITY") for name in variables}
    return variables | inside


def _marked(mark: bytes) -> list[int]:
    return [pid for pid in processes() if pid != os.getpid() and mark in environment(pid)]


def _guard(mark: str) -> None:
    """Forks the guardian, which reads from a pipe. Only this process holds the pipe's write end, so end-of-file means
    that this process has ended."""
    read, write = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(read)
        return
    try:
        os.setsid()
        os.close(write)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # so that readers of the lifeline's output see end-of-file
            os.dup2(null, stream)
        os.read(read, 1)
        quiet = 0
        while quiet < QUIET_ROUNDS:
            found = _marked(f"{MARK}={mark}".encode())
            shared = {path for path in set().union(*map(mapped_files, found)) if path.startswith(SHARED)}
            kill_each(found)
            for path in shared:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            quiet = 0 if found else quiet + 1
            time.sleep(ROUND_S)
    finally:
        os._exit(0)


def main(command: Sequence[str], end_on: Sequence[int] = SIGNALS) -> int:
    """Runs the command until it exits and returns its exit status.

    Args:
        command: A program and its arguments.
        end_on: Signals that stop the command. Other signals in :data:`SIGNALS` are ignored.
    """
    mark = secrets.token_hex(16)
    _guard(mark)
    adopt_orphans()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    ended = False

    def stop(*_: object) -> None:
        nonlocal ended
        ended = True

    for number in SIGNALS:
        signal.signal(number, stop if number in end_on else lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, **_marking(mark)},
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    shared: set[str] = set()
    while not ended and child.poll() is None:
        ready, _, _ = select.select([0, wake_read], [], [], POLL_INTERVAL_S)
        shared |= _mapped()
        if 0 in ready and not os.read(0, 4096):
            ended = True
        if wake_read in ready:
            os.read(wake_read, 4096)
    shared |= _mapped()  # the signal may have come before the first poll
    assert child.stdin is not None
    child.stdin.close()
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    code = child.poll()
    shared |= _mapped()
    _kill_all()
    for path in shared:
        try:
            os.unlink(path)
        except OSError:  # already removed by its owner
            pass
    if code is None:
        code = -signal.SIGKILL
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m megaflow_hpc.model.engines.lifeline COMMAND…")
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
