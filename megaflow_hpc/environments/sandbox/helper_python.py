"""This process's Python in so few files that any container can run it: for a helper in an image that has nothing.

::

    PREPARED/  python  loader  libraries/…  lib/python3.N/{encodings/…, lib-dynload/_socket…}

The loader of the C library is started by its path, with the directory of the libraries that Python was linked with; so
neither the image's loader nor its C library matters. Ten files and some 10 MB, made once per node; a sandbox gets hard
links to them in its control directory, which is read-only inside.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree

NAME = "python"
"""Name of the interpreter's directory in a control directory."""

_MODULES = ("_socket", "_ctypes", "_struct", "fcntl")
_PURE = ("types.py", "struct.py", "ctypes/__init__.py", "ctypes/_endian.py")
"""What helpers import beyond what is built in; of a module that is, no file is needed."""
_ENCODINGS = ("__init__", "aliases", "ascii", "latin_1", "utf_8")
"""Modules of ``encodings`` without which an interpreter does not start."""


@functools.cache
def _parts() -> tuple[tuple[str, str], ...]:
    """Returns pairs of a path in the prepared directory and a file of this machine.

    Raises:
        OSError: this Python cannot be taken along.
    """
    program = os.path.realpath(sys.executable)
    modules = [spec.origin for name in _MODULES if (spec := importlib.util.find_spec(name)) and spec.has_location]
    parts = [("python", program)]
    for file in (program, *map(str, modules)):
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=False, timeout=20)
        for name, arrow, path in re.findall(r"^\s*(\S+)(?: (=>) (\S+))? \(0x", listed.stdout, re.MULTILINE):
            if arrow:
                parts.append((f"libraries/{name}", os.path.realpath(path)))
            elif name.startswith("/"):
                parts.append(("loader", os.path.realpath(name)))
        if "not found" in listed.stdout:
            raise OSError(f"{file}: a library of it was not found by ldd")
    if "loader" not in dict(parts):
        raise OSError(f"{program}: not linked dynamically; its loader is not known")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in map(str, modules):
        parts.append((f"{sys.platlibdir}/{version}/lib-dynload/{os.path.basename(path)}", path))
    for name in _ENCODINGS:
        path = os.path.join(os.path.dirname(os.__file__), "encodings", f"{name}.py")
        parts.append((f"lib/{version}/encodings/{name}.py", path))
    for name in _PURE:
        parts.append((f"lib/{version}/{name}", os.path.join(os.path.dirname(os.__file__), name)))
    return tuple(dict(parts).items())


def why_not() -> str:
    """Returns why no helper can be run in any image; empty if one can."""
    try:
        _parts()
    except (OSError, subprocess.SubprocessError) as error:
        return f"this Python cannot be brought into a container ({error})"
    return ""


def prepare(scratch: str | os.PathLike[str]) -> Path:
    """Returns the interpreter's directory on this node's scratch; makes it if it is missing.

    Raises:
        SandboxError: it cannot be made.
    """
    try:
        stamp = [(place, path, os.stat(path).st_mtime_ns) for place, path in _parts()]
        home = Path(scratch, "python-" + hashlib.sha256(repr(stamp).encode()).hexdigest()[:12])
        if home.is_dir():
            return home
        partial = Path(tempfile.mkdtemp(prefix="python-new-", dir=scratch))
        for place, path in _parts():
            target = partial / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o555)
        try:
            os.rename(partial, home)
        except OSError:  # another process was first
            remove_tree(partial)
            if not home.is_dir():
                raise
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{scratch}: the Python of helpers in sandboxes cannot be made there ({error})") from error
    return home


def link_into(home: Path, control: Path) -> None:
    """Links the interpreter into a container's control directory. Idempotent."""
    target = control / NAME
    if target.is_dir():
        return
    try:
        shutil.copytree(home, target, copy_function=os.link)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"{target}: cannot be made ({error}); see that scratch is not full") from error


def command(control_inside: str, program: str) -> tuple[Sequence[str], dict[str, str]]:
    """Returns the argv prefix that runs a Python program in the container, whose arguments follow, and its
    environment."""
    home = f"{control_inside}/{NAME}"
    words = [f"{home}/loader", "--library-path", f"{home}/libraries", f"{home}/python", "-s", "-S", "-B", "-c", program]
    return words, {"PYTHONHOME": home, "PYTHONPATH": "", "LD_PRELOAD": ""}
