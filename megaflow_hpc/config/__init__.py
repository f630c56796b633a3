"""The campaign file: models of its sections, a description of each key, and errors with file, line, value and remedy.

:func:`load` reads YAML into a :class:`CampaignConfig`. :func:`schema` exports the JSON Schema for editors. Relative
paths in the file are relative to the file's directory.
"""

from megaflow_hpc.config.campaign import CampaignConfig, Policy, load, parse, parsed, read, resolved, schema
from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.reading import explain, line_of, place_of, read_yaml
from megaflow_hpc.config.sections import AgentConfig, Section
from megaflow_hpc.config.slurm import PodPoolConfig

__all__ = [
    "AgentConfig",
    "CampaignConfig",
    "ModelConfig",
    "PodPoolConfig",
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
