"""Debian's registry, for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.registries import Front, Registry, front, registry_server


@pytest.fixture(scope="session")
def registry_program(base_sif: Path) -> Path:
    program = base_sif.parent / "registry"
    if not program.exists():
        pytest.fail(f"{program} does not exist; launchers/registry.sh {program} provides it, as launchers/setup does")
    return program


@pytest.fixture(scope="module")
def registry(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that is open to all."""
    with registry_server(registry_program, tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def between(registry: Registry) -> Iterator[Front]:
    """What lies between a test and the registry."""
    with front(registry.address) as found:
        yield found
