"""Resolves images by name or Dockerfile, and shares one provider per event loop, for all integrations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, last_workdir
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, match_name
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError

OpenNetwork = Literal["none", "host"]

_providers: dict[tuple[asyncio.AbstractEventLoop, str], tuple[ApptainerProvider, list[object]]] = {}
"""Maps (event loop, scratch directory) to a provider and its current users."""


@dataclass(frozen=True)
class ResolvedImage:
    """An image file, with the settings from its Dockerfile."""

    file: str
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def resolve_image(
    name: str, dockerfile: Path | None, images: Mapping[str, str], where: str, network: OpenNetwork, scratch: str
) -> ResolvedImage:
    """Returns the file of an image, which is pulled or built if it is missing.

    Args:
        name: The image's name. If empty, ``dockerfile`` is built.
        dockerfile: A Dockerfile, or ``None``. With a name, only its working directory is used.
        images: Maps names of images to addresses and paths. An unmapped name means ``docker://NAME``.
        where: Origin of ``images``, for error messages.
        network: The network of a build.
    """
    parsed = Dockerfile(dockerfile) if dockerfile is not None and not name else None
    mapping = dict(images)
    for base in parsed.bases if parsed else [name]:
        if match_name(base, images) is None:
            mapping[base] = f"docker://{base}"
    store = Images(ImageStore(), builder=Builder(network, scratch=scratch or None))
    names = ImageMapping(mapping, Path.cwd(), where)
    path = str(dockerfile.parent.parent) if dockerfile else str(Path.cwd())
    if parsed is None:
        file = store.resolve(name, names, task_path=path)
        workdir = last_workdir(dockerfile) if dockerfile is not None and dockerfile.is_file() else None
        return ResolvedImage(str(file), workdir)
    if parsed.needs_build:
        file = store.resolve_dockerfile(parsed, names, task_path=path)
    else:
        file = store.resolve(parsed.base, names, task_path=path)
    return ResolvedImage(str(file), parsed.workdir, parsed.user, dict(parsed.environment))


def parse_images(value: str | Mapping[str, str] | None, where: str) -> dict[str, str]:
    """Parses ``NAME=TARGET,NAME=TARGET`` or a mapping. The first ``=`` of a pair separates name and target."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(name): str(target) for name, target in value.items()}
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    for name, equals, target in pairs:
        if not (name.strip() and equals and target.strip()):
            raise ConfigError(f"{where} {value!r}: expected NAME=TARGET, separated by commas")
    return {name.strip(): target.strip() for name, _, target in pairs}


def acquire_provider(user: object, scratch: str = "") -> ApptainerProvider:
    """Returns the provider of the running event loop. Each user must release it."""
    key = (asyncio.get_running_loop(), scratch)
    if key not in _providers:
        _providers[key] = (ApptainerProvider(scratch or None), [])
    provider, users = _providers[key]
    users.append(user)
    return provider


async def release_provider(user: object, scratch: str = "") -> None:
    """Closes the provider after its last user. Idempotent."""
    key = (asyncio.get_running_loop(), scratch)
    provider, users = _providers.get(key, (None, []))
    if provider is None or user not in users:
        return
    users.remove(user)
    if not users:
        del _providers[key]
        await provider.close()
