"""Loads user functions that replace built-in methods. The campaign file names them as ``package.module:function``.

Planning copies the modules next to the campaign file into ``RUN/code``. In ``RUN/training/methods.json`` it records
digests of each function's source file, and of the user's modules that this file imports (:func:`sources`). A trainer
imports the copies. It refuses to start if a digest has changed, because a repeated step must compute the same results.
The functions are part of the user's configuration, so they are trusted and run in the trainer's process. Their results
are checked before use (:func:`numbers`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import pkgutil
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.agents.code import look_in
from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECORD_FILE = "methods.json"
OURS = "megaflow_hpc"
"""This package's name. A run records the package's version, so its modules need no digest."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of directories that contain installed packages."""

Digests = dict[str, dict[str, str]]
"""SHA-256 digests in hexadecimal. The outer key is a function's module. The inner keys are that module and the user's
modules that it imports."""


def methods_of(training: TrainingConfig) -> dict[str, Method]:
    """Returns the user functions that the section ``training`` names, by their key in the campaign file."""
    values: dict[str, Any] = {
        "training.trainer": training.trainer,
        "training.prompts.order": training.prompts.order,
        **{f"training.data.{number}": step.method for number, step in enumerate(training.data)},
    }
    for name, policy in training.policies.items():
        values |= {f"training.policies.{name}.{key}": value for key, value in _of_policy(policy).items()}
    return {key: method for key, method in values.items() if isinstance(method, Method)}


def _of_policy(policy: PolicyTraining) -> dict[str, Any]:
    return {
        "advantage.kind": policy.advantage.kind,
        "score": policy.score,
        "loss.kind": policy.loss.kind,
        "importance": policy.importance,
        **{f"columns.{name}": method for name, method in policy.columns.items()},
        "optimizer.schedule": policy.optimizer.schedule,
    }


def prepare(run: RunDir, training: TrainingConfig, folder: str) -> Digests:
    """Makes a run's functions importable in this process, and checks that their files are unchanged.

    Args:
        run: the run directory.
        training: the section ``training``.
        folder: directory of the campaign file, which is searched last. Empty if unknown.

    Raises:
        ConfigError: a module cannot be found, or its file or a module that it imports has changed.
    """
    if not (methods := methods_of(training)):
        return {}
    look_in(str(run.code) if run.code.is_dir() else "", folder)
    before, now = _recorded(run), digests(methods.values())
    for module, found in now.items():
        recorded = before.get(module, found)
        for name in sorted(recorded.keys() | found.keys()):
            then, today = recorded.get(name, "none"), found.get(name, "none")
            if then != today:
                files = sources(module, source(module))
                where = f"{files[name]}:" if name in files else f"{name}, which {module} imports,"
                raise ConfigError(
                    f"{where} was changed after the training began (SHA-256 {then[:12]} then, {today[:12]} now), and "
                    "repeated steps would differ; restore it, or plan a new run with it"
                )
    return now


def record(run: RunDir, digests: Digests) -> None:
    """Records digests in ``RUN/training/methods.json``. Does not change digests that are already recorded."""
    before = _recorded(run)
    if digests.keys() - before.keys():
        make_directory(run.training)
        write_json(run.training / RECORD_FILE, {**digests, **before})


def _recorded(run: RunDir) -> Digests:
    try:
        recorded: Digests = json.loads(read_regular(run.training / RECORD_FILE))
    except FileNotFoundError:
        return {}
    return recorded


