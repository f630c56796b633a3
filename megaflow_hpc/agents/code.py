"""A campaign's own agents: Python modules beside its campaign file, kept with the run as they were when it was planned.

::

    RUN/code/my_agent.py       a module that an agent was found in, or that it imported
    RUN/code/my_agents/…       a package, whole, with the files that are not Python's

Processes of a pod look there first, so an agent that is edited while its campaign runs changes nothing of it. They look
in the campaign file's directory last: for what an agent imports only while it works.
"""

from __future__ import annotations

import keyword
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_atomic

MAX_FILES, MAX_BYTES = 2000, 64 * 2**20
"""Largest code that is kept with a run."""


def look_in(kept: str, beside: str) -> None:
    """Makes this process import modules from ``kept`` before all others, and from ``beside`` after them."""
    if kept and kept not in sys.path:
        sys.path.insert(0, kept)
    if beside and beside not in sys.path:
        sys.path.append(beside)


def imported_from(directory: str) -> list[str]:
    """Returns the files and directories in ``directory`` that this process has imported modules from, by name."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or "." in name or name in ("__main__", "megaflow_hpc"):
            continue
        places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else ())]
        found |= {os.path.basename(str(p)) for p in places if os.path.dirname(str(p)) == directory}
    return sorted(found)


def keep(names: Iterable[str], directory: Path, place: Path) -> None:
    """Copies modules and packages of ``directory``, by file name, to ``place``.

    Raises:
        ConfigError: They are more than :data:`MAX_FILES` files or :data:`MAX_BYTES`, or cannot be read.
    """
    count = size = 0
    for file in (file for name in names for file in _files(directory / name)):
        try:
            count, size = count + 1, size + file.stat().st_size
            if count > MAX_FILES or size > MAX_BYTES:
                raise ConfigError(
                    f"{directory}: what its agents import is more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, "
                    f"found at {file}; keep the agent in a module or a package of its own"
                )
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}); an agent's package holds it") from None
        target = place / file.relative_to(directory)
        for folder in [*reversed(target.relative_to(place).parents)]:
            make_directory(place / folder)
        write_atomic(target, data)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, inside, files in os.walk(path, followlinks=False):
        inside[:] = sorted(name for name in inside if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)


def start(name: str, directory: Path) -> Path:
    """Writes a whole agent to begin with, ``NAME.py`` in ``directory``; returns its path.

    Args:
        name: a Python identifier; the class is named after it.

    Raises:
        ConfigError: It is no such name, or the file is there already.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r}: expected the name of a Python module, such as my_agent")
    source = (Path(__file__).parent / "example.py").read_text(encoding="utf-8")
    path = directory.absolute() / f"{name}.py"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(path, source.replace("MyAgent", class_name(name)), mode=0o644, exclusive=True)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; choose another name") from None
    return path


def class_name(name: str) -> str:
    """Returns the class that :func:`start` puts into a module of this name: ``MyAgent`` for ``my_agent``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
