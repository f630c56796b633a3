"""Runs verifiers (https://pypi.org/project/verifiers, 0.4) programs in this package's sandboxes::

    config = MegaflowConfig(image="python.sif")
    async with runtime(config) as box:
        trace = await agent.run(task, runtime=box)

verifiers selects only its own runtimes by the ``type`` of a configuration, and has no registry for others. So start the
runtime yourself, as above, and pass it to the agent.

The workspace is ``workdir``. The sandbox has no network unless ``network`` is ``host``. A harness needs the host's
network to reach verifiers' interception server.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from pydantic import Field
from verifiers.v1.errors import SandboxError as RuntimeLost
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime, register

from megaflow_hpc.environments import ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.integrations.sandboxes import (
    OpenNetwork,
    acquire_provider,
    parse_images,
    release_provider,
    resolve_image,
)
from megaflow_hpc.types import ExecResult

OUTPUT_BYTES = 64 << 20
"""Maximum size of each output stream of a program, and of a file that is read without a limit."""


class MegaflowConfig(BaseRuntimeInfo):
    """Configuration of a sandbox."""

    type: Literal["megaflow_hpc"] = "megaflow_hpc"
    image: str
    """A SIF file, or a name."""
    images: dict[str, str] = Field(default_factory=dict)
    """Maps names to files and addresses. An unmapped name means ``docker://NAME``."""
    workdir: str = "/app"
    network: OpenNetwork = "none"
    cpu: float | None = None
    memory: float | None = None
    """Limit in GB."""
    scratch: str = ""
    """Local directory of the writable layers. Default: ``SLURM_TMPDIR``, ``TMPDIR``, ``/tmp``."""


class MegaflowRuntime(Runtime):
    """A verifiers runtime that is backed by a sandbox."""

    def __init__(self, config: MegaflowConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = config.model_copy()
        self._sandbox: ApptainerSandbox | None = None
        self._background: list[asyncio.Future[ExecResult]] = []

    async def start(self) -> None:
        """Pulls the image if needed, and starts the sandbox."""
        config = self.config
        image = config.image
        if not os.path.exists(image):
            names = parse_images(config.images, "images")
            resolved = await asyncio.to_thread(
                resolve_image, image, None, names, "images", config.network, config.scratch
            )
            image = resolved.file
        spec = SandboxSpec(
            os.path.abspath(image),
            workdir=config.workdir,
            network=config.network,
            cpus=config.cpu,
            memory_mb=int(config.memory * 1000) if config.memory else None,
        )
        self._sandbox = await acquire_provider(self, config.scratch).start(spec)
        self.info.id = self._sandbox.directory

    async def teardown(self) -> None:
        """Stops the sandbox. Without this call, the sandbox ends with this process."""
        sandbox, self._sandbox = self._sandbox, None
        try:
            if sandbox is not None:
                await sandbox.stop()
            await asyncio.gather(*self._background, return_exceptions=True)  # they ended with the sandbox
        finally:
            await release_provider(self, self.config.scratch)

    def _running(self) -> ApptainerSandbox:
        if self._sandbox is None:
            raise RuntimeLost("the runtime is not started, or stopped")
        return self._sandbox

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Runs a program in the workspace."""
        try:
            done = await self._running().exec(argv, env=self.process_env(env), output_limit=OUTPUT_BYTES)
        except SandboxError as error:
            raise RuntimeLost(str(error)) from error
        stdout, stderr = (text.decode(errors="replace") for text in (done.stdout_bytes, done.stderr_bytes))
        return ProgramResult(done.exit_code, stdout, stderr)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Starts a program that runs until the sandbox stops. Its output goes to ``log`` in the workspace."""
        await self.write(log, b"")  # so that the log exists once this returns
        command = f"exec {shlex.join(argv)} >>{shlex.quote(log)} 2>&1"
        running = self._running().exec(command, env=self.process_env(env))
        self._background.append(asyncio.ensure_future(running))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        limit = OUTPUT_BYTES if max_bytes is None else max_bytes
        command = ["/bin/sh", "-c", 'exec head -c "$1" -- "$2"', "sh", str(limit), path]
        try:
            done = await self._running().exec(command, output_limit=limit + 1)
        except SandboxError as error:
            raise RuntimeLost(str(error)) from error
        if done.exit_code:
            raise RuntimeLost(f"read {path!r}: {done.stderr.strip()[-500:]}")
        return done.stdout_bytes

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and creates its directory."""
        script = 'case $1 in */*) mkdir -p -- "${1%/*}/";; esac && exec cat >"$1"'
        try:
            done = await self._running().exec(["/bin/sh", "-c", script, "sh", path], user_input=data)
        except SandboxError as error:
            raise RuntimeLost(str(error)) from error
        if done.exit_code:
            raise RuntimeLost(f"write {path!r}: {done.stderr.strip()[-500:]}")


@asynccontextmanager
async def runtime(config: MegaflowConfig, name: str | None = None) -> AsyncIterator[MegaflowRuntime]:
    """Starts a runtime, and stops it at the end of the block."""
    box = MegaflowRuntime(config, name)
    register(box)
    try:
        await box.start()
        yield box
    finally:
        await box.stop()
