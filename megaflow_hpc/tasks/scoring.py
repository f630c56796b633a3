"""Loads the user's functions, classes and rubrics that score stored rollouts (``reverify --with``).

==================  ==================================================================================
``score.py``        the function ``score`` in a file; ``score.py:NAME`` names another function or a class
``package.module:NAME``   a function or class in a module
``rubric.yaml``     a rubric that the campaign's judges answer
==================  ==================================================================================

A function is like a task's ``score``, but without a sandbox: it takes any of the parameters in :data:`PARAMETERS`. A
class is instantiated for each rollout, and its method ``score`` is called. If this method takes ``sandbox``, it gets a
sandbox without files. A function whose first parameter is ``rollouts`` is called like a function in
``training.policies.NAME.score``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, UserCodeError
from megaflow_hpc.tasks.judging import Judge, Message, Rubric, rubric_files
from megaflow_hpc.tasks.python_class import code_of, named_rewards, origin
from megaflow_hpc.types import TURN_REWARD, Task

PARAMETERS = ("messages", "roles", "patch", "artifacts", "task", "judge", "trajectory", "reward", "rewards", "sandbox")
"""Parameters that a scorer may have. ``reward`` and ``rewards`` come from the campaign's own verification."""
BATCH = "rollouts"
"""First parameter of a function that scores many rollouts in one call."""
FUNCTION = "score"


@dataclass(frozen=True)
class Scorer:
    """A loaded scorer."""

    name: str
    """Default name of the scorer's rewards."""
    title: str
    """The function or file, as named in messages."""
    target: Any
    digest: str
    """SHA-256 of the scorer's source file and of the rubrics that it has read."""

    @property
    def batch(self) -> bool:
        """True if the scorer scores many rollouts in one call."""
        return not inspect.isclass(self.target) and next(iter(_parameters(self.target)), "") == BATCH

    @property
    def parameters(self) -> frozenset[str]:
        """Those of :data:`PARAMETERS` that the scorer takes."""
        return frozenset(_parameters(_method(self.target))) & {*PARAMETERS, BATCH}

    def method(self) -> Callable[..., Any]:
        """Returns the function to call for one rollout. Raises UserCodeError if the class cannot be instantiated."""
        try:
            return _method(self.target() if inspect.isclass(self.target) else self.target)
        except Exception as error:
            raise UserCodeError(f"{origin(error)}: {self.title} raised {error!r}") from error


def load_scorer(source: str) -> Scorer:
    """Loads a scorer.

    Args:
        source: One of the forms in the module's table. Files are relative to the working directory.

    Raises:
        ConfigError: The scorer cannot be imported, or is invalid.
    """
    if source.endswith((".yaml", ".yml")):
        rubric = Rubric.read(source)

        async def score(messages: Sequence[Message], judge: Judge) -> dict[str, float]:
            return await rubric.score(judge, messages)

        return Scorer(Path(source).stem, source, score, _digest([Path(source)]))
    before, colon, attribute = source.rpartition(":")
    if source.endswith(".py"):
        before, attribute = source, FUNCTION
    elif not colon:
        raise ConfigError(f"--with {source}: expected FILE.py, FILE.py:NAME, package.module:NAME or RUBRIC.yaml")
    module = _module_of_file(Path(before)) if before.endswith(".py") else _imported(before)
    target = getattr(module, attribute, None)
    where = f"--with {source}"
    if target is None:
        remedy = "define it, or name another as FILE.py:NAME"
        raise ConfigError(f"{where}: {module.__file__} has no {attribute}; {remedy}")
    method = _method(target)
    if not callable(method):
        raise ConfigError(
            f"{where}: {attribute} is {type(target).__name__}; expected a function, or a class with score"
        )
    parameters = _parameters(method)
    if parameters[:1] != [BATCH] and (odd := [name for name in parameters if name not in PARAMETERS]):
        raise ConfigError(
            f"{where}: {code_of(method)}: parameter {odd[0]!r} is unknown; expected {', '.join(PARAMETERS)}, or "
            f"{BATCH} as the first one"
        )
    files = [Path(str(module.__file__)), *rubric_files()]
    return Scorer(module.__name__.rpartition(".")[2], source, target, _digest(files))


def scores_of(scorer: Scorer, task: Task, method: Callable[..., Any], value: Any, turns: int) -> dict[str, float]:
    """Checks what a scorer returned for one rollout and converts it to rewards by name.

    Args:
        value: A number, numbers by name, or a sequence with one number per model call.
        turns: Number of the rollout's model calls.

    Raises:
        UserCodeError: The value is invalid, or names a model call that does not exist.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != turns:
            calls = "one number for each of the rollout's model calls"
            raise UserCodeError(
                f"{code_of(method)}: {scorer.title} returned {len(value)} numbers; expected {turns}, {calls}"
            )
        value = {f"{TURN_REWARD}{number}": one for number, one in enumerate(value)}
        if not value:
            raise UserCodeError(f"{code_of(method)}: {scorer.title} returned no reward; expected a number")
    rewards = named_rewards(task, method, value)
    check_turns(rewards, turns)
    return rewards


def check_turns(rewards: Mapping[str, float], turns: int) -> None:
    """Checks that the rewards of turns refer to model calls that the rollout made.

    Raises:
        UserCodeError: A reward refers to a call that does not exist.
    """
    allowed = {f"{TURN_REWARD}{number}" for number in range(turns)}
    for name in rewards:
        if name not in allowed and re.fullmatch(rf"{re.escape(TURN_REWARD)}-?\d+", name):
            raise UserCodeError(
                f"reward {name!r:.60}: the rollout made {turns} model calls; expected "
                + (f"{TURN_REWARD}0 to {TURN_REWARD}{turns - 1}" if turns else "no rewards of turns")
            )


def _method(target: Any) -> Any:
    """Returns the method ``score`` of a class or an object, or the function itself."""
    return getattr(target, FUNCTION, None) if inspect.isclass(target) else getattr(target, FUNCTION, target)


def _parameters(method: Callable[..., Any]) -> list[str]:
    names = list(inspect.signature(method).parameters)
    return names[1:] if names[:1] == ["self"] else names


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"--with {path}: no such file")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not path.stem.isidentifier():
        raise ConfigError(f"--with {path}: expected a name that Python can import, such as score.py; rename it")
    module = _imported(path.stem)
    if not module.__file__ or not path.samefile(module.__file__):
        raise ConfigError(f"--with {path}: a module of this name is already imported from {module.__file__}; rename it")
    return module


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        location = "" if isinstance(error, ModuleNotFoundError) else f" at {origin(error)}"
        raise ConfigError(f"--with: {name} cannot be imported{location}: {error!r}; correct it") from error


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]
