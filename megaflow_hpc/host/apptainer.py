"""The Apptainer of this machine: where it is, what it is called with, what it can do.

Every call gets an environment built from nothing. ``APPTAINER_BINDPATH`` and its kin bind host paths in spite of
``--containall --cleanenv``, sites' modules set them, and ``PMI*`` and ``SLURM*`` would let a process in a container
take part in the job; an environment that starts empty has none of them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from megaflow_hpc.errors import SiteError

CONTROL_DIR = "/.megaflow"
"""Where the host's side of a sandbox appears inside, read-only."""

_PASSED = ("LANG", "LC_ALL", "TZ")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_apptainer(environ: Mapping[str, str] | None = None) -> str:
    """Returns the absolute path of Apptainer: ``MEGAFLOW_APPTAINER``, else ``apptainer`` or ``singularity`` on PATH."""
    environ = os.environ if environ is None else environ
    named = environ.get("MEGAFLOW_APPTAINER")
    if named:
        if not os.access(named, os.X_OK):
            raise SiteError(f"MEGAFLOW_APPTAINER={named}: cannot be run; name an apptainer executable or unset it")
        return os.path.abspath(named)
    for name in ("apptainer", "singularity"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return os.path.abspath(found)
    raise SiteError("apptainer: not on PATH; load the site's module, install it, or point MEGAFLOW_APPTAINER at it")


def clean_environment(temporary: str | os.PathLike[str] | None = None, *, proxies: bool = False) -> dict[str, str]:
    """Returns the environment Apptainer itself runs with. ``proxies`` only for builds, which may download."""
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
    """Returns the variables by which the caller's programs find their proxies."""
    return {name: os.environ[name] for name in _PROXIES if name in os.environ}


@functools.cache
def unshare() -> tuple[str, ...]:
    """Returns the argv prefix that runs a command as uid 0 of a user namespace; empty where that does not work."""
    program = shutil.which("unshare")
    words = (program, "--user", "--map-root-user") if program else ()
    return words if words and not _run([*words, "true"]) else ()


@functools.cache
def only_by_root() -> bool:
    """Whether there are no user namespaces for users, so that a setuid Apptainer is the one way to a container.

    Commands run as the caller then, without any capability. (Inside a user namespace a setuid Apptainer does not use
    its rights, so where there are namespaces it is as good as any.)
    """
    return os.geteuid() != 0 and shutil.which("unshare") is not None and not unshare()


def last_line(output: str) -> str:
    """Returns what Apptainer died of: its last ``FATAL`` or ``ERROR`` line without colour and stamp, else the last
    line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    for level in ("FATAL", "ERROR"):
        for line in reversed(lines):
            if line.startswith(level):
                return line.partition(":")[2].strip() or line
    return lines[-1] if lines else "it said nothing"


def version(apptainer: str) -> str:
    """Returns the version, as ``1.4.5``; the whole answer if it is of another form."""
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
