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
    records,
    servers,
    settings,
    tasks,
)
from tests.security.fuzz.target import Target

_MODULES = (dockerfiles, archives, journals, messages, campaign_files, tasks, settings, servers, answers, records)
TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (
        dockerfiles,
        archives,
        journals,
        messages,
        campaign_files,
        tasks,
        settings,
        servers,
        answers,
        records,
    )
    for target in module.targets()
}
