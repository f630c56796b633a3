"""Finds this machine's Apptainer, and builds its environment.

The environment is built from scratch, so that it lacks two kinds of variables. ``APPTAINER_BINDPATH`` and similar
variables, which site modules set, bind host paths despite ``--containall --cleanenv``. ``PMI*`` and ``SLURM*`` would
let a process in a container act as part of the job.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from megaflow_hpc.errors import SiteError

CONTROL_DIR = "/.megaflow"
"""Directory inside a sandbox that contains the host's control files. It is read-only."""

_PASSED = ("LANG", "LC_ALL", "TZ")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_apptainer() -> str:
    """Returns the absolute path of Apptainer.

    It is ``MEGAFLOW_APPTAINER`` if set, else ``apptainer`` or ``singularity`` on PATH.

    Raises:
        SiteError: Apptainer is missing or cannot be run.
    """
    named = os.environ.get("MEGAFLOW_APPTAINER")
    if named:
        if not os.access(named, os.X_OK):
            raise SiteError(f"MEGAFLOW_APPTAINER={named}: cannot be run; name an apptainer executable or unset it")
        return os.path.abspath(named)
    for name in ("apptainer", "singularity"):
        path = shutil.which(name)
        if path:
            return os.path.abspath(path)
    raise SiteError("apptainer: not on PATH; load the site's module, install it, or point MEGAFLOW_APPTAINER at it")


def clean_environment(temporary: str | os.PathLike[str] | None = None, *, proxies: bool = False) -> dict[str, str]:
    """Returns the environment in which to run Apptainer. Set ``proxies`` only for builds, which may download files."""
    environment = {
        "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}".lstrip(":"),
        "HOME": os.environ.get("HOME", "/"),
        "TMPDIR": str(temporary or os.environ.get("TMPDIR", "/tmp")),
    }
    environment |= {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment |= proxy_variables() if proxies else {}
    environment.setdefault("LANG", "C.UTF-8")
    return environment


def proxy_variables() -> dict[str, str]:
    """Returns the proxy settings in this process's environment variables."""
    return {name: os.environ[name] for name in _PROXIES if name in os.environ}


@functools.cache
def unshare() -> tuple[str, ...]:
    """Returns the argv prefix that runs a command as uid 0 in a new user namespace. It is empty if namespaces are
    unavailable."""
    program = shutil.which("unshare")
    words = (program, "--user", "--map-root-user") if program else ()
    return words if words and not _run([*words, "true"]) else ()


@functools.cache
def only_by_root() -> bool:
    """Returns whether only root can create user namespaces, so that containers need a setuid Apptainer.

    In that case, commands run as the caller, without any capabilities. If namespaces are available, a setuid Apptainer
    is as safe as an unprivileged one. Inside a user namespace it has no privileges.
    """
    return os.geteuid() != 0 and shutil.which("unshare") is not None and not unshare()


def last_line(output: str) -> str:
    """Extracts the error from Apptainer's output: the last ``FATAL`` or ``ERROR`` line without colour and timestamp,
    the line about an invalid option, or else the last line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    for level in ("FATAL", "ERROR", "Error for command"):
        for line in reversed(lines):
            if line.startswith(level):
                return line.partition(":")[2].strip() or line
    return lines[-1] if lines else "it said nothing"


_SETTINGS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor restricts"),
    ("kernel/unprivileged_userns_clone", "0", "the kernel forbids"),
    ("user/max_user_namespaces", "0", "the kernel forbids"),
)
"""Settings below ``/proc/sys``, each with the value that prevents users from creating user namespaces."""
_NAMESPACE_WORDS = ("namespace", "uid_map", "setgroups", "unshare")
"""Words that a program may print if it cannot create a user namespace."""


def explained(output: str, settings: str = "/proc/sys") -> str:
    """Returns a failed program's error (:func:`last_line`), followed by its cause and remedy if known."""
    line, text = last_line(output), output.lower()
    if "exec format error" in text or "image targets '" in text:
        machine = os.uname().machine
        return (
            f"{line}; a campaign's images are for one architecture, and this node is {machine}; use partitions of the "
            "images' architecture for pods, or plan on a node like this one, with a separate image store"
        )
    if any(word in text for word in _NAMESPACE_WORDS) and (cause := _restriction(text, settings)):
        profile = "Apptainer's AppArmor profile" if "AppArmor" in cause else "user namespaces"
        return f"{line}; {cause}; ask the site for {profile}, or for a setuid Apptainer"
    return line


def _restriction(text: str, settings: str) -> str:
    """Describes the setting that prevents users from creating user namespaces. Returns an empty string if it finds
    none."""
    for name, value, who in _SETTINGS:
        try:
            with open(f"{settings}/{name}", encoding="ascii") as file:
                if file.read().strip() == value:
                    return f"{who} unprivileged user namespaces ({name.replace('/', '.', 1)}={value})"
        except OSError:  # this kernel has no such setting
            continue
    # AppArmor (Ubuntu 24.04) lets the namespace be created, but denies the right to map ids in it.
    return "AppArmor restricts unprivileged user namespaces" if "uid_map: operation not permitted" in text else ""


def version(apptainer: str) -> str:
    """Returns Apptainer's version, such as ``1.4.5``, or its whole output if that cannot be parsed."""
    return re.sub(r"^(apptainer|singularity(-ce)?) version ", "", _run([apptainer, "--version"]))


def _run(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()
