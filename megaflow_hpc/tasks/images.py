"""Resolves the images that tasks need and the working directories that these images define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.environments.images.image_file import working_directory
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import Task


def image_requests(tasks: Sequence[Task]) -> list[ImageRequest]:
    """Returns the images of tasks: agents' images in task order, then those of separate verifiers."""
    wanted = [format_of(task).images(task) for task in tasks]
    return [requests[0] for requests in wanted] + [request for requests in wanted for request in requests[1:]]


def in_image_directories(
    tasks: Sequence[Task],
    files: Mapping[str, str],
    images: Images,
    mapping: ImageMapping,
) -> list[Task]:
    """Sets missing working directories of tasks from their images, or from the base image if the image is built.

    Args:
        tasks: the tasks.
        files: the result of :meth:`Images.resolve_all` for ``mapping``.
        images: the image store.
        mapping: ``environment.images``.
    """
    placed = []
    for task in tasks:
        if task.workdir is None:
            request = format_of(task).images(task)[0]
            image: str | Path = files[task.image]
            if request.base:
                image = images.resolve(request.base, mapping, build=False)
            task = replace(task, workdir=working_directory(image))
        placed.append(task)
    return placed
