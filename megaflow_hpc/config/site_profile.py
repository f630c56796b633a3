"""Finds and merges site profiles: settings shared by all campaigns at a site.

``site: NAME`` in a campaign file loads ``NAME.yaml`` from the first of these directories that contains it:
``~/.config/megaflow-hpc/sites``, the directories of ``MEGAFLOW_PROFILES``, and the package's ``sites/``. Example::

    slurm: {account: ml-group, setup: [module load apptainer], pods: {partition: cpu}, servers: {partition: gpu}}
    environment: {image_store: /group/ml/images, mirrors: {docker.io: registry.site.edu/hub}}
    model: {python: /group/ml/vllm}

``recognise`` describes the machines for which ``init`` offers the profile. A single match is enough::

    recognise: {cluster: [perlmutter], host: ["login*.site.edu"], environment: {NERSC_HOST: perlmutter}}

Mappings are merged key by key, and the campaign's keys win. Lists are not merged. ``model`` adds keys to every model of
the campaign, but creates no model. Profiles should use absolute paths, because relative paths are resolved against the
campaign file.

A profile may contain shell lines for jobs (``slurm.setup``). It is therefore rejected if anyone but the current user,
root and the owner of its directory can modify it.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.reading import explain_all, place_of, read_yaml
from megaflow_hpc.config.sections import Section
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.host.private import who_may_replace

VARIABLE = "MEGAFLOW_PROFILES"
SECTIONS = ("run_dir", "share", "model", "environment", "slurm", "scheduling", "limits", "quotas")
"""Keys that a profile may set."""
SHIPPED = Path(__file__).resolve().parent / "sites"
"""Directory of the profiles that the package ships."""


class Recognition(Section):
    """Patterns that identify a site for ``init``. All values are shell patterns. A single match is enough."""

    cluster: tuple[str, ...] = ()
    """Patterns of Slurm's ClusterName."""
    host: tuple[str, ...] = ()
    """Patterns of the host name, with or without its domain."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Pattern of an environment variable's value, by the variable's name."""

    def match(self, cluster: str) -> str:
        """Describes the first pattern that matches this machine. Returns an empty string if none matches."""
        for pattern in self.cluster:
            if cluster and fnmatchcase(cluster, pattern):
                return f"ClusterName={cluster}"
        for host in dict.fromkeys((socket.gethostname(), socket.gethostname().partition(".")[0])):
            if any(fnmatchcase(host, pattern) for pattern in self.host):
                return f"the host name {host}"
        for name, pattern in self.environment.items():
            if fnmatchcase(os.environ.get(name, ""), pattern):
                return f"{name}={os.environ.get(name, '')}"
        return ""


@dataclass(frozen=True)
class Profile:
    name: str
    file: str
    fields: Mapping[str, Any]
    node: yaml.MappingNode
    recognise: Recognition | None = None
    """Machines for which ``init`` offers the profile. ``None``: all machines."""

    @property
    def shipped(self) -> bool:
        """True if the profile ships with this package."""
        return Path(self.file).parent == SHIPPED

    def record(self) -> dict[str, Any]:
        """Returns the entry for ``run.json``."""
        return {"name": self.name, "file": self.file, "fields": dict(self.fields)}


def directories() -> list[Path]:
    """Returns the directories of profiles: the user's, then the group's, then the package's."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "megaflow-hpc" / "sites"
    group = [Path(part) for part in os.environ.get(VARIABLE, "").split(":") if part]
    return [own, *group, SHIPPED]


def names() -> list[str]:
    """Returns the names of all profiles, in the order of :func:`directories`."""
    return list(dict.fromkeys(path.stem for directory in directories() for path in sorted(directory.glob("*.yaml"))))


def find(name: str, place: str) -> Profile:
    """Returns the profile with this name.

    Args:
        place: Position of the name in the campaign file, for error messages.

    Raises:
        Mistakes: The profile is missing, unusable, or sets keys that it may not. The message names file and line.
    """
    path = next((file for d in directories() if (file := d / f"{name}.yaml").is_file()), None)
    if path is None or os.sep in name:
        close = difflib.get_close_matches(name.lower(), names(), 1)
        nearest = f"did you mean {close[0]!r}? " if close else ""
        looked = " and ".join(str(directory) for directory in directories() if directory != SHIPPED)
        raise ConfigError(
            f"{place}: site {name!r}: no such profile in {looked} ({VARIABLE}) or in the package; {nearest}there are: "
            f"{', '.join(sorted(names()))}"
        )
    # The user named the directory, so its owner is trusted. Other users are not.
    if why := who_may_replace(path, path.parent.stat().st_uid, "this site profile, which holds shell"):
        raise ConfigError(why)
    fields, node = read_yaml(path)
    if not isinstance(fields, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: has no sections; a site profile is YAML such as slurm: {{account: NAME}}")
    rule = fields.pop("recognise", None)
    wrong = [
        f"{place_of(node, [key], str(path))}: {key!r} is not allowed in a site profile; allowed: "
        f"{', '.join([*SECTIONS, 'recognise'])}"
        for key in fields
        if key not in SECTIONS
    ]
    recognise = None
    if rule is not None:
        try:
            recognise = Recognition.model_validate(rule)
        except ValidationError as error:
            below = next(value for key, value in node.value if key.value == "recognise")
            wrong += [f"{problem} (recognise)" for problem in explain_all(error, str(path), below, Recognition)]
    model = fields.get("model")
    for key in sorted(set(model) - set(ModelConfig.model_fields)) if isinstance(model, dict) else ():
        close = difflib.get_close_matches(str(key), ModelConfig.model_fields, 1)
        remedy = f"; did you mean {close[0]!r}?" if close else ""
        wrong.append(f"{place_of(node, ['model', key], str(path))}: unknown key 'model.{key}'{remedy}")
    if wrong:
        raise Mistakes(wrong)
    return Profile(name, str(path), fields, node, recognise)


def completed(
    fields: Mapping[str, Any], node: yaml.Node | None, profile: Profile
) -> tuple[dict[str, Any], yaml.Node | None]:
    """Merges the profile into a campaign. Returns the campaign's values and YAML nodes. The campaign's own keys win."""
    adds, nodes = dict(profile.fields), profile.node
    model = adds.get("model")
    if not isinstance(fields.get("model"), dict):  # a profile completes models, but adds none
        adds.pop("model", None)
    merged = _merged(fields, adds)
    model_node = next((value for key, value in nodes.value if key.value == "model"), None)
    kept = [(key, value) for key, value in nodes.value if key.value in adds]
    both = _merged_nodes(node, yaml.MappingNode(nodes.tag, kept, nodes.start_mark)) if node else None
    models = merged.get("models")
    if isinstance(model, dict) and isinstance(models, dict):
        merged["models"] = {n: _merged(own, model) if isinstance(own, dict) else own for n, own in models.items()}
        if both is not None and model_node is not None:
            own = next(value for key, value in both.value if key.value == "models")
            own.value = [(key, _merged_nodes(value, model_node)) for key, value in own.value]
    return merged, both


def _merged(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for key, value in other.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = _merged(merged[key], value)
    return merged


def _merged_nodes(own: yaml.Node, other: yaml.Node) -> yaml.Node:
    if not isinstance(own, yaml.MappingNode) or not isinstance(other, yaml.MappingNode):
        return own
    ours = {key.value: (key, value) for key, value in own.value}
    for key, value in other.value:
        mine = ours.get(key.value)
        ours[key.value] = (key, value) if mine is None else (mine[0], _merged_nodes(mine[1], value))
    return yaml.MappingNode(own.tag, list(ours.values()), own.start_mark, own.end_mark)
