"""Private directories in shared locations such as ``/tmp``: creation, cleanup, and which users may replace a path."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import directory_locked_if_supported
from megaflow_hpc.host.process import Identity, mapped_files, processes, user_name

SHARED_MEMORY = "/dev/shm"
STALE_S = 60.0
"""Minimum age in seconds of a shared-memory file to remove. A younger file may belong to an MPI world that is still
starting."""
POD_DIRECTORY, BUILD_DIRECTORY = "megaflow-pod", "megaflow-build"
"""Kinds of private directories. Each directory is named ``KIND.HOST.PID-START.RANDOM`` after the process that created
it."""
_LOCK_TIMEOUT_S = 5.0
"""Maximum wait in seconds for the lock on the base directory, which another user may hold."""


def is_private(path: str | os.PathLike[str]) -> bool:
    """Returns whether ``path`` is a directory of this user, not a symlink, and not writable by other users."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def open_to_others(path: Path) -> str:
    """Explains why a file with a secret is not private, and how to fix it. Returns an empty string if only its owner
    may read or write it.

    Raises:
        OSError: The file is missing.
    """
    status = path.stat()
    if status.st_mode & 0o077:
        return f"others may read it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 {path}, and replace the key"
    return ""


_MAX_LINKS = 40
"""Maximum number of symlinks in a path, as in the kernel. A path with more symlinks counts as a loop."""


def who_may_replace(path: str | os.PathLike[str], owner: int | None = None, what: str = "it") -> str:
    """Explains which other user could modify or replace ``path``. Returns an empty string if no other user could.

    Checks every component of the path, including symlinks. Each component must belong to this user, to root or to
    ``owner``, and must not be writable by its group or by other users. A parent directory of ``path`` may be writable
    if it has the sticky bit, because users cannot rename each other's files in it. Missing components are assumed to be
    created by this user.

    Args:
        path: A file or directory.
        owner: Another trusted user, such as the maintainer of a group's image store.
        what: Description of ``path`` for the message.

    Returns:
        A message that names the component, the problem and the remedy.
    """
    # In a user namespace that does not map root, the owner of ``/`` is the real root.
    trusted = {0, os.getuid(), os.stat("/").st_uid} | ({owner} if owner is not None else set())
    waiting = deque(os.path.join(os.getcwd(), path).split("/"))
    here, links = "/", 0
    while True:
        while waiting and waiting[0] in ("", "."):
            waiting.popleft()
        if waiting and waiting[0] == "..":
            waiting.popleft()
            here = os.path.dirname(here)
            continue
        try:
            status = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        kind = "a link, which" if stat.S_ISLNK(status.st_mode) else "it"
        if status.st_uid not in trusted:
            return f"{here}: {kind} belongs to {user_name(status.st_uid)}, who can replace it; use another directory"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                return f"{here}: too many links"
            target = os.readlink(here)
            waiting.extendleft(reversed(target.split("/")))
            here = "/" if target.startswith("/") else os.path.dirname(here)
            continue
        if status.st_mode & 0o022 and not (waiting and status.st_mode & stat.S_ISVTX):
            return _open_to(here, status, "this directory" if waiting else what)
        if not waiting:
            return ""
        here = os.path.join(here, waiting.popleft())


def _open_to(path: str, status: os.stat_result, what: str) -> str:
    """Explains which users may write to a file or directory, and how to change that."""
    open_bits = status.st_mode & 0o022
    who = "its group" if open_bits == 0o020 else "everybody"
    change = {0o020: "g-w", 0o002: "o-w"}.get(open_bits, "o-w,g-w")
    remedy = f"chmod {change} {path}"
    if status.st_uid != os.getuid():
        remedy = f"ask {user_name(status.st_uid)} for {remedy}"
    mode = stat.S_IMODE(status.st_mode)
    return f"{path}: {who} may write to {what}; {remedy}, or use another directory (it has mode {mode:04o})"


def make_parents(path: Path) -> None:
    """Creates missing parent directories of ``path``, writable only by this user, regardless of the umask."""
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o755, exist_ok=True)


