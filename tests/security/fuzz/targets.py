"""All targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.security.fuzz import (
    answers,
    archives,
    campaign_files,
    dockerfiles,
    journals,
    messages,
    servers,
    settings,
    tasks,
)
from tests.security.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (dockerfiles, archives, journals, messages, campaign_files, tasks, settings, servers, answers)
    for target in module.targets()
}
