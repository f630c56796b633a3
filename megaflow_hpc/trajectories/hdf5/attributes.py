"""The root attributes that describe where a campaign file comes from: the resolved campaign and software versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

import h5py

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5 import deflate
from megaflow_hpc.version import __version__


def root_attributes(run: RunDir) -> dict[str, str]:
    """Returns the attributes ``config`` (the resolved campaign) and ``versions`` of a run, both as JSON."""
    content = run.read_run() if run.run_json.exists() else {}
    campaign = content.get("campaign")
    planned = content.get("versions")
    versions: dict[str, Any] = dict(planned) if isinstance(planned, dict) else {}
    versions |= {
        "megaflow-hpc": __version__,
        "python": platform.python_version(),
        "hdf5": h5py.version.hdf5_version,
    }
    versions |= {name: importlib.metadata.version(name) for name in ("h5py", "numpy")}
    versions["deflate"] = deflate.NAME
    if content.get("version"):
        versions["planned by megaflow-hpc"] = str(content["version"])
    policies = content.get("policies")
    if "models" not in versions and isinstance(policies, dict):
        versions["models"] = {name: _model(policy) for name, policy in policies.items()}
    if content.get("images"):
        versions["images"] = content["images"]
    return {
        "config": json.dumps(campaign if isinstance(campaign, dict) else {}, sort_keys=True, default=str),
        "versions": json.dumps(versions, sort_keys=True, default=str),
    }


def _model(policy: Any) -> Any:
    model = policy.get("model") if isinstance(policy, dict) else None
    return {key: model[key] for key in ("engine", "path") if key in model} if isinstance(model, dict) else None


def campaign_name(run: RunDir) -> str:
    """Returns the campaign's name from ``run.json``, or the directory's name where that has none."""
    if not run.run_json.exists():
        return run.path.name
    content = run.read_run()
    campaign = content.get("campaign")
    name = campaign.get("name") if isinstance(campaign, dict) else campaign or content.get("name")
    return str(name or run.path.name)
