"""A campaign's own agents: Python modules beside its campaign file, kept with the run as they were when it was planned.

::

    RUN/code/my_agent.py       a module that an agent was found in, or that it imported
    RUN/code/my_agents/…       a package, whole, with the files that are not Python's
    RUN/code/prompts/…         what a module that reads by ``__file__`` names of its directory

Processes of a pod look there first, so an agent that is edited while its campaign runs changes nothing of it, and one
that is removed neither. They look in the campaign file's directory last: for modules of which no text tells the name.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import keyword
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode, make_directory, write_atomic

MAX_FILES, MAX_BYTES = 2000, 64 * 2**20
"""Largest code that is kept with a run."""
DATA_FILES, DATA_BYTES = 200, 16 * 2**20
"""Largest directory or file of a name in its text that is kept too; a link leads to what is larger."""


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
    """Copies modules and packages of ``directory``, by file name, to ``place``, and what their text names of it.

    That is what they import later, and where one reads by ``__file__``, the files and directories that it names.

    Raises:
        ConfigError: They are more than :data:`MAX_FILES` files or :data:`MAX_BYTES`, or cannot be read.
    """
    count = size = 0
    waiting, known, data = sorted(names, reverse=True), set(names), set[str]()
    while waiting:
        for file in _files(directory / waiting.pop()):
            count, size = count + 1, size + _copy(file, directory, place, MAX_BYTES - size)
            if count > MAX_FILES or size > MAX_BYTES:
                raise ConfigError(
                    f"{directory}: what its agents import is more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, "
                    f"found at {file}; keep the agent in a module or a package of its own"
                )
            if file.suffix == ".py":
                imported, named = _named(file.read_bytes(), directory)
                waiting += sorted(imported - known, reverse=True)
                known, data = known | imported, data | named
    done = [Path(name) for name in known]
    for path in map(Path, sorted(data)):
        if place.is_relative_to(directory / path) or any(path.is_relative_to(other) for other in done):
            continue
        done.append(path)
        files = list(itertools.islice(_files(directory / path), DATA_FILES + 1))
        if len(files) <= DATA_FILES and sum(file.stat().st_size for file in files) <= DATA_BYTES:
            for file in files:
                _copy(file, directory, place, DATA_BYTES)
        else:
            _make_parents(path, place)
            (place / path).symlink_to(directory / path)


def _named(text: bytes, directory: Path) -> tuple[set[str], set[str]]:
    """Returns the modules and packages in ``directory`` that a module imports anywhere, and the files that it names."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a template, or of another Python
        return set(), set()
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    tops = {name.partition(".")[0] for name in modules}
    imported = {name for name in tops if (directory / name / "__init__.py").is_file()}
    imported |= {f"{name}.py" for name in tops - imported if (directory / f"{name}.py").is_file()}
    if not any("__file__" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in nodes):
        return imported, set()
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= {name for word in words if "*." in word for name in fnmatch.filter(os.listdir(directory), word)}
    paths = {os.path.normpath(word) for word in words if word and len(word) < 256 and "\0" not in word}
    return imported, {path for path in paths if path[0] not in "./" and os.path.exists(directory / path)}


def _copy(file: Path, directory: Path, place: Path, most: int) -> int:
    """Copies a file of ``directory`` of at most so many bytes to its place; returns them, or one more than that.

    The copy is no more open to others than the file was.
    """
    try:
        with file.open("rb") as source:
            mode, data = os.fstat(source.fileno()).st_mode, source.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); an agent's package holds it") from None
    if len(data) > most:
        return len(data)
    path = file.relative_to(directory)
    _make_parents(path, place)
    kept = file_mode((place / path).parent) if mode & 0o077 else 0o600
    write_atomic(place / path, data, kept | (kept & 0o444) >> 2 if mode & 0o100 else kept)
    return len(data)


def _make_parents(path: Path, place: Path) -> None:
    for folder in reversed(path.parents):
        make_directory(place / folder)


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
