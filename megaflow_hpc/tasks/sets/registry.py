"""Reads ``registry.yaml``, the facts about task sets that can be imported by name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct

from megaflow_hpc.errors import ConfigError

FILE = Path(__file__).with_name("registry.yaml")


class TaskSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A task set. Numbers are as its sources state them, or ``unknown``."""

    title: str
    licence: str
    tasks: int | Literal["unknown"]
    bytes: int | Literal["unknown"]
    """Size of the download."""
    images: str
    image_bytes: int | Literal["unknown"]
    sources: list[str]
    """Addresses at which these facts were read."""
    hub: str = ""
    """Dataset on the Hugging Face Hub."""
    files: list[str] = []
    """Patterns of the dataset's files."""
    archive: str = ""
    """Address of a tar.gz. ``{revision}`` is replaced by the version."""
    home: str = ""
    """Web page of a set that is part of an image."""
    revision: str = "main"
    format: Literal["", "swebench", "harbor", "aider-polyglot", "humanevalfix", "miniwob"] = ""
    unread: str = ""
    """Reason why the set cannot be imported. Empty if it can."""
    accept: bool = False
    """True if the user must accept the licence."""
    image: str = ""
    runner: str = ""

    @property
    def page(self) -> str:
        """Web page of the set."""
        if self.hub:
            return f"https://huggingface.co/datasets/{self.hub}"
        return self.home or self.archive.partition("/archive/")[0]


def task_sets() -> dict[str, TaskSet]:
    """Returns all task sets by name."""
    return msgspec.convert(yaml.safe_load(FILE.read_text(encoding="utf-8")), dict[str, TaskSet])


def find(name: str) -> TaskSet:
    """Returns the set of this name.

    Raises:
        ConfigError: The name is unknown, or the set is not read.
    """
    sets = task_sets()
    if name not in sets:
        near = get_close_matches(name, sets, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{name}: no task set of this name; {hint}see: megaflow-hpc tasks import --list")
    if sets[name].unread:
        raise ConfigError(f"{name}: not read: {sets[name].unread}; see {sets[name].page}")
    return sets[name]
