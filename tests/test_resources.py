"""Messages point only to existing files, by absolute path, and to existing pages, by address."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import megaflow_hpc
from megaflow_hpc.errors import SiteError
from megaflow_hpc.resources import PROJECT, docs, resource
from tests.support.places import ROOT

PACKAGE = Path(megaflow_hpc.__file__).parent


@functools.cache
def sources() -> dict[Path, list[ast.AST]]:
    """Yield every node of every module of the package."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in PACKAGE.rglob("*.py")}


def test_files_have_absolute_paths_and_pages_addresses() -> None:
    assert resource("sbatch/sandbox_pods.sbatch").read_text().startswith("#!/bin/bash\n")
    assert resource("containers").is_absolute()
    with pytest.raises(SiteError, match="sbatch/none: missing from the package"):
        resource("sbatch/none")
    page = docs("how-to/images.md")
    assert page.startswith("https://")
    assert page.endswith("/docs/how-to/images.md")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"] == PROJECT


def test_every_page_and_file_that_the_package_names_is_there() -> None:
    """Check every call of ``docs("…")`` and ``resource("…")``."""
    missing, found = [], 0
    for path, nodes in sources().items():
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id="docs" | "resource" as kind), args=[ast.Constant(value=str() as name)]):
                    found += 1
                    if not (ROOT / "docs" / name if kind == "docs" else resource(name)).exists():
                        missing.append(f"{path}: {name}")
    assert missing == []
    assert found > 8


def test_version_and_licence_are_the_same_wherever_they_are_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {megaflow_hpc.__version__, project["version"], citation["version"]}
    assert len(versions) == 1
    assert versions.pop() in (ROOT / "CHANGELOG.md").read_text()
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert citation["repository-code"] == PROJECT


def test_no_message_points_into_a_checkout() -> None:
    """A wheel has no ``docs/``. Printed strings name a page by :func:`docs` and a file by :func:`resource`."""
    wrong = []
    for path, nodes in sources().items():
        unprinted = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in unprinted:
                wrong += [f"{path.name}: {name}" for name in re.findall(r"(?<![.\w])docs/[\w/-]+\.md", node.value)]
    assert wrong == []
