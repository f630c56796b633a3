"""Maps the image names in tasks to sources, as configured by a campaign.

An image in a task or Dockerfile is only a name. The mapping turns it into an address or a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images.registries import is_remote
from megaflow_hpc.errors import ConfigError

BUILD_S = 3600.0
"""Default timeout for building a Dockerfile."""


@dataclass(frozen=True)
class ImageRequest:
    """An image that a task needs."""

    name: str
    """Image name used by the task."""
    base: str = ""
    """Name to look up instead of ``name``. Empty means ``name`` itself."""
    dockerfile: Path | None = None
    """Dockerfile to build, if any."""
    timeout_s: float = BUILD_S
    """Timeout for the build."""
    path: str = ""
    """Directory or file of the task, used in messages."""


@dataclass(frozen=True)
class ImageMapping:
    """Image name → source, as in ``environment.images`` of a campaign."""

    names: Mapping[str, str]
    base_dir: Path
    """Directory against which relative paths are resolved."""
    where: str = "environment.images"
    """Name of the mapping, used in messages."""


def match_name(name: str, mapping: Mapping[str, str]) -> str | None:
    """Returns the source of an image name, from an exact entry or else from the longest matching pattern.

    A pattern contains one ``*``, which matches any text. The matched text replaces ``*`` in the source, as in
    ``"swebench/*": docker://swebench/*`` or ``"swebench/sweb.eval.x86_64.*:latest": images/*.sif``. The text comes from
    a task. If the source is a path, the text must therefore not contain ``..`` or a variable.

    Raises:
        ConfigError: The matched text is not allowed in a path.
    """
    if name in mapping:
        return _path(mapping[name])
    for pattern in sorted((key for key in mapping if key.count("*") == 1), key=len, reverse=True):
        head, tail = pattern.split("*")
        if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            text = name[len(head) : len(name) - len(tail)]
            source = mapping[pattern]
            if "*" in source and not is_remote(source) and not _FILE_NAME.fullmatch(text):
                raise ConfigError(
                    f"image {name!r}: {text!r} in {source!r}, which {pattern!r} is mapped to, leads elsewhere; map "
                    "this name by itself"
                )
            return _path(source).replace("*", text)
    return None


_FILE_NAME = re.compile(r"(?!~)(?!.*(^|/)\.{0,2}(/|$))[^\0$]+", re.DOTALL)
"""Matches a relative path without ``..`` and without variables."""


def _path(source: str) -> str:
    return source if is_remote(source) else os.path.expanduser(os.path.expandvars(source))
