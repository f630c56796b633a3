"""Image names of tasks, and what a campaign maps them to.

What a task or a Dockerfile says is a name and nothing else: only the mapping makes an address or a path of it.
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
"""Longest build of a Dockerfile that states no time."""


@dataclass(frozen=True)
class ImageRequest:
    """An image that a task wants."""

    name: str
    """As the task names it."""
    base: str = ""
    """Image name that is mapped instead, and its Dockerfile starts from; empty: ``name`` itself."""
    dockerfile: Path | None = None
    """To be built onto ``base``."""
    timeout_s: float = BUILD_S
    """Longest build."""
    path: str = ""
    """The task's directory or file, for messages."""


@dataclass(frozen=True)
class ImageMapping:
    """Image names of tasks → sources, as in ``environment.images`` of a campaign."""

    names: Mapping[str, str]
    base_dir: Path
    """Directory that relative paths are relative to."""
    where: str = "environment.images"
    """The mapping as messages call it."""


def match_name(name: str, mapping: Mapping[str, str]) -> str | None:
    """What ``mapping`` gives for an image name: its own entry, else that of the longest pattern.

    A pattern has one ``*``, which stands for any text; in what it is mapped to, ``*`` is that text again:
    ``"swebench/*": docker://swebench/*`` or ``"swebench/sweb.eval.x86_64.*:latest": images/*.sif``. The text comes from
    a task: in a path it may name nothing beside or above what the pattern leads to, and no variable.

    Raises:
        ConfigError: it would.
    """
    if name in mapping:
        return _path(mapping[name])
    for pattern in sorted((key for key in mapping if key.count("*") == 1), key=len, reverse=True):
        head, tail = pattern.split("*")
        if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            text, source = name[len(head) : len(name) - len(tail)], mapping[pattern]
            if "*" in source and not is_remote(source) and not _FILE_NAME.fullmatch(text):
                raise ConfigError(
                    f"image {name!r}: {text!r} in {source!r}, which {pattern!r} is mapped to, leads elsewhere; map "
                    "this name by itself"
                )
            return _path(source).replace("*", text)
    return None


_FILE_NAME = re.compile(r"(?!~)(?!.*(^|/)\.{0,2}(/|$))[^\0$]+", re.DOTALL)
"""A relative path without ``..`` or a variable."""


def _path(source: str) -> str:
    return source if is_remote(source) else os.path.expanduser(os.path.expandvars(source))
