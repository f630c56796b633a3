"""The command line of a sandbox's one container process, as Apptainer takes it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.apptainer import CONTROL_DIR, only_by_root, unshare

_ROOT_MAY = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""What uid 0 of a sandbox may, in its own namespaces only: as in Docker, so that scripts written for root run."""


def namespace_root(spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the argv prefix by which Apptainer starts as uid 0 of a user namespace; empty where it is not to.

    ``--fakeroot`` does the same by starting a second Apptainer and keeping the first: 40 ms and 9 MB per sandbox.
    """
    return unshare() if spec.as_root and os.geteuid() != 0 else ()


def exec_argv(
    apptainer: str, spec: SandboxSpec, rootfs: str, *, overlay: str | None, control: str, command: Sequence[str]
) -> list[str]:
    """Returns the command line of a sandbox's one container process.

    ``--no-init`` makes the runner PID 1 of the container, which no process inside can kill. The caller becomes uid 0 by
    :func:`namespace_root`, else by ``--fakeroot`` without subordinate ids: every file stays owned by the caller.
    ``/tmp`` is left to the overlay: it lasts as long as the sandbox, is not held in memory and has no 64 MB limit.
    """
    argv = [apptainer, "-q", "exec", "--containall", "--cleanenv", "--no-home", "--no-eval", "--no-init", "--no-privs"]
    argv += ["--no-mount", "tmp,bind-paths", "--pwd", "/"]
    if spec.as_root and not only_by_root():
        if not namespace_root(spec):
            argv += ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]
        argv += ["--add-caps", ",".join(f"CAP_{name}" for name in _ROOT_MAY)]
    elif os.geteuid() == 0:
        argv += ["--userns"]
    if spec.network != "host":
        argv += ["--net", "--network", "none"]
    # Without an overlay of Apptainer's the root is written to as it is: it is one already.
    argv += ["--overlay", overlay] if overlay is not None else ["--writable"]
    argv += ["--bind", f"{control}:{CONTROL_DIR}:ro"]
    for bind in spec.binds:
        argv += ["--bind", bind]
    return [*argv, rootfs, *command]
