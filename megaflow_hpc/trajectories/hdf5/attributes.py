"""The root attributes that describe where a campaign file comes from: the resolved campaign and software versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

import h5py

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, read_run
from megaflow_hpc.trajectories.hdf5 import deflate
from megaflow_hpc.version import __version__


def root_attributes(run: RunDir) -> dict[str, str]:
    """Returns the attributes ``config`` (the resolved campaign) and ``versions`` of a run, both as JSON."""
    planned = read_run(run) if run.run_json.exists() else RunRecord()
    versions = dict(planned.versions)
    versions |= {
        "megaflow-hpc": __version__,
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
    }
    versions |= {name: importlib.metadata.version(name) for name in ("h5py", "numpy")}
    versions["deflate"] = deflate.NAME
    if planned.version:
        versions["planned by megaflow-hpc"] = planned.version
    if "models" not in versions and planned.policies:
        versions["models"] = {name: _model(policy) for name, policy in planned.policies.items()}
    if planned.images:
        versions["images"] = planned.images
    return {
        "config": json.dumps(planned.campaign, sort_keys=True, default=str),
        "versions": json.dumps(versions, sort_keys=True, default=str),
    }


def _model(policy: PolicyRecord) -> dict[str, Any] | None:
    return {key: policy.model[key] for key in ("engine", "path") if key in policy.model} if policy.model else None


def campaign_name(run: RunDir) -> str:
    """Returns the name in ``run.json``; the directory's name where there is none."""
    return (read_run(run).name if run.run_json.exists() else "") or run.path.name
