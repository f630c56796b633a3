"""Root attributes that record the origin of a campaign file: the resolved campaign and software versions."""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from typing import Any

import h5py
import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.tasks import image_files, planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.version import __version__


def root_attributes(run: RunDir) -> dict[str, str]:
    """Returns the JSON attributes ``config`` (the resolved campaign, secrets masked) and ``versions``."""
    planned = read_run(run) if run.run_json.exists() else RunRecord()
    versions = planned.versions | {
        "megaflow-hpc": __version__,
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
        "h5py": h5py.version.version,
        "numpy": np.version.version,
    }
    if planned.version:
        versions["planned by megaflow-hpc"] = planned.version
    with suppress(ConfigError):  # the task file may have been purged; then the images are unknown
        images = image_files(planned_tasks(run, planned))
        if images:
            versions["images"] = images
    return {
        "config": json.dumps(without_secrets(planned.campaign), sort_keys=True, default=str),
        "versions": json.dumps(without_secrets(versions), sort_keys=True, default=str),
    }


def campaign_name(run: RunDir) -> str:
    """Returns the campaign name from ``run.json``, or else the directory name."""
    return (read_run(run).name if run.run_json.exists() else "") or run.path.name


_NAMES = r"(?:key|token|secret|password|passwd|pwd|credentials?)"
_SECRET_NAME = re.compile(rf"(?:.*[_-])?(?:api)?{_NAMES}", re.IGNORECASE)
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"']+)"""
_SECRET_TEXT = (
    (re.compile(rf"(\b(?:\w*_)?(?:api)?{_NAMES}=){_WORD}", re.IGNORECASE), r"\1***"),
    (re.compile(rf"(--(?:[\w-]+-)?{_NAMES}[ =]){_WORD}", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\bBearer )[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE), r"\1***@"),
)


def without_secrets(value: Any) -> Any:
    """Masks secrets in a JSON value: replaces any value named like a key, token, secret or password with ``***``.

    The name may be a mapping key, a shell variable, a command-line option, or part of a URL. A campaign's configuration
    may contain secrets; results, which are shared, must not.
    """
    if isinstance(value, dict):
        return {name: "***" if _is_secret(name, item) else without_secrets(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        for pattern, replacement in _SECRET_TEXT:
            value = pattern.sub(replacement, value)
    return value


def _is_secret(name: Any, value: Any) -> bool:
    return _SECRET_NAME.fullmatch(str(name)) is not None and value is not None and not isinstance(value, bool)
