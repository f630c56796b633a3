"""The root attributes that describe where a campaign file comes from: the resolved campaign and software versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from contextlib import suppress
from typing import Any

import h5py

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.tasks import image_files, planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, read_run
from megaflow_hpc.version import __version__


def root_attributes(run: RunDir) -> dict[str, str]:
    """Returns the attributes ``config`` (the resolved campaign, without its keys) and ``versions`` of a run as JSON."""
    planned = read_run(run) if run.run_json.exists() else RunRecord()
    versions = dict(planned.versions)
    versions |= {
        "megaflow-hpc": __version__,
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
    }
    versions |= {name: importlib.metadata.version(name) for name in ("h5py", "numpy")}
    if planned.version:
        versions["planned by megaflow-hpc"] = planned.version
    if "models" not in versions and planned.policies:
        versions["models"] = {name: _model(policy) for name, policy in planned.policies.items()}
    with suppress(ConfigError):  # a purge took the file of tasks: what was stored is gathered all the same
        if images := image_files(planned_tasks(run, planned)):
            versions["images"] = images
    return {
        "config": json.dumps(without_secrets(planned.campaign), sort_keys=True, default=str),
        "versions": json.dumps(without_secrets(versions), sort_keys=True, default=str),
    }


def _model(policy: PolicyRecord) -> dict[str, Any] | None:
    return {key: policy.model[key] for key in ("engine", "path") if key in policy.model} if policy.model else None


def campaign_name(run: RunDir) -> str:
    """Returns the name in ``run.json``; the directory's name where there is none."""
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
    """Returns a JSON value in which ``***`` stands for what goes by the name of a key, token, secret or password, in a
    mapping, a shell's assignment, an option or an address.

    A campaign file may hold such things; what is read by whoever is given the results must not.
    """
    if isinstance(value, dict):
        return {
            name: "***" if _SECRET_NAME.fullmatch(str(name)) and _written(item) else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        for pattern, replacement in _SECRET_TEXT:
            value = pattern.sub(replacement, value)
    return value


def _written(item: Any) -> bool:
    return item is not None and not isinstance(item, bool)
