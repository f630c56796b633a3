"""Finds, reads and filters a campaign's tasks, and resolves their images."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_hpc.config.services import ServiceConfig
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.image_file import image_start, working_directory
from megaflow_hpc.environments.images.layered import ImageStart
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.tasks.formats import format_of, format_of_source, refuse_into
from megaflow_hpc.tasks.services import add_services, check_number
from megaflow_hpc.types import Service, Task


def load_tasks(
    sources: Sequence[Mapping[str, Any] | str],
    base_dir: str | os.PathLike[str],
    dockerfiles: Dockerfiles | None = None,
    services: Mapping[str, ServiceConfig] | None = None,
    left_out: list[str] | None = None,
) -> list[Task]:
    """Returns all tasks of all sources, ordered by source, then by id.

    Args:
        sources: ``{path, include, exclude, limit}`` as in the campaign file. A bare string is a path. Paths are globs
            relative to ``base_dir``. ``include`` and ``exclude`` are shell patterns for ids.
        dockerfiles: Reads the tasks' Dockerfiles, so that images can be resolved later.
        services: The campaign's services, which are added to every task.
        left_out: List to which the error of each task that cannot be read or tested is appended. In a ``strict``
            source, such a task is an error. If ``None``, every source is strict.

    Raises:
        ConfigError: A task and the campaign have a service with the same name.
        Mistakes: A source has no valid tasks, a strict source has an invalid task, or ids are duplicated.
    """
    dockerfiles = dockerfiles or Dockerfiles()
    tasks: dict[str, Task] = {}
    mistakes: list[str] = []
    for source in sources:
        options: Mapping[str, Any] = {"path": source} if isinstance(source, str) else source
        refused: list[str] = []
        try:
            loaded = _of_source(options, base_dir, dockerfiles, refused)
        except ConfigError as error:
            mistakes += [*refused, *(error.found if isinstance(error, Mistakes) else [str(error)])]
            continue
        strict = left_out is None or options.get("strict") or not loaded
        (mistakes if strict or left_out is None else left_out).extend(refused)
        for task in loaded:
            other = tasks.get(task.id)
            if other is not None and other.path != task.path:
                both = f"task id {task.id} is used twice: {other.path} and {task.path}"
                mistakes.append(f"{both}; exclude it from one of the sources, or rename one")
            tasks[task.id] = task
    if mistakes:
        raise Mistakes(mistakes)
    if not tasks:
        raise ConfigError("tasks: the list is empty; add at least one path")
    return add_services(list(tasks.values()), services or {})


def _of_source(
    options: Mapping[str, Any], base_dir: str | os.PathLike[str], dockerfiles: Dockerfiles, refused: list[str]
) -> Sequence[Task]:
    path = str(options["path"])
    source_format = format_of_source(path)
    include, exclude = tuple(options.get("include") or ("*",)), tuple(options.get("exclude") or ())

    def wanted(name: str) -> bool:
        return _matches(name, include) and not _matches(name, exclude)

    tasks = source_format.read(path, base_dir, dockerfiles, wanted, refuse_into(refused))
    kept = [task for task in sorted(tasks, key=lambda task: task.id) if wanted(task.id)]
    if not kept and not refused:
        example = f"; an example of an id is {tasks[0].id}" if tasks else ""
        raise ConfigError(
            f"tasks: {path}: include {list(include)} and exclude {list(exclude)} leave no valid task{example}"
        )
    return source_format.settle(kept[: options.get("limit") or None], refuse_into(refused))


MAX_REASONS = 10
"""Maximum number of reasons in a summary of left-out tasks."""


def summarise(left_out: Sequence[str]) -> list[str]:
    """Returns one line per reason why tasks were left out, the most frequent reason first.

    Each line names the location of the first task and the number of other tasks.
    """
    reasons: dict[str, list[str]] = {}
    for message in left_out:
        location, _, reason = message.partition(": ")
        reasons.setdefault(reason, []).append(location)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{places[0]}: {reason}" + (f" (and {len(places) - 1} more)" if len(places) > 1 else "")
        for reason, places in ordered[:MAX_REASONS]
    ]
    return lines + [f"… and {len(ordered) - MAX_REASONS} further reasons"] * (len(ordered) > MAX_REASONS)


def at_key(location: str, error: ConfigError) -> Mistakes:
    """Returns the errors of a task source.

    A message that does not start with the path of a task's file is prefixed with ``location``, the ``file:line`` of the
    source's key.
    """
    messages = error.found if isinstance(error, Mistakes) else [str(error)]
    return Mistakes([line if line.startswith("/") else f"{location}: {line}" for line in messages])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- images -----------------------------------------------------------------------------------------------------------


def images_of(task: Task) -> list[ImageRequest]:
    """Returns the images of a task: the agent's image first, then the images of separate verifiers and services."""
    requests = format_of(task).images(task)
    for service in task.services:
        if service.image:
            dockerfile = Path(service.dockerfile) if service.dockerfile else None
            requests.append(ImageRequest(service.image, service.base, dockerfile, path=task.path))
    return requests


def image_requests(tasks: Sequence[Task]) -> list[ImageRequest]:
    """Returns the images of tasks: agents' images in task order, then the images of separate verifiers and services."""
    wanted = [images_of(task) for task in tasks]
    agents = [request for requests in wanted for request in requests[:1]]
    return agents + [request for requests in wanted for request in requests[1:]]


def in_image_directories(
    tasks: Sequence[Task],
    files: Mapping[str, str],
    images: Images,
    mapping: ImageMapping,
) -> list[Task]:
    """Sets each task's missing working directory from its image. If the image has yet to be built, uses its base image.

    Args:
        tasks: The tasks to complete.
        files: Result of :meth:`Images.resolve_all` for ``mapping``.
        images: The image store.
        mapping: ``environment.images`` of the campaign.
    """
    placed = []
    for task in tasks:
        if task.workdir is None and task.image:
            request = format_of(task).images(task)[0]
            image: str | Path = files[task.image]
            if request.base:
                image = images.resolve(request.base, mapping, build=False)
            task = replace(task, workdir=working_directory(image))
        if task.services:
            services = tuple(_startable(task, each, files, images, mapping) for each in task.services)
            check_number(task.id, services)
            task = replace(task, services=services)
        placed.append(task)
    return placed


def _startable(
    task: Task, service: Service, files: Mapping[str, str], images: Images, mapping: ImageMapping
) -> Service:
    """Fills in a service's program, ports and working directory from its image, if the service does not define them."""
    image: str | Path = files[service.image or task.image]
    if service.base:
        image = images.resolve(service.base, mapping, build=False)
    start = image_start(image)
    if not service.image:  # the service uses the task's image, which defines no service
        start = ImageStart()
    entrypoint = service.entrypoint or start.entrypoint
    command = service.command or (() if service.entrypoint else start.command)
    where = f"task {task.id}: service {service.name}"
    if not entrypoint and not command:
        raise ConfigError(f"{where}: its image {service.image or task.image!r} names no program; write command:")
    ports = service.ports or start.ports
    if not ports:
        raise ConfigError(f"{where}: it has no port, so nothing can reach it; name its TCP ports")
    return replace(
        service,
        entrypoint=(),
        command=(*entrypoint, *command),
        ports=ports,
        workdir=service.workdir or working_directory(image),
    )
