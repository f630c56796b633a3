"""Fixtures that start real sandboxes of real images. An image is unpacked once per session."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec, Snapshot
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.host.files import remove_tree

Use = Callable[[ApptainerSandbox], Awaitable[Any]]


class Start:
    """Starts sandboxes in a coroutine test, whose end stops them."""

    def __init__(self, image: str, scratch: Path) -> None:
        self.image = image
        self._scratch = scratch
        self._provider: ApptainerProvider | None = None

    async def __call__(
        self, image: str | Path = "", *, kept: Snapshot | None = None, rootfs: Rootfs | None = None, **spec: Any
    ) -> ApptainerSandbox:
        if self._provider is None:
            self._provider = ApptainerProvider(self._scratch)
        return await self._provider.start(SandboxSpec(str(image or self.image), **spec), kept, rootfs=rootfs)

    async def close(self) -> None:
        if self._provider is not None:
            await self._provider.close()
            self._provider = None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            for argument in arguments.values():
                if isinstance(argument, Start):
                    await argument.close()

    asyncio.run(run())
    return True


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
def slim_rootfs(rootfs: str, scratch: Path) -> str:
    """The base image without locales, Perl and Python packages: half of its size, to be copied or packed whole."""
    slim = scratch / "slim"
    subprocess.run(["cp", "-al", rootfs, slim], check=True)
    for name in (
        "share/locale",
        "share/perl",
        "lib/x86_64-linux-gnu/perl",
        "lib/x86_64-linux-gnu/gconv",
        "lib/python3",
    ):
        remove_tree(slim / "usr" / name)
    return str(slim)


@pytest.fixture(scope="session")
def small_rootfs(rootfs: str, scratch: Path) -> str:
    """An image with a shell and a dozen tools of the base image, which is quick to build onto."""
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
    """An image that has only a static busybox, with links for its programs."""
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
    """Returns a function that runs ``use(sandbox)`` in a fresh sandbox of ``image`` and returns its result."""

    def run(use: Use, **spec: Any) -> Any:
        async def main() -> Any:
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(image, **spec)) as sandbox:
                    return await use(sandbox)

        return asyncio.run(main())

    return run


def host_pid(sandbox: ApptainerSandbox) -> int | None:
    """Returns the process from which all of a sandbox descend: Apptainer itself, or PID 1 of a clone."""
    container = sandbox._dir.container
    return container._process.pid if container and container._process else None


def clone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every possible sandbox a clone, and fails if Apptainer had to start one instead.

    A provider reads an image's environment from the first container over it, which Apptainer starts. So one more
    sandbox is started before a provider's first start of an image.
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


@pytest.fixture(params=["apptainer", "clone"])
def started_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How containers start: by Apptainer, as clones, or (indirect parameter "copy") by Apptainer over copies."""
    if request.param == "clone":
        clone_at_once(monkeypatch)
    else:
        without = {"apptainer": "clones", "copy": "clones,overlay"}
        monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", without[request.param])
    return str(request.param)


@pytest.fixture
def start(rootfs: str, scratch: Path) -> Start:
    return Start(rootfs, scratch)


@pytest.fixture(params=["program", "shell"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The program that starts commands: the compiled runner.c, or the shells of runner.sh."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "program" if request.param == "shell" else "")
    return str(request.param)


@pytest.fixture(params=["rootfs", "busybox_rootfs"], ids=["debian", "busybox"])
def start_any(request: pytest.FixtureRequest, runner: str, scratch: Path) -> Start:
    """Starts sandboxes of the base image or of one that is only busybox, with either runner."""
    return Start(request.getfixturevalue(request.param), scratch)
