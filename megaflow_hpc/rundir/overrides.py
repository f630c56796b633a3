"""Overrides the Slurm requests of a run's new jobs (``resume --time``, ``--mem``, ``--partition``).

::

    RUN/ledger/slurm.json    {"pods": {"time": "8:00:00"}, "servers": {"partition": "gpu-long"}}

Overrides take precedence over the campaign file. ``run.json`` stays unchanged, and queued jobs keep their requests. A
value of ``null`` means the site's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megaflow_hpc.config import CampaignConfig, resolved
from megaflow_hpc.config.slurm import MEMORY_OPTIONS, SlurmConfig, of_gigabytes
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.layout import RunDir, read_json

ROLES = ("pods", "servers", "trainer", "gather")
OPTIONS = {"time": ("time",), "mem": MEMORY_OPTIONS, "partition": ("partition",)}
"""Keys that may be overridden. Each maps to the options of sbatch that it replaces."""

Changes = Mapping[str, Mapping[str, Any]]


def overridden(run: RunDir, config: CampaignConfig) -> CampaignConfig:
    """Returns the campaign with all overrides applied, for new jobs.

    Raises:
        ConfigError: This version does not support a value.
    """
    changes = _read(run)
    return _with(config, changes) if changes else config


def in_effect(run: RunDir, config: CampaignConfig) -> dict[str, Any]:
    """Returns the sections ``slurm`` and ``limits`` of a run, including everything that commands have changed since
    planning.

    Args:
        config: The campaign as planned.
    """
    limits = CampaignBudget(run, config.limits.model_dump()).limits()
    return {"slurm": overridden(run, config).slurm.model_dump(), "limits": limits}


def override(
    run: RunDir, config: CampaignConfig, changes: Changes, check: Callable[[CampaignConfig], None] = lambda _: None
) -> CampaignConfig:
    """Overrides the Slurm requests of new jobs, on top of earlier overrides. Returns the overridden campaign.

    Args:
        config: The campaign as planned.
        changes: New values by role and key (:data:`OPTIONS`).
        check: Called with the resulting campaign. Must raise an error if the site would reject it.

    Raises:
        ConfigError: A role is unknown, or a value is invalid. Nothing is changed.
    """
    merged = {role: dict(values) for role, values in _read(run).items()}
    for role, values in changes.items():
        if role not in ROLES or not set(values) <= OPTIONS.keys():
            raise ConfigError(f"{role}: {', '.join(values)}: expected {', '.join(OPTIONS)} of {', '.join(ROLES)}")
        section = type(getattr(config.slurm, role))
        for key, value in values.items():
            try:
                if key not in section.model_fields and value is not None:
                    section.check_option(key, value, False)
            except ValueError as error:
                raise ConfigError(f"slurm.{role}.{key} {value!r}: {error}") from None
        merged.setdefault(role, {}).update(values)
    changed = _with(config, merged)
    check(changed)
    write_json(run.changed_requests, merged)
    return changed


def _with(config: CampaignConfig, changes: Changes) -> CampaignConfig:
    slurm = config.slurm.model_dump()
    for role, values in changes.items():
        section = slurm[role]
        for key, value in values.items():
            for name in section.keys() & set(OPTIONS[key]):
                del section[name]
            section[key] = value
            kept = OPTIONS[key] if value is None else OPTIONS[key][1:]  # Slurm refuses mem next to mem-per-cpu
            if shared := slurm.keys() & set(kept):
                raise ConfigError(f"slurm.{min(shared)} is set for every job of this run; plan a new run without it")
    return config.model_copy(update={"slurm": resolved(SlurmConfig, slurm)})


def _read(run: RunDir) -> dict[str, dict[str, Any]]:
    try:
        stored = read_json(run.changed_requests, dict[str, dict[str, Any]])
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{error}; remove the file and resume again") from None
    for values in stored.values():
        if "mem_gb" in values:  # of an earlier version
            values["mem"] = of_gigabytes(values.pop("mem_gb"))
    return stored
