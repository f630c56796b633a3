"""Sandboxes of the real base image by the real Apptainer; the image is unpacked once for the whole room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.files import remove_tree

Use = Callable[[ApptainerSandbox], Awaitable[Any]]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("scratch")
    yield path
    remove_tree(path)


@pytest.fixture(scope="session")
def rootfs(base_sif: Path, scratch: Path) -> str:
    """The unpacked base image."""

    async def stage() -> str:
        async with ApptainerProvider(scratch) as provider:
            return await provider.stage(str(base_sif))

    return asyncio.run(stage())


@pytest.fixture
def in_sandbox(rootfs: str, scratch: Path) -> Callable[..., Any]:
    """Runs ``use(sandbox)`` in a fresh sandbox and returns what it returns."""

    def run(use: Use, **spec: Any) -> Any:
        async def main() -> Any:
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(rootfs, **spec)) as sandbox:
                    return await use(sandbox)

        return asyncio.run(main())

    return run
