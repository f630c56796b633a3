"""Apptainer's command line for a sandbox's container process."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.apptainer import CONTROL_DIR, only_by_root, unshare

ROOT_MAY = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""Capabilities of uid 0 in a sandbox, valid only in its own namespaces. They are Docker's, so scripts written for
root work."""

_SHARED = {
    "max_inotify_instances": "inotify/max_user_instances",
    "max_inotify_watches": "inotify/max_user_watches",
    "max_fanotify_groups": "fanotify/max_user_groups",
    "max_fanotify_marks": "fanotify/max_user_marks",
}
"""Limit of a user namespace → the user's limit across all namespaces, as a path below ``/proc/sys/fs``."""
_FRACTION = 8
_NESTED = {f"max_{kind}_namespaces": 256 for kind in ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup", "time")}


@functools.cache
def _shared_limits() -> dict[str, int]:
    """Returns the limits of one sandbox: an eighth of the user's, so that no sandbox exhausts them."""
    limits: dict[str, int] = {}
    for name, file in _SHARED.items():
        try:
            with open(f"/proc/sys/fs/{file}") as text:
                limits[name] = max(1, int(text.read()) // _FRACTION)
        except (OSError, ValueError):  # this kernel does not have the limit
            continue
    return limits


def namespace_limits(spec: SandboxSpec) -> Mapping[str, int]:
    """Returns the limits of a sandbox's outermost user namespace, by their name in ``/proc/sys/user``.

    In a new user namespace, a process could mount in-memory file systems that no limit counts, and reach kernel code
    reserved for root. A sandbox therefore gets only the namespaces needed to start it: none for uid 0, and two for
    another uid (its own and Apptainer's). No process in the sandbox can raise a limit.
    """
    if spec.nested:
        return {**_shared_limits(), **_NESTED}
    return {**_shared_limits(), "max_user_namespaces": 0 if spec.as_root else 2}


def set_namespace_limits(spec: SandboxSpec) -> str:
    """Returns shell code that sets :func:`namespace_limits` as root of the outermost user namespace.

    It has no effect if ``/proc/sys`` is read-only.
    """
    lines = "".join(f"echo {number} >/proc/sys/user/{name}; " for name, number in namespace_limits(spec).items())
    return f"{{ {lines}}} 2>/dev/null; "


def namespace_root(spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the argv prefix that starts Apptainer as uid 0 of a user namespace; empty if not applicable.

    ``--fakeroot`` has the same effect but keeps a second Apptainer running, which costs 40 ms and 9 MB per sandbox.
    """
    return _outermost(spec) if spec.as_root else ()


def namespace_user(spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the argv prefix that starts Apptainer as this user in a user namespace inside a limited one."""
    prefix = () if spec.as_root else _outermost(spec)
    return (*prefix, *as_user()) if prefix else ()


def _outermost(spec: SandboxSpec) -> tuple[str, ...]:
    if os.geteuid() == 0 or not unshare():
        return ()
    return (*unshare(), "/bin/sh", "-c", f'{set_namespace_limits(spec)}exec "$@"', "sh")


def as_user() -> tuple[str, ...]:
    """Returns the argv prefix with which root of a user namespace becomes this user again, in a nested namespace."""
    return (unshare()[0], "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}", "--")


def exec_argv(
    apptainer: str, spec: SandboxSpec, rootfs: str, *, overlay: str | None, control: str, command: Sequence[str]
) -> list[str]:
    """Returns the command line of a sandbox's container process.

    ``--no-init`` makes the runner PID 1 of the container, which no process inside can kill. The caller becomes uid 0
    through :func:`namespace_root`, or through ``--fakeroot`` without subordinate ids, so it owns all files. ``/tmp`` is
    part of the overlay: it lasts as long as the sandbox, uses no memory and is not limited to 64 MB.
    """
    argv = [apptainer, "-q", "exec", "--containall", "--cleanenv", "--no-home", "--no-eval", "--no-init", "--no-privs"]
    argv += ["--no-mount", "tmp,bind-paths", "--pwd", "/"]
    if spec.as_root and not only_by_root():
        if spec.fakeroot:
            argv += ["--fakeroot", "--ignore-subuid"]
        elif not namespace_root(spec):
            argv += ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]
        argv += ["--add-caps", ",".join(f"CAP_{name}" for name in ROOT_MAY)]
    elif os.geteuid() == 0:
        argv += ["--userns"]
    if spec.network != "host":
        argv += ["--net", "--network", "none"]
    # If Apptainer mounts no overlay, the root itself is writable: it is already an overlay, or a copy.
    argv += ["--overlay", overlay] if overlay is not None else ["--writable"]
    argv += ["--bind", f"{control}:{CONTROL_DIR}:ro"]
    for bind in spec.binds:
        argv += ["--bind", bind]
    return [*argv, rootfs, *command]
