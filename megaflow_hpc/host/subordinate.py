"""User namespaces that map several uids: uid 0 and the user's ranges in ``/etc/subuid`` and ``/etc/subgid``.

A namespace's id maps must be written from outside, by ``newuidmap`` and ``newgidmap``. A small program enters a
namespace, lets a child that stayed outside write the maps, and then becomes the command.
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import clean_environment, unshare
from megaflow_hpc.host.child import dies_with_parent


@functools.cache
def all_ids() -> tuple[str, ...]:
    """Returns the argv prefix that runs a command as uid 0 of a user namespace with the caller's subordinate ids.

    Without subordinate ids, returns the prefix of :func:`.apptainer.unshare`, which maps only uid 0. The prefix is
    empty if namespaces are unavailable.
    """
    if os.geteuid() == 0 or not unshare() or not shutil.which("newuidmap") or not shutil.which("newgidmap"):
        return unshare()
    uids, gids = _range("/etc/subuid"), _range("/etc/subgid", "-g")
    if not uids or not gids:
        return unshare()
    words = (sys.executable, "-I", "-S", "-c", _PROGRAM, uids, gids)
    tried = subprocess.run([*words, "true"], env=clean_environment(), capture_output=True, check=False)
    return unshare() if tried.returncode else words


@contextmanager
def namespace() -> Iterator[tuple[str, ...]]:
    """Creates a user namespace for the duration of the context. Yields the argv prefix that joins it as uid 0.

    A process that has permanently dropped privileges (``no_new_privs``) can join a namespace with subordinate ids, but
    cannot create one.
    """
    words = all_ids()
    if not words:
        yield ()
        return
    with subprocess.Popen(
        [*words, *dies_with_parent(), "/bin/sh", "-c", "echo && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        cwd="/",
        start_new_session=True,
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        if not holder.stdout.readline():
            raise SiteError("a user namespace cannot be created; see: megaflow-hpc doctor")
        try:
            yield ("nsenter", "--preserve-credentials", "-U", "-t", str(holder.pid), "--")
        finally:
            holder.stdin.close()


def _range(path: str, *options: str) -> str:
    """Returns ``START:COUNT`` of the caller's largest range, or an empty string if the caller has no range."""
    name = pwd.getpwuid(os.getuid()).pw_name
    rows = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.strip().split(":") for line in file]
    except OSError:
        pass
    ranges = [(int(row[2]), int(row[1])) for row in rows if len(row) == 3 and row[0] in (name, str(os.getuid()))]
    program = shutil.which("getsubids")
    if not ranges and program:  # a directory service may provide the ranges
        words = [program, *options, name]
        output = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in output.splitlines()]
        ranges = [(int(row[-1]), int(row[-2])) for row in rows if len(row) == 4]
    if not ranges:
        return ""
    count, start = max(ranges)
    return f"{start}:{count}"


_PROGRAM = """
import ctypes, os, sys
uids, gids, *argv = sys.argv[1:]
waiting, writing = os.pipe()
inside = os.getpid()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(waiting, 1)
    for program, own, ids in (('newuidmap', os.getuid(), uids), ('newgidmap', os.getgid(), gids)):
        words = [program, str(inside), '0', str(own), '1', '1', *ids.split(':')]
        if os.spawnvp(os.P_WAIT, program, words):
            os._exit(1)
    os._exit(0)
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit('unshare: ' + os.strerror(ctypes.get_errno()))
os.close(writing)
if os.waitpid(child, 0)[1]:
    sys.exit('newuidmap: the maps of a user namespace cannot be written')
os.close(waiting)
os.execvp(argv[0], argv)
"""
