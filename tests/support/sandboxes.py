"""Sandboxes of the real base image by the real Apptainer; the image is unpacked once for the whole room."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.host.files import remove_tree

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


@pytest.fixture(scope="session")
def small_rootfs(rootfs: str, scratch: Path) -> str:
    """A shell and a dozen tools out of the base image: quick to build onto, and as bare as task images get."""
    small = scratch / "small"
    for name in ("etc", "proc", "sys", "dev", "tmp", "usr/bin", "usr/lib", "usr/lib64"):
        (small / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (small / name).symlink_to(f"usr/{name}")
    for tool in ("sh", "cat", "ls", "mkdir", "cp", "rm", "chmod", "dirname", "env", "head"):
        shutil.copy2(Path(rootfs, "usr/bin", tool), small / "usr/bin" / tool)
    for library in ("ld-linux-*", "libc.so.6", "libselinux.so.1", "libpcre2-8.so.0", "libacl.so.1", "libattr.so.1"):
        for path in [*Path(rootfs).glob(f"usr/lib*/{library}"), *Path(rootfs).glob(f"usr/lib/*-linux-gnu/{library}")]:
            target = small / path.relative_to(rootfs)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    return str(small)


@pytest.fixture(scope="session")
def busybox_rootfs(base_sif: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of nothing but a static busybox, its ``sh`` and the other programs it is."""
    program = base_sif.parent / "busybox"
    if not program.exists():
        pytest.fail(f"{program} does not exist; launchers/busybox.sh {program} provides it, as launchers/setup does")
    root = tmp_path_factory.mktemp("busybox")
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "usr/bin", "usr/lib", "opt", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy2(program, root / "bin" / "busybox")
    for name in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "profile").write_text("# nothing\n")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return str(root)


def runs(image: str, scratch: Path) -> Callable[..., Any]:
    """Runs ``use(sandbox)`` in a fresh sandbox of ``image`` and returns what it returns."""

    def run(use: Use, **spec: Any) -> Any:
        async def main() -> Any:
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(image, **spec)) as sandbox:
                    return await use(sandbox)

        return asyncio.run(main())

    return run


def clone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every sandbox that can be a clone be one, and lets no other be started in its place.

    A provider learns an image's environment from the first container over it, which Apptainer starts. So a provider's
    first start of an image is preceded by one more.
    """
    start = ApptainerProvider.start
    learned: set[tuple[ApptainerProvider, str]] = set()

    async def start_clone(provider: ApptainerProvider, spec: SandboxSpec, *more: Any, **named: Any) -> ApptainerSandbox:
        if (provider, spec.image) not in learned:
            learned.add((provider, spec.image))
            await (await start(provider, SandboxSpec(spec.image))).stop()
        sandbox = await start(provider, spec, *more, **named)
        assert not provider._templates.refused
        return sandbox

    monkeypatch.setattr(ApptainerProvider, "start", start_clone)


@pytest.fixture
def in_sandbox(rootfs: str, scratch: Path) -> Callable[..., Any]:
    """See :func:`runs`; of the base image."""
    return runs(rootfs, scratch)


@pytest.fixture(params=["program", "shell"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands are started by the program of runner.c, or by the shells of runner.sh."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "program" if request.param == "shell" else "")
    return str(request.param)


@pytest.fixture(params=["rootfs", "busybox_rootfs"], ids=["debian", "busybox"])
def in_any_sandbox(request: pytest.FixtureRequest, runner: str, scratch: Path) -> Callable[..., Any]:
    """See :func:`runs`; of the base image, and of one that is nothing but busybox; with either runner."""
    return runs(request.getfixturevalue(request.param), scratch)