def private_directory(path: Path) -> Path:
    """Creates ``path`` with mode 0700. Raises :class:`SiteError` if it is a symlink or belongs to another user."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise SiteError(
            f"{path}: the scratch directory cannot be created ({error.strerror}); set TMPDIR to a local directory "
            "that you own"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SiteError(f"{path}: not a directory that you own; set TMPDIR to a local directory that you own")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def own_directory(base: Path, name: str) -> Path:
    """Returns the private directory ``name`` in ``base``, shared by all processes of this user. Creates it if needed.

    If another user has taken the name, ``name.<random>`` is used. Later calls recognise that directory by its owner.

    Raises:
        SiteError: The directory cannot be created in ``base``.
    """
    plain = base / name
    with suppress(OSError):
        plain.mkdir(mode=0o700)
    if is_private(plain):
        return private_directory(plain)
    try:
        with directory_locked_if_supported(base, timeout_s=_LOCK_TIMEOUT_S):
            others = _others(base, name)
            return private_directory(others[0]) if others else Path(tempfile.mkdtemp(prefix=f"{name}.", dir=base))
    except OSError as error:
        raise SiteError(
            f"{plain}: the scratch directory cannot be created ({error.strerror}); set TMPDIR to a local directory "
            "that you own"
        ) from error


def own_directories(base: Path, name: str) -> list[Path]:
    """Returns all existing directories that :func:`own_directory` has returned for these arguments."""
    plain = base / name
    others = _others(base, name)
    return [plain, *others] if is_private(plain) else others


def _others(base: Path, name: str) -> list[Path]:
    try:
        names = sorted(entry for entry in os.listdir(base) if entry.startswith(f"{name}."))
    except OSError:  # users may create entries in this directory but not list it
        return []
    return [base / entry for entry in names if is_private(base / entry)]


# --- directories and shared memory of killed processes ---------------------------------------------------------------


def process_directory(kind: str = POD_DIRECTORY, base: str | os.PathLike[str] | None = None) -> Path:
    """Creates a private directory for this process under ``base``, by default the directory for temporary files."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{kind}.{os.uname().nodename}.{me}.", dir=base))


def sweep_directories(base: str | os.PathLike[str], kind: str = POD_DIRECTORY) -> int:
    """Removes directories of ``kind`` under ``base`` whose process on this host has ended. Returns the number
    removed."""
    prefix, removed = f"{kind}.{os.uname().nodename}.", 0
    for path in _ours(base, prefix):
        owner = Identity.parse(os.path.basename(path).removeprefix(prefix).rpartition(".")[0])
        if owner and not owner.alive():
            remove_tree(path, ignore_errors=True)
            removed += 1
    return removed


def sweep_shared_memory(prefix: str = "mpich") -> int:
    """Removes shared-memory files of MPI worlds that were killed while starting. Returns the number removed.

    Ranks unlink their files once all ranks have mapped them. A file of this user that no process maps is therefore
    garbage.
    """
    before = time.time() - STALE_S
    stale = [p for p, s in _ours(SHARED_MEMORY, prefix).items() if stat.S_ISREG(s.st_mode) and s.st_mtime < before]
    if not stale:
        return 0
    # Other users' processes cannot be inspected, but they cannot have mapped our files.
    mapped = set().union(*map(mapped_files, processes()))
    removed = 0
    for path in stale:
        with suppress(OSError):
            if path not in mapped:
                os.unlink(path)
                removed += 1
    return removed


def _ours(base: str | os.PathLike[str], prefix: str) -> dict[str, os.stat_result]:
    """Returns this user's entries with ``prefix`` in a world-writable directory, with their status. Does not follow
    symlinks, because any user may have created them."""
    entries: dict[str, os.stat_result] = {}
    try:
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
    except OSError:
        return entries  # the directory is missing or cannot be listed
    for name in names:
        path = os.path.join(base, name)
        with suppress(OSError):  # removed in the meantime
            status = os.lstat(path)
            if status.st_uid == os.getuid():
                entries[path] = status
    return entries
