"""Selects a Harbor task's test and solution files according to its ``.harborignore`` files.

As in Harbor (0.25), the directories ``tests/`` and ``solution/`` of a task or step, and all their subdirectories, may
contain a ``.harborignore`` file. Its lines use ``.gitignore`` syntax, relative to its directory. The deepest file takes
precedence. Excluded files are not uploaded and need not exist. The ``.harborignore`` files themselves are always
excluded.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.environments.images.dockerfile.context import MAX_PATTERN_CHARACTERS, bounded_ways
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.task_toml import read_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from pathspec import GitIgnoreSpec

    _Rules = tuple[GitIgnoreSpec, Callable[[str], None]]

NAME = ".harborignore"
_HOMES = ("tests", "solution")


class TaskFiles:
    """Selects the files of one task directory according to its ``.harborignore`` files."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._rules: dict[Path, _Rules | None] = {}

    def excludes(self, path: Path) -> bool:
        """Returns whether ``path``, or the target of a symlink at ``path``, is excluded.

        Raises:
            ConfigError: A ``.harborignore`` cannot be read, or matching this path takes too long.
        """
        real = path.resolve()
        return self._left_out(path) or (real.is_relative_to(self.root.resolve()) and self._left_out(real))

    def require(self, path: Path) -> Path:
        """Returns ``path`` after checking that it is not excluded.

        Raises:
            ConfigError: The path is excluded, but the task needs it.
        """
        if self.excludes(path):
            raise ConfigError(f"{path}: needed, but excluded by a {NAME}; add the line '!{path.name}' at its end")
        return path

    def copy(self, source: Path, target: Path) -> None:
        """Copies a directory's files into ``target``, except excluded files. Copies symlinks as symlinks."""

        def left_out(directory: str, names: list[str]) -> list[str]:
            return [name for name in names if self.excludes(Path(directory, name))]

        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=left_out)

    def _left_out(self, path: Path) -> bool:
        """Returns whether ``path`` or one of its parent directories is excluded. Does not follow symlinks."""
        root = self.root if path.is_relative_to(self.root) else self.root.resolve()
        if not path.is_relative_to(root):
            return False
        parts = path.relative_to(root).parts
        depth = 3 if parts[:1] == ("steps",) else 1
        if path.name == NAME:
            return True
        if len(parts) < depth or parts[depth - 1] not in _HOMES:
            return False
        current = root.joinpath(*parts[:depth])
        above: list[Path] = []
        for part in parts[depth:]:
            above.append(current)
            current /= part
            if self._is_excluded(above, current):
                return True
        return False

    def _is_excluded(self, above: list[Path], path: Path) -> bool:
        """Returns whether the ``.harborignore`` files in the parent directories exclude ``path`` itself."""
        for directory in reversed(above):
            rules = self._rules_in(directory)
            if rules is None:
                continue
            spec, check = rules
            name = path.relative_to(directory).as_posix()
            check(name)
            verdict = spec.check_file(f"{name}/" if path.is_dir() else name).include
            if verdict is not None:
                return verdict
        return False

    def _rules_in(self, directory: Path) -> _Rules | None:
        if directory not in self._rules:
            self._rules[directory] = self._read(directory / NAME)
        return self._rules[directory]

    def _read(self, file: Path) -> _Rules | None:
        if not file.is_file():
            return None
        if not file.resolve().is_relative_to(self.root.resolve()):
            raise ConfigError(f"{file}: is a link out of the task, to {file.resolve()}; copy the file into the task")
        from pathspec import GitIgnoreSpec

        # Git treats ``***`` like ``*``. Collapse asterisks, because a regular expression would backtrack over each of
        # them.
        lines = [re.sub(r"\*{3,}", "*", line) for line in read_text(file).splitlines()]
        if sum(map(len, lines)) > MAX_PATTERN_CHARACTERS:
            raise ConfigError(f"{file}: more than {MAX_PATTERN_CHARACTERS} characters; write fewer patterns")
        try:
            return GitIgnoreSpec.from_lines(lines), bounded_ways(lines, str(file))
        except (ValueError, re.error) as error:
            raise ConfigError(f"{file}: {error}; expected lines as in .gitignore") from error
