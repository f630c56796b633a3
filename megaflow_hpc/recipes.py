"""Recipes: complete campaigns to start from, with their tasks, agents and expected results.

Each folder in ``share/recipes`` is a recipe. ``recipe.toml`` describes it, ``campaign.yaml`` is the campaign,
``rehearsal.yaml`` runs a few tasks in seconds without a model, and ``README.md`` explains both. ``megaflow-hpc init
--recipe NAME`` copies all files except ``recipe.toml``.
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import is_installed, resource

DESCRIPTION = "recipe.toml"
_FOLDER = "share/recipes"


class RecipePackage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python package that a recipe needs in addition to megaflow-hpc."""

    name: str
    version: str
    licence: str
    module: str
    """Name under which Python imports the package."""


class RecipeNeeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements of a recipe."""

    image: str
    """Container image of the tasks, or ``none``."""
    gpu: str
    fetch: str = ""
    """Command that downloads or builds the image in the recipe's directory. ``{containers}`` is replaced by the folder
    of definition files. Empty if ``run`` fetches the image itself."""
    packages: tuple[RecipePackage, ...] = ()


class ExpectedFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published result."""

    figure: str
    source: str
    """Publication, with its URL."""


class MeasuredFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result of running the recipe."""

    figure: str
    on: str
    """Model and hardware."""
    took: str
    date: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recipe, as ``recipe.toml`` describes it."""

    title: str
    summary: str
    needs: RecipeNeeds
    expected: tuple[ExpectedFigure, ...]
    rehearsal: dict[str, float]
    """Expected mean reward in ``rehearsal.yaml``, by policy or by pattern of rollout ids. Patterns contain a ``/``."""
    measured: tuple[MeasuredFigure, ...] = ()
    make: str = ""
    """Command that creates the tasks. Empty if none is needed."""
    after: tuple[str, ...] = ()
    """Commands that process the newest run."""
    shares: tuple[str, ...] = ()
    """Files of other recipes that this recipe uses, such as ``reasoning/make.py``."""
    name: str = ""
    """Name of the folder."""

    @property
    def folder(self) -> Path:
        return resource(_FOLDER) / self.name

    @property
    def files(self) -> dict[str, Path]:
        """Maps the name of each file to copy, relative to the user's directory, to its source."""
        own = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
        files = {Path(name).name: resource(_FOLDER) / name for name in self.shares}
        return files | {str(path.relative_to(self.folder)): path for path in own if path.name != DESCRIPTION}

    @property
    def missing(self) -> list[RecipePackage]:
        """Required packages that this interpreter lacks."""
        return [package for package in self.needs.packages if not is_installed(package.module)]

    @property
    def commands(self) -> list[str]:
        """Commands to run in the recipe's directory, in this order."""
        run = ["megaflow-hpc run rehearsal.yaml --launcher local", "megaflow-hpc run campaign.yaml"]
        install = f"pip install {' '.join(f'{p.name}=={p.version}' for p in self.missing)}" if self.missing else ""
        return [command for command in (install, self.fetch, self.make, *run, *self.after) if command]

    @property
    def fetch(self) -> str:
        """Command that fetches the image, or an empty string."""
        return self.needs.fetch.format(containers=shlex.quote(str(resource("containers"))))

    def to_builtins(self) -> dict[str, object]:
        """Returns the recipe as JSON-compatible values, including its files, commands and missing packages."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        missing = [package.name for package in self.missing]
        return {**fields, "files": list(self.files), "missing": missing, "commands": self.commands}


def recipe_names() -> list[str]:
    """Returns the names of all recipes, sorted."""
    return sorted(path.parent.name for path in resource(_FOLDER).glob(f"*/{DESCRIPTION}"))


def find_recipe(name: str) -> Recipe:
    """Reads a recipe.

    Raises:
        ConfigError: There is no such recipe.
    """
    if name not in recipe_names():
        raise ConfigError(f"{name}: no such recipe; the recipes are: {', '.join(recipe_names())}")
    path = resource(_FOLDER) / name / DESCRIPTION
    try:
        return msgspec.convert({**tomllib.loads(path.read_text()), "name": name}, Recipe)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}; correct the recipe, or reinstall megaflow-hpc") from None
