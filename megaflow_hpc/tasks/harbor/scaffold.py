"""Writes a minimal but complete Harbor task as a starting point."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import TASK_ID

TEMPLATE = Path(__file__).parent / "template"


def start(name: str, directory: Path) -> Path:
    """Writes a task directory ``directory/NAME`` and returns its path.

    Raises:
        ConfigError: the name is not a valid task id, or the directory exists already.
    """
    if not TASK_ID.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{name!r}: expected the id of a task: letters, digits, dot, dash and underscore")
    path = directory.absolute() / name
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{name}.{secrets.token_hex(4)}")
    try:
        shutil.copytree(
            TEMPLATE, unfinished, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
        )
        for script in unfinished.rglob("*.sh"):
            script.chmod(0o755)
        os.rename(unfinished, path)
    except OSError as error:
        if not path.exists():
            raise
        raise ConfigError(f"{path}: exists already; choose another name") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path
