"""Defines the quotas of a campaign and the site's caps on them. Planning checks both.

The section ``quotas`` limits a campaign's model calls. The site file caps what a campaign may request, and its caps
also apply to campaigns without quotas.

Each worker rank has a gateway with an equal, fixed part of the quota. Gateways do not communicate. The total is never
exceeded, but it is not fully used while some pods are queued or have ended.

The site file is ``/etc/megaflow-hpc/site.yaml`` or, if that does not exist, the file named by ``MEGAFLOW_SITE_FILE``::

    caps: {requests_per_s: 200, tokens_per_s: 2.0e5, in_flight: 1000, pods: 16, servers: 8}
    users: {alice: {in_flight: 2000}}     # replaces single caps for this user
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from megaflow_hpc.config.sections import Section
from megaflow_hpc.config.slurm import PodsConfig
from megaflow_hpc.errors import ConfigError

SITE_FILE = Path("/etc/megaflow-hpc/site.yaml")


class QuotasConfig(Section):
    """Limits on the campaign's model calls, for endpoints or sites that restrict them. Calls above a limit wait."""

    requests_per_s: float | None = Field(None, gt=0)
    """Maximum number of model calls per second."""
    tokens_per_s: float | None = Field(None, gt=0)
    """Maximum number of tokens per second, prompts and answers together."""
    in_flight: int | None = Field(None, ge=1)
    """Maximum number of concurrent model calls. In an engine pool, the maximum applies to each user at
    each server."""

    @property
    def any(self) -> bool:
        """True if any limit is set."""
        return any(value is not None for value in self.model_dump().values())


class Caps(QuotasConfig):
    """Limits that a site sets on each campaign. No limits by default."""

    pods: int | None = Field(None, ge=1)
    """Maximum number of pods in all pools."""
    servers: int | None = Field(None, ge=1)
    """Maximum number of engine servers of all policies."""


class _SiteFile(Section):
    caps: Caps = Caps()
    users: dict[str, Caps] = Field(default_factory=dict)


def site_caps() -> tuple[Caps, str]:
    """Returns the current user's caps and the path of the site file. Returns no caps if there is no site file.

    Raises:
        ConfigError: The file cannot be read or is invalid.
    """
    named = os.environ.get("MEGAFLOW_SITE_FILE")
    if SITE_FILE.exists():
        path = SITE_FILE
    elif named:
        path = Path(named)
    else:
        return Caps(), ""
    try:
        site = _SiteFile.model_validate(yaml.safe_load(path.read_text()) or {})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: the site file cannot be used; ask its owner: {error}") from None
    own = site.users.get(getpass.getuser(), Caps())
    stated = {name: value for name, value in own.model_dump().items() if name in own.model_fields_set}
    return site.caps.model_copy(update=stated), str(path)


def gateways(pods: PodsConfig) -> int:
    """Returns the number of gateways, one for each worker rank of all pods. Rank 0 of a pod only schedules."""
    return pods.total * max(1, pods.nodes * pods.ranks - 1)


def settle(quotas: QuotasConfig, pods: PodsConfig, servers: int, caps: Caps, source: str) -> QuotasConfig:
    """Returns the effective quotas. The site's caps fill in those that the campaign omits.

    Args:
        servers: Maximum number of engine servers that the campaign requests.
        source: Path of the site file, for error messages.

    Raises:
        ConfigError: The campaign requests more than the site allows, or ``in_flight`` allows less than one call per
            rank.
    """
    requested = quotas.model_dump() | {"pods": pods.total, "servers": servers}
    labels = {"pods": "slurm.pods (of all pools)", "servers": "servers (of all policies)"}
    for name, value in requested.items():
        cap = getattr(caps, name)
        if value is not None and cap is not None and value > cap:
            label = labels.get(name, f"quotas.{name}")
            raise ConfigError(f"{label}: {value} is more than this site allows a campaign ({cap}, {source})")
    limits = {name: getattr(caps, name) for name in QuotasConfig.model_fields}
    limits |= {name: value for name, value in quotas.model_dump().items() if value is not None}
    effective = QuotasConfig(**limits)
    count = gateways(pods)
    if effective.in_flight is not None and effective.in_flight < count:
        raise ConfigError(
            f"quotas.in_flight: {effective.in_flight} shared out over {count} worker ranks is less than one each; "
            "use fewer pods or ranks (slurm.pods.count, ranks_per_node), or raise it"
            f"{f' (cap of {source})' if source else ''}"
        )
    return effective


def check_scale(wanted: int, pods: PodsConfig, quotas: QuotasConfig) -> None:
    """Checks that the site allows a running campaign to scale to ``wanted`` pods.

    Raises:
        ConfigError: The site's caps or the campaign's quotas do not allow it.
    """
    caps, source = site_caps()
    if caps.pods is not None and wanted > caps.pods:
        raise ConfigError(f"--pods {wanted}: more than this site allows a campaign ({caps.pods}, {source})")
    if quotas.any and wanted > pods.total:
        raise ConfigError(
            f"--pods {wanted}: the campaign's quotas are shared out among {pods.total} pods; plan a new run for more"
        )
