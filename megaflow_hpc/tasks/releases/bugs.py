"""Reads the bug file of ``tasks build``, a YAML file that names a buggy and a fixed release of a package for each bug.
``share/recipes/bug-repair/bugs.yaml`` is an example, and docs/how-to/real-bugs.md explains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from megaflow_hpc.config import Section, explain, line_of, read_yaml
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import docs
from megaflow_hpc.tasks.releases.sdists import Release


class Bug(Section):
    """A known defect in a released package."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Id of the task."""
    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the package in the index."""
    buggy: str
    """Version with the defect."""
    fixed: str
    """Version without the defect."""
    kind: str = Field(pattern=r"^[a-z][a-z -]*$")
    """Category of the defect, such as parsing, arithmetic or state."""
    changelog: str = Field(min_length=1)
    """The package's changelog entry for the defect."""
    failing: tuple[str, ...] = Field(min_length=1)
    """Ids of tests in the fixed release that fail on the buggy release."""
    passing: tuple[str, ...] = Field(min_length=1)
    """Ids of tests, or files or directories with tests, that pass on both releases."""
    requires: tuple[str, ...] = ()
    """Packages that the tests import, as pip requirements."""
    issue: str = Field(min_length=1)
    """Bug report shown to the agent. Describes the problem, but not its location or fix."""

    @field_validator("buggy", "fixed", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError("a version must be text; put it in quotes")
        return value

    @model_validator(mode="after")
    def _two_releases(self) -> Bug:
        if self.buggy == self.fixed:
            raise ValueError(
                f"buggy and fixed are the same release {self.buggy}; name the release that fixes the defect"
            )
        return self

    @property
    def releases(self) -> tuple[Release, Release]:
        """The buggy and the fixed release."""
        return Release(self.package, self.buggy), Release(self.package, self.fixed)


class BugFile(Section):
    """A list of bugs, and the image in which their tests run."""

    image: str = Field("megaflow-bugs", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name with which the tasks refer to the image."""
    requires: tuple[str, ...] = ("pytest>=8,<9",)
    """Requirements of all tasks. pytest 9 is excluded because it reports subtests as separate tests."""
    bugs: tuple[Bug, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> BugFile:
        ids = [bug.id for bug in self.bugs]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice:
            raise ValueError(f"bug id {twice!r} is given twice; rename one")
        return self


def read_bugs(path: str | os.PathLike[str]) -> tuple[BugFile, Callable[[str], str]]:
    """Reads a bug file.

    Returns:
        The content, and a function that returns ``file:line`` for a bug's id.

    Raises:
        ConfigError: A value is invalid. The message names file, line, value and remedy.
    """
    value, node = read_yaml(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping with the key bugs; see {docs('how-to/real-bugs.md')}")
    try:
        content = BugFile.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path), node, BugFile)) from None
    return content, _locator(str(path), content, node)


def _locator(path: str, content: BugFile, node: yaml.Node | None) -> Callable[[str], str]:
    ids = [bug.id for bug in content.bugs]
    return lambda name: f"{path}:{line_of(node, ('bugs', ids.index(name)))}"


def select(bugs: Iterable[Bug], only: Sequence[str]) -> list[Bug]:
    """Returns the bugs whose ids are in ``only``, or all bugs if ``only`` is empty."""
    by_id = {bug.id: bug for bug in bugs}
    unknown = [name for name in only if name not in by_id]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: no such bug; expected one of {', '.join(by_id)}")
    return [bug for name, bug in by_id.items() if not only or name in only]
