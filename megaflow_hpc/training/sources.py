"""Finds the source files that a user's function runs: its module, and the user's modules that this one imports.

The files are found by reading import statements, not by importing. So the result does not depend on which modules a
process has imported already. Included are the imports in function bodies, and the packages of each module. Left out are
the standard library, installed packages (``site-packages``, ``dist-packages``) and this package. Modules that are
imported by a computed name (``importlib``) and data files are not found.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OURS = "megaflow_hpc"
"""Name of this package. A run records the package's version, so its modules need no digest."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of directories that hold installed packages."""


def sources(module: str, file: Path) -> dict[str, Path]:
    """Returns the source file of a module, and those of the user's modules that it imports directly or indirectly.

    Args:
        module: the module's name, such as ``package.module``.
        file: its source file, which is included even if it is installed.
    """
    files = {} if module.partition(".")[0] == OURS else {module: file}
    waiting, seen = [*_with_packages(module), *_imports(module, file)], set(files)
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] == OURS:
            continue
        seen.add(name)
        path = _file(_spec(name))
        if path is not None and _is_users(path):
            files[name] = path
            waiting += _imports(name, path)
    return dict(sorted(files.items()))


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yields the modules that a module's source may import, with their packages. Names may be of attributes instead."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # cannot be imported either
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if not base or (node.level and not above):
                continue
            yield from _with_packages(base)
            for alias in node.names:
                yield from _submodules(base) if alias.name == "*" else [f"{base}.{alias.name}"]


def _with_packages(name: str) -> list[str]:
    """Returns the packages that contain a module, and the module."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _submodules(package: str) -> list[str]:
    """Returns the modules of a user's package, any of which ``from package import *`` may import."""
    spec = _spec(package)
    folders = [folder for folder in (spec and spec.submodule_search_locations) or () if _is_users(Path(folder))]
    return [f"{package}.{found.name}" for found in pkgutil.iter_modules(folders)]


def _spec(name: str) -> ModuleSpec | None:
    """Finds a module without importing its packages."""
    package = name.rpartition(".")[0]
    with suppress(Exception):  # a finder, or a module that is loaded without a specification
        if not package:
            return importlib.util.find_spec(name)
        above = _spec(package)
        if above is not None and above.submodule_search_locations is not None:
            return PathFinder.find_spec(name, list(above.submodule_search_locations))
    return None


def _file(spec: ModuleSpec | None) -> Path | None:
    """Returns a module's file, or ``None`` if the module is missing, built in, or a package without ``__init__``."""
    return Path(spec.origin) if spec and spec.has_location and spec.origin and Path(spec.origin).is_file() else None


def _is_users(path: Path) -> bool:
    """Returns whether a file or directory is outside the standard library and installed packages."""
    real = Path(os.path.realpath(path))
    library = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not (INSTALLED & {*path.parts, *real.parts} or any(real.is_relative_to(folder) for folder in library))
