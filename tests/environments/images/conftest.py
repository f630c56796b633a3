"""Fixtures of this room: a registry, small images, and the ``images`` commands on a store of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from tests.support.registries import Front, Registry, front, registry_server
from tests.support.small_images import SmallImages


@pytest.fixture(scope="session")
def registry_program(base_sif: Path) -> Path:
    program = base_sif.parent / "registry"
    if not program.exists():
        pytest.fail(f"{program} does not exist; launchers/registry.sh {program} provides it, as launchers/setup does")
    return program


@pytest.fixture(scope="module")
def registry(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without access control."""
    with registry_server(registry_program, tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def between(registry: Registry) -> Iterator[Front]:
    """A proxy in front of the registry, which records requests and can misbehave."""
    with front(registry.address) as found:
        yield found


@pytest.fixture(scope="session")
def small_images(tmp_path_factory: pytest.TempPathFactory) -> SmallImages:
    """Images of one megabyte."""
    return SmallImages(tmp_path_factory.mktemp("small-images"), 1_000_000)


@pytest.fixture
def verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``images …`` on a store of this test. Returns exit status, stdout and stderr."""
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path))

    def run(*words: str | Path) -> tuple[int, str, str]:
        status = main(["images", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., ImageCache]]:
    """Opens the cache of this test with a budget."""

    def make(budget_mb: float = 1000.0, inodes: int = 1_000_000) -> ImageCache:
        return ImageCache(tmp_path / "cache", find_apptainer(), budget_bytes=int(budget_mb * 1e6), budget_inodes=inodes)

    yield make
    remove_tree(tmp_path / "cache")
