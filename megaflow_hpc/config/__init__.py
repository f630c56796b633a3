"""Reads and validates the campaign file: models of its sections, checks, and documentation of each key.

:func:`load` reads a YAML file into a :class:`CampaignConfig`. :func:`schema` exports the JSON Schema for editors.

Error messages name the file, line, value and remedy. Relative paths are resolved against the campaign file's directory.
"""

from megaflow_hpc.config.campaign import CampaignConfig, Policy, load, parse, parsed, read, resolved, schema
from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.reading import explain, line_of, place_of, read_yaml
from megaflow_hpc.config.sections import AgentConfig, Section
from megaflow_hpc.config.slurm import PodsConfig

__all__ = [
    "AgentConfig",
    "CampaignConfig",
    "ModelConfig",
    "PodsConfig",
    "Policy",
    "Section",
    "explain",
    "line_of",
    "load",
    "parse",
    "parsed",
    "place_of",
    "read",
    "read_yaml",
    "resolved",
    "schema",
]
