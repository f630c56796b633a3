"""List all targets by name."""

from __future__ import annotations

from tests.fuzz import answers, archives, dockerfiles, hdf5, journals, servers, tasks
from tests.fuzz.contract import Target

TARGETS: dict[str, Target] = {
    **dockerfiles.TARGETS,
    **archives.TARGETS,
    **journals.TARGETS,
    **hdf5.TARGETS,
    **tasks.TARGETS,
    **servers.TARGETS,
    **answers.TARGETS,
}
