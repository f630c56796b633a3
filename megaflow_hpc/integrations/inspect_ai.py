"""Runs Inspect (https://pypi.org/project/inspect-ai, 0.3.285) samples in this package's sandboxes::

    inspect eval inspect_evals/gsm8k --sandbox megaflow_hpc:python.sif

Inspect finds the provider by its entry point. Each sample gets one sandbox, whose configuration is one of:

- an image: a SIF file, or a directory with an unpacked image;
- a Dockerfile, or a compose file with one service, in the form that the ``docker`` provider accepts. An evaluation that
  names the ``docker`` provider can use its file unchanged with ``--sandbox megaflow_hpc``;
- nothing, which selects the image ``aisiuk/inspect-tool-support``, as with ``docker``.

``MEGAFLOW_IMAGES=NAME=TARGET,…`` maps image names or patterns to files and addresses. An unmapped name means
``docker://NAME``. If the path of a Dockerfile is mapped, the mapped image is used instead of a build. A sandbox has no
network unless the compose file has ``network_mode: host`` or ``bridge``, which both mean the host's network. A sandbox
has only one user.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

from inspect_ai.util import (
    ComposeConfig,
    ComposeService,
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    is_compose_yaml,
    is_dockerfile,
    parse_compose_yaml,
    sandboxenv,
)
from pydantic import BaseModel

from megaflow_hpc.environments import ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.images.dockerfile.dockerfile import last_workdir
from megaflow_hpc.environments.images.sources import match_name
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.integrations.sandboxes import (
    OpenNetwork,
    acquire_provider,
    parse_images,
    release_provider,
    resolve_image,
)

IMAGES_VARIABLE = "MEGAFLOW_IMAGES"
DEFAULT_IMAGE = "aisiuk/inspect-tool-support"
DEFAULT_WORKDIR = "/workspace"
"""Working directory if neither the service nor its image specifies one. Created if it is missing."""
IGNORED = {"build", "command", "container_name", "cpus", "deploy", "entrypoint", "environment", "hostname", "image"}
IGNORED |= {"init", "mem_limit", "network_mode", "pull_policy", "platform", "restart", "stop_grace_period", "user"}
IGNORED |= {"working_dir", "x_default", "x_local"}
"""Fields of a compose service that are supported, or that can be ignored because they have no effect in a sandbox."""
_MB = {"k": 1e-3, "m": 1.0, "g": 1e3, "b": 1e-6}
_WRITE = """\
set -e
case $1 in */*) mkdir -p -- "${1%/*}/";; esac
if [ -d "$1" ]; then exit 21; fi
if [ -e "$1" ] && ! [ -w "$1" ]; then exit 13; fi
exec cat >"$1"
"""
_READ = """\
if [ -d "$1" ]; then exit 21; fi
if ! [ -e "$1" ] && ! [ -L "$1" ]; then exit 2; fi
if ! [ -r "$1" ]; then exit 13; fi
exec head -c "$2" <"$1"
"""
"""Shell scripts that write and read a file. Their exit status is an errno."""


@sandboxenv(name="megaflow_hpc")
class ApptainerSandboxEnvironment(SandboxEnvironment):
    """The sandbox of a sample. The module docstring lists the possible configurations."""

    def __init__(self, sandbox: ApptainerSandbox) -> None:
        super().__init__()
        self._sandbox = sandbox

    # --- life of a task and a sample --------------------------------------------------------------------------------

    @classmethod
    def config_files(cls) -> list[str]:
        """Returns the files that Inspect looks for next to a task."""
        return ["compose.yaml", "docker-compose.yaml", "compose.yml", "docker-compose.yml", "Dockerfile"]

    @classmethod
    def is_docker_compatible(cls) -> bool:
        return True

    @classmethod
    def default_concurrency(cls) -> int | None:
        return 2 * (os.cpu_count() or 1)

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Pulls or builds the image, so that an error fails the whole task at once rather than each sample."""
        await asyncio.to_thread(spec_of, config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        spec = await asyncio.to_thread(spec_of, config)
        owner = object()
        provider = acquire_provider(owner)
        try:
            environment = cls(await provider.start(spec))
        except BaseException:
            await release_provider(owner)
            raise
        environment._owner = owner
        return {"default": environment}

    _owner: object = None

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            own = environment.as_type(cls)
            try:
                await own._sandbox.stop()
            finally:
                await release_provider(own._owner)

    # --- use ------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        self._check_user(user)
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        data = input.encode() if isinstance(input, str) else input
        done = await self._run(cmd, cwd=cwd, env=env, timeout_s=timeout, user_input=data, output_limit=limit)
        stdout, stderr = (text.decode("utf-8", "replace") for text in (done.stdout_bytes, done.stderr_bytes))
        if done.timed_out:
            failure = TimeoutError(f"Command timed out after {timeout} seconds")
            failure.truncated_output = stdout + stderr  # type: ignore[attr-defined]  # Inspect shows it to the model
            raise failure
        if done.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout)
        if done.exit_code == 126 and "permission denied" in stderr.casefold():
            raise PermissionError(errno.EACCES, "Permission denied", cmd[0])
        return ExecResult(success=done.exit_code == 0, returncode=done.exit_code, stdout=stdout, stderr=stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        done = await self._run(["/bin/sh", "-c", _WRITE, "sh", self._path(file)], user_input=data)
        if done.exit_code:
            raise _os_error(done.exit_code, file, done.stderr)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        command = ["/bin/sh", "-c", _READ, "sh", self._path(file), str(limit + 1)]
        done = await self._run(command, output_limit=limit + 2)
        if done.exit_code:
            raise _os_error(done.exit_code, file, done.stderr)
        if len(done.stdout_bytes) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return done.stdout_bytes.decode() if text else done.stdout_bytes

    def _path(self, file: str) -> str:
        return os.path.join(self._sandbox.workdir, file)

    def _check_user(self, user: str | None) -> None:
        own = self._sandbox.spec.user
        if user is None or user == own or (user in ("root", "0") and own in (None, "root", "0")):
            return
        raise SandboxUserUnsupportedError(
            f"user {user!r}: the sandbox runs all commands as {own or 'root'}; leave the user out"
        )

    async def _run(self, command: list[str], **options: Any) -> Any:
        try:
            return await self._sandbox.exec(command, **options)
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error


def _os_error(code: int, file: str, stderr: str) -> OSError | RuntimeError:
    if code in (errno.ENOENT, errno.EACCES, errno.EISDIR):
        return OSError(code, os.strerror(code), file)  # the subclass of OSError for this code
    reason = stderr.strip()[-500:]
    if "permission denied" in reason.casefold():
        return PermissionError(errno.EACCES, reason, file)
    if "not a directory" in reason.casefold():
        return FileNotFoundError(errno.ENOENT, reason, file)
    return RuntimeError(f"{file}: exit code {code}: {reason}")


def spec_of(config: BaseModel | str | None) -> SandboxSpec:
    """Returns the specification of a sandbox for Inspect's configuration.

    Raises:
        ConfigError: The configuration needs a feature that sandboxes lack, or its image is missing.
    """
    if config is None:
        return _spec(ComposeService(image=DEFAULT_IMAGE), Path.cwd(), "no configuration")
    if isinstance(config, ComposeConfig):
        return _compose(config, Path.cwd(), "compose configuration")
    if not isinstance(config, str):
        raise ConfigError(
            f"sandbox configuration {type(config).__name__}: expected an image, a Dockerfile or a compose file"
        )
    path = Path(config).absolute()
    if is_compose_yaml(config):
        try:
            return _compose(parse_compose_yaml(config), path.parent, config)
        except ValueError as error:
            raise ConfigError(f"{config}: {error}") from None
    if is_dockerfile(config):
        return _spec(ComposeService(build=str(path)), path.parent, config)
    if not path.exists():
        raise ConfigError(
            f"sandbox configuration {config}: no such file; name a SIF file, a Dockerfile or a compose file"
        )
    return SandboxSpec(str(path), workdir=DEFAULT_WORKDIR)


def _compose(config: ComposeConfig, folder: Path, where: str) -> SandboxSpec:
    if len(config.services) != 1:
        raise ConfigError(
            f"{where}: {len(config.services)} services; a sandbox is one service without a network of containers: "
            "leave this evaluation out, or use --sandbox docker"
        )
    (service,) = config.services.values()
    return _spec(service, folder, where)


def _spec(service: ComposeService, folder: Path, where: str) -> SandboxSpec:
    unknown = sorted(name for name in service.model_fields_set - IGNORED if getattr(service, name, None))
    if unknown:
        raise ConfigError(f"{where}: {', '.join(unknown)}: a sandbox has no such setting; remove it from the service")
    if service.network_mode not in (None, "none", "host", "bridge"):
        raise ConfigError(f"{where}: network_mode {service.network_mode!r}: expected none, host or bridge")
    network: OpenNetwork = "host" if service.network_mode in ("host", "bridge") else "none"
    dockerfile, name = _dockerfile(service, folder), service.image or ""
    images = parse_images(os.environ.get(IMAGES_VARIABLE), IMAGES_VARIABLE)
    workdir = None
    if dockerfile is not None and match_name(str(dockerfile), images) is not None:  # built elsewhere
        name, workdir, dockerfile = str(dockerfile), last_workdir(dockerfile), None
    image = resolve_image("" if dockerfile else name, dockerfile, images, IMAGES_VARIABLE, "host", "")
    limits = service.deploy.resources.limits if service.deploy and service.deploy.resources else None
    memory = service.mem_limit or (limits.memory if limits else None)
    cpus = service.cpus or (limits.cpus if limits else None)
    return SandboxSpec(
        image.file,
        env={**image.env, **_environment(service)},
        workdir=service.working_dir or image.workdir or workdir or DEFAULT_WORKDIR,
        user=service.user or image.user,
        network=network,
        memory_mb=_megabytes(memory, where) if memory else None,
        cpus=float(cpus) if cpus else None,
    )


def _dockerfile(service: ComposeService, folder: Path) -> Path | None:
    build = service.build
    if build is None:
        return None
    if isinstance(build, str):
        path = folder / build
        return path / "Dockerfile" if path.is_dir() else path
    return folder / (build.context or ".") / (build.dockerfile or "Dockerfile")


def _environment(service: ComposeService) -> dict[str, str]:
    given = service.environment or {}
    pairs = given.items() if isinstance(given, dict) else [tuple(line.partition("=")[::2]) for line in given]
    return {name: os.environ.get(name, "") if value is None else str(value) for name, value in pairs}


def _megabytes(text: str, where: str) -> int:
    number = text.lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in _MB else "b"
    try:
        return max(1, int(float(number.removesuffix(unit)) * _MB[unit]))
    except ValueError:
        raise ConfigError(f"{where}: memory {text!r}: expected a size such as 512m or 2g") from None
