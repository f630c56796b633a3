"""All targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.security.fuzz import answers, archives, campaign_files, dockerfiles, journals, json_lines, servers, tasks
from tests.security.fuzz.target import Target

_MODULES = (dockerfiles, archives, journals, campaign_files, tasks, json_lines, servers, answers)
TARGETS: Mapping[str, Target] = {target.name: target for module in _MODULES for target in module.targets()}
