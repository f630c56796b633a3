"""The parent of an engine's processes, which stops them all on a signal or when its own parent exits.

``python -m megaflow_hpc.model.engines.lifeline COMMAND…`` starts the command in a new session and waits for it.
End-of-file on standard input (the server died), SIGTERM, SIGINT or SIGHUP stop it. The lifeline then sends SIGTERM to
the session. After :data:`GRACE_S` seconds, it sends SIGKILL to all remaining processes. These include processes in
other sessions, because the lifeline is a subreaper and inherits orphans. The exit code is the command's, or 128+n for
signal n. The command's standard input is closed first, so that lifelines on other nodes, started by ``srun``, stop too.

Engines pass tensors through files in ``/dev/shm``, which outlive killed processes and occupy the node's memory. The
lifeline removes the files that any of its processes had mapped.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from megaflow_hpc.host.child import adopt_orphans, die_with_parent
from megaflow_hpc.host.process import descendants, kill_each, mapped_files

GRACE_S = 8.0
"""Seconds that an engine gets to release its GPU memory and shared memory."""
SHARED = ("/dev/shm/psm_", "/dev/shm/sem.mp-")
"""Path prefixes of shared memory and semaphores created by Python's multiprocessing."""
POLL_INTERVAL_S = 5.0
"""Seconds between polls of the files that the processes have mapped."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


def main(command: Sequence[str], end_on: Sequence[int] = SIGNALS) -> int:
    """Runs the command until it exits and returns its exit status.

    Args:
        command: A program and its arguments.
        end_on: Signals that end the command. Other signals in :data:`SIGNALS` are ignored.
    """
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
