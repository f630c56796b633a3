"""Runs Harbor (https://pypi.org/project/harbor, 0.25) trials in this package's sandboxes::

    harbor run -p TASK -a oracle --env megaflow_hpc.integrations.harbor:ApptainerEnvironment --ek images=base=base.sif

Harbor keeps its own scheduling, agents and verifier. Each trial's environment is one sandbox. All trials of a process
share an :class:`~megaflow_hpc.environments.ApptainerProvider`. Files are copied through the sandbox. Host directories
are mounted only if the user requests a mount from Harbor. Both packages must be installed in Harbor's Python (3.12 or
later).

Keyword arguments (``--ek KEY=VALUE``, or ``environment.kwargs`` of a job file):

``images``
    A mapping, or ``NAME=TARGET`` pairs separated by commas, like ``environment.images`` of a campaign. Unmapped names
    mean ``docker://NAME``.
``scratch``
    A local directory for writable layers.
``network``
    The network for ``network_mode = "public"`` and for building Dockerfiles: ``host`` (default) or ``none``.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from megaflow_hpc.environments import ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import ConfigError, MegaflowError, SandboxError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.integrations.sandboxes import (
    OpenNetwork,
    ResolvedImage,
    acquire_provider,
    parse_images,
    release_provider,
    resolve_image,
)

IMAGES = "environment kwarg images"
COMPOSE = "docker-compose.yaml"
"""The only file name that Harbor recognises as a compose file. Files with similar names are treated as data."""


class ApptainerEnvironment(BaseEnvironment):
    """The sandbox of one trial. The module docstring lists the keyword arguments."""

    def __init__(
        self,
        *arguments: Any,
        images: str | Mapping[str, str] | None = None,
        scratch: str | None = None,
        network: str = "host",
        **keywords: Any,
    ) -> None:
        self._images = parse_images(images, IMAGES)
        self._scratch = os.path.abspath(scratch) if scratch else ""
        if network not in ("host", "none"):
            raise ConfigError(f"environment kwarg network {network!r}: expected host or none")
        self._public: OpenNetwork = "host" if network == "host" else "none"
        self._sandbox: ApptainerSandbox | None = None
        self._as: str | None = None
        super().__init__(*arguments, **keywords)

    # --- Harbor's checks before the start -------------------------------------------------------------------------

    @staticmethod
    def type() -> str:
        return "megaflow-apptainer"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(
            cpu_limit=True, cpu_request=True, memory_limit=True, memory_request=True, fractional_cpus=True
        )

    @classmethod
    def preflight(cls) -> None:
        try:
            find_apptainer()
        except MegaflowError as error:
            raise SystemExit(str(error)) from None

    def _validate_definition(self) -> None:
        dockerfile = self.environment_dir / "Dockerfile"
        compose = self.environment_dir / COMPOSE
        if compose.is_file():
            raise ConfigError(f"{compose}: tasks of several services cannot run here; leave this task out")
        for mount in self._host_mounts:
            if mount.get("type") != "bind":
                raise ConfigError(f"mount {mount}: expected type bind, because a sandbox has no volumes")
        if not self.task_env_config.docker_image and not dockerfile.is_file():
            raise FileNotFoundError(f"{dockerfile}: missing, and the task has no docker_image; add one of them")

    # --- start and stop --------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Resolves the image (built or pulled on first use) and starts the sandbox."""
        image = await asyncio.to_thread(self._image)
        memory_mb = self._resource_limit_value("memory", auto_mode=_limit())
        cpus = self._resource_limit_value("cpu", auto_mode=_limit())
        spec = SandboxSpec(
            image=image.file,
            env={**image.env, **self._startup_env()},
            workdir=self.task_env_config.workdir or image.workdir,
            user=image.user,
            binds=tuple(
                f"{mount['source']}:{mount['target']}{':ro' if mount.get('read_only') else ''}"
                for mount in self._host_mounts
            ),
            network="none" if self._network_disabled else self._public,
            memory_mb=memory_mb,
            cpus=cpus,
            disk_mb=self._effective_storage_mb,
        )
        self._as = image.user
        self._sandbox = await acquire_provider(self, self._scratch).start(spec)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    def _image(self) -> ResolvedImage:
        """Returns the image that the task defines."""
        dockerfile = self.environment_dir / "Dockerfile"
        return resolve_image(
            self.task_env_config.docker_image or "",
            dockerfile if dockerfile.is_file() else None,
            self._images,
            IMAGES,
            self._public,
            self._scratch,
        )

    async def stop(self, delete: bool) -> None:
        """Stops the sandbox, and closes the provider if this was its last sandbox. Removes all files, even if
        ``delete`` is false."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.stop()
        await release_provider(self, self._scratch)

    def _running(self) -> ApptainerSandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment is not started")
        return self._sandbox

    # --- use ------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command with ``bash``, or with ``sh`` if bash is missing.

        Raises:
            TimeoutError: The command exceeded ``timeout_sec``. Harbor's own environments raise the same error.
        """
        wanted = self._resolve_user(user)
        if wanted not in (None, "root", 0, "0", self._as):
            # A sandbox has only one uid. Another user differs only in name and home directory.
            name = shlex.quote(str(wanted))
            home = f"$(getent passwd {name} 2>/dev/null | cut -d: -f6)"
            command = f'export USER={name} LOGNAME={name}; h={home}; [ -w "$h" ] && export HOME="$h"; {command}'
        shell = 'for s in /bin/bash /usr/bin/bash; do [ -x "$s" ] && exec "$s" -c "$0"; done; exec /bin/sh -c "$0"'
        done = await self._running().exec(
            ["/bin/sh", "-c", shell, command],
            cwd=cwd,
            env=self._merge_env(env),
            timeout_s=timeout_sec,
        )
        if done.timed_out:
            raise TimeoutError(f"Command timed out after {timeout_sec} seconds")
        if callback := self._output_callback():
            for text, stream in ((done.stdout, "stdout"), (done.stderr, "stderr")):
                if text:
                    await callback(text.encode("utf-8", "replace").decode(), stream)
        return ExecResult(stdout=_text(done.stdout_bytes), stderr=_text(done.stderr_bytes), return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running().upload(str(_existing(source_path)), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running().upload(str(_existing(source_dir)), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(source_dir, target_dir)

    async def _download(self, source: str, target: Path | str) -> None:
        try:
            await self._running().download(source, str(target))
        except SandboxError as error:
            raise RuntimeError(str(error)) from error


def _limit() -> Any:
    from harbor.models.trial.config import ResourceMode

    return ResourceMode.LIMIT


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _existing(path: Path | str) -> Path:
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: nothing to upload; correct the path")
    return Path(path)
