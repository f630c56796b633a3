"""A campaign's own agents: Python modules next to its campaign file. Planning copies them into the run.

::

    RUN/code/my_agent.py       a module that defines an agent, or that such a module imports
    RUN/code/my_agents/…       a whole package, including its data files
    RUN/code/prompts/…         files that a module names in string literals and finds through ``__file__``

A pod's processes search this directory first, so editing or removing an agent does not affect a running campaign. They
search the campaign file's directory last, to find modules whose import was not detected in the source.
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
"""Maximum number and total size in bytes of the code files stored with a run."""
DATA_FILES, DATA_BYTES = 200, 16 * 2**20
"""Maximum number of files and total bytes for which a data file or directory is copied. Larger ones are symlinked."""


def look_in(kept: str, beside: str) -> None:
    """Adds ``kept`` to the beginning of this process's module search path, and ``beside`` to its end."""
    if kept and kept not in sys.path:
        sys.path.insert(0, kept)
    if beside and beside not in sys.path:
        sys.path.append(beside)


def imported_from(directory: str) -> list[str]:
    """Returns the names of files and directories in ``directory`` from which this process has imported modules."""
    files: set[str] = set()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or "." in name or name in ("__main__", "megaflow_hpc"):
            continue
        paths = list(spec.submodule_search_locations or ())
        if spec.has_location:
            paths.append(spec.origin)
        for path in paths:
            parent, file = os.path.split(str(path))
            if parent == directory:
                files.add(file)
    return sorted(files)


def keep(names: Iterable[str], directory: Path, target: Path) -> None:
    """Copies modules and packages from ``directory`` to ``target``, along with their dependencies.

    Dependencies are the modules that they import and, if a module uses ``__file__``, the files and directories that its
    string literals name.

    Args:
        names: File names of the modules and packages.

    Raises:
        ConfigError: The code exceeds :data:`MAX_FILES` or :data:`MAX_BYTES`, or cannot be read.
    """
    count = size = 0
    waiting = sorted(names, reverse=True)
    seen = set(names)
    data: set[str] = set()
    while waiting:
        for file in _files(directory / waiting.pop()):
            count += 1
            size += _copy(file, directory, target, MAX_BYTES - size)
            if count > MAX_FILES or size > MAX_BYTES:
                raise ConfigError(
                    f"{directory}: its agents import more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, "
                    f"exceeded at {file}; move the agent to a separate module or package"
                )
            if file.suffix == ".py":
                imported, named = _named(file.read_bytes(), directory)
                waiting += sorted(imported - seen, reverse=True)
                seen |= imported
                data |= named
    _keep_data(data, [Path(name) for name in seen], directory, target)


def _keep_data(data: Iterable[str], kept: list[Path], directory: Path, target: Path) -> None:
    """Copies data files and directories that are not below ``kept``. Large ones are symlinked instead."""
    for path in map(Path, sorted(data)):
        if target.is_relative_to(directory / path) or any(path.is_relative_to(other) for other in kept):
            continue
        kept.append(path)
        files = list(itertools.islice(_files(directory / path), DATA_FILES + 1))
        if len(files) <= DATA_FILES and sum(file.stat().st_size for file in files) <= DATA_BYTES:
            for file in files:
                _copy(file, directory, target, DATA_BYTES)
        else:
            _make_parents(path, target)
            (target / path).symlink_to(directory / path)


def _named(text: bytes, directory: Path) -> tuple[set[str], set[str]]:
    """Returns the modules and packages in ``directory`` that a module imports, and the files there that its string
    literals name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a template, or written for another Python version
        return set(), set()
    modules: set[str] = set()
    words: set[str] = set()
    uses_file = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                modules.add(node.module)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                words.add(node.value)
        elif "__file__" in (getattr(node, "id", ""), getattr(node, "attr", "")):
            uses_file = True
    imported: set[str] = set()
    for name in {module.partition(".")[0] for module in modules}:
        if (directory / name / "__init__.py").is_file():
            imported.add(name)
        elif (directory / f"{name}.py").is_file():
            imported.add(f"{name}.py")
    return imported, _existing(words, directory) if uses_file else set()


def _existing(words: set[str], directory: Path) -> set[str]:
    """Returns the relative paths in ``directory`` that string literals name, either exactly or as a pattern."""
    names = {word for word in words if word and len(word) < 256 and "\0" not in word}
    for word in words:
        if "*." in word:
            names.update(fnmatch.filter(os.listdir(directory), word))
    paths = {os.path.normpath(name) for name in names}
    return {path for path in paths if path[0] not in "./" and os.path.exists(directory / path)}


def _copy(file: Path, directory: Path, target: Path, most: int) -> int:
    """Copies a file of at most ``most`` bytes. Returns its size, or ``most + 1`` if it is larger.

    Never makes the copy readable by more users than the original.
    """
    try:
        with file.open("rb") as source:
            mode, data = os.fstat(source.fileno()).st_mode, source.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); an agent's package contains it") from None
    if len(data) > most:
        return len(data)
    path = file.relative_to(directory)
    _make_parents(path, target)
    kept = file_mode((target / path).parent) if mode & 0o077 else 0o600
    if mode & 0o100:  # a program: every user who may read it may run it
        kept |= (kept & 0o444) >> 2
    write_atomic(target / path, data, kept)
    return len(data)


def _make_parents(path: Path, target: Path) -> None:
    for folder in reversed(path.parents):
        make_directory(target / folder)


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
    """Writes a complete agent to ``NAME.py`` in ``directory``, as a starting point. Returns its path.

    Args:
        name: A Python identifier, from which the class name is derived.

    Raises:
        ConfigError: The name is invalid, or the file exists already.
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
    """Returns the class name that :func:`start` uses for a module, such as ``MyAgent`` for ``my_agent``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