def digests(methods: Iterable[Method]) -> Digests:
    """Returns the digests of the functions' source files. Omits this package's own modules.

    Raises:
        ConfigError: a module cannot be found, or a file cannot be read.
    """
    modules = {method.name.partition(":")[0] for method in methods}
    return {
        module: {name: _digest(path) for name, path in sources(module, source(module)).items()}
        for module in sorted(modules)
        if module.partition(".")[0] != OURS
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def identity(method: Method) -> str:
    """Returns a string that identifies a function: its name, and a hexadecimal SHA-256 digest of its source files. For
    this package's functions, it is only the name."""
    together = (json.dumps(found, sort_keys=True).encode() for found in digests([method]).values())
    return " ".join([method.name, *(hashlib.sha256(text).hexdigest() for text in together)])


def source(module: str) -> Path:
    """Returns the source file of a module. Imports the parent packages, but not the module itself.

    Raises:
        ConfigError: the module cannot be found.
    """
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:
        raise ConfigError(f"{module}: cannot be imported: {error!r}{_at(error)}") from error
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise ConfigError(
            f"{module}: cannot be imported: there is no such module; put {module.partition('.')[0]}.py next to the "
            "campaign file, or its directory on PYTHONPATH"
        )
    return Path(spec.origin)


def resolve(method: Method) -> functools.partial[Any]:
    """Imports a function and binds its ``args``.

    Raises:
        ConfigError: the function cannot be imported, or does not take the arguments.
    """
    module_name, _, attribute = method.name.partition(":")
    source(module_name)
    try:
        module = importlib.import_module(module_name)
    except MegaflowError:
        raise
    except Exception as error:
        raise ConfigError(f"{method}: cannot be imported: {error!r}{_at(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        lack = "is not a function" if hasattr(module, attribute) else "does not exist"
        raise ConfigError(f"{method}: {attribute} {lack} in {module.__file__}; correct the name")
    try:
        inspect.signature(function).bind_partial(**method.args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters) or "none"
        raise ConfigError(f"{method}: args: {error}; it takes {takes}") from None
    return functools.partial(function, **method.args)


def takes(method: Method, parameter: str) -> bool:
    """Returns whether a function has the parameter ``parameter``. Raises the errors of :func:`resolve`."""
    return parameter in inspect.signature(resolve(method).func).parameters


def call(method: Method, *values: Any, **named: Any) -> Any:
    """Calls a user's function with these arguments and its ``args`` from the campaign file.

    Raises:
        ConfigError: the function cannot be imported, or raised an exception.
    """
    function = resolve(method)
    try:
        return function(*values, **named)
    except MegaflowError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{method}: raised {error!r}{_at(error)}; no step was taken") from error


def guarded(method: Method) -> Callable[..., Any]:
    """Wraps a user's function so that it is called through :func:`call` and keeps its name. Out-of-memory errors are
    not converted, because the caller may retry with smaller inputs."""

    def guard(*values: Any) -> Any:
        try:
            return call(method, *values)
        except ConfigError as error:
            if error.__cause__ is not None and out_of_memory(error.__cause__):
                raise error.__cause__ from None
            raise

    return functools.update_wrapper(guard, resolve(method).func)


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that a CPU or GPU ran out of memory. Does not import torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def numbers(
    method: Method, value: Any, shapes: Collection[tuple[int, ...]], what: str, least: float = -math.inf
) -> NDArray[np.float32]:
    """Checks a value that a function returned, and converts it to float32.

    Args:
        method: the function, for error messages.
        value: anything that numpy converts to an array.
        shapes: the allowed shapes.
        what: name of the value for error messages, such as ``the advantage of a/p/0``.
        least: smallest valid number.

    Raises:
        ConfigError: the shape or the dtype is wrong, or a number is not finite in float32 or too small.
    """
    import numpy as np  # imported late, because planning imports this module and must stay fast

    try:
        array = np.asarray(value)
    except Exception as error:
        raise wrong(method, f"{what} is {type(value).__name__} ({error})", "numbers") from None
    if array.dtype.kind not in "iuf":
        raise wrong(method, f"{what} has dtype {array.dtype}", "integers or floating-point numbers")
    if array.shape not in shapes:
        expected = " or ".join(str(shape) if shape else "a single number" for shape in dict.fromkeys(shapes))
        raise wrong(method, f"{what} has shape {array.shape}", expected)
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    if not np.isfinite(converted).all():
        raise wrong(method, f"{what} contains {array[~np.isfinite(converted)][0]}", "finite numbers")
    if (array < least).any():
        raise wrong(method, f"{what} contains {array.min()}", f"numbers of at least {least:g}")
    return converted


def mapping(method: Method, value: Any, keys: Collection[str], what: str) -> Mapping[str, Any]:
    """Checks that a function returned a mapping with exactly these keys."""
    if not isinstance(value, Mapping):
        raise wrong(method, f"returned {type(value).__name__}", f"a mapping from {what} to values")
    lacking, unknown = sorted(keys - value.keys()), sorted(map(str, value.keys() - keys))
    if lacking or unknown:
        problem = f"lacks {what} {lacking[0]!r}" if lacking else f"returned the unknown {what} {unknown[0]!r}"
        raise wrong(method, problem, f"one entry for each of the {len(keys)} passed in")
    return value


def wrong(method: Method, found: str, expected: str) -> ConfigError:
    """Returns the error that reports a user function's invalid result."""
    return ConfigError(f"{method}: {found}, expected {expected}; no step was taken; correct the function")


def _at(error: BaseException) -> str:
    """Returns the file and line of the user's code that raised an error. Returns an empty string if other code raised
    it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    last = frames[-1] if frames else None
    own = last is None or last.filename in (__file__, importlib.__file__, functools.__file__)
    return "" if own or last is None else f" at {last.filename}:{last.lineno}"


# --- source files of a function ---------------------------------------------------------------------------------------


def sources(module: str, file: Path) -> dict[str, Path]:
    """Returns the source files of a module and of the user's modules that it imports directly or indirectly.

    Files are found by parsing import statements, not by importing, so the result does not depend on which modules the
    process has already imported. It includes imports in function bodies, and the packages that contain each module. It
    excludes the standard library, installed packages and this package. Data files, and modules imported under a
    computed name (``importlib``), are not found.

    Args:
        module: the module's name, such as ``package.module``.
        file: the module's source file, which is included even if the module is installed.
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
    """Yields the names of modules, with their packages, that a module's source may import. Some of them may be
    attributes instead."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the file cannot be imported either
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
    """Returns the names of the packages that contain a module, followed by the module's own name."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _submodules(package: str) -> list[str]:
    """Returns the modules in a user's package, because ``from package import *`` may import any of them."""
    spec = _spec(package)
    folders = [folder for folder in (spec and spec.submodule_search_locations) or () if _is_users(Path(folder))]
    return [f"{package}.{found.name}" for found in pkgutil.iter_modules(folders)]


def _spec(name: str) -> ModuleSpec | None:
    """Finds a module without importing its packages."""
    package = name.rpartition(".")[0]
    with suppress(Exception):  # raised by a finder, or for a loaded module without a spec
        if not package:
            return importlib.util.find_spec(name)
        above = _spec(package)
        if above is not None and above.submodule_search_locations is not None:
            return PathFinder.find_spec(name, list(above.submodule_search_locations))
    return None


def _file(spec: ModuleSpec | None) -> Path | None:
    """Returns a module's file. Returns ``None`` for missing and built-in modules, and packages without ``__init__``."""
    return Path(spec.origin) if spec and spec.has_location and spec.origin and Path(spec.origin).is_file() else None


def _is_users(path: Path) -> bool:
    """Returns whether a file or directory is outside the standard library and installed packages."""
    real = Path(os.path.realpath(path))
    library = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not (INSTALLED & {*path.parts, *real.parts} or any(real.is_relative_to(folder) for folder in library))
