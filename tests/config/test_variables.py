"""Every variable that package, batch scripts, recipes and launchers name is listed, with its meaning or as internal."""

from __future__ import annotations

import re

from megaflow_hpc.config.variables import INTERNAL, PREFIX, VARIABLES
from tests.support.places import ROOT


def test_every_variable_in_the_code_is_listed_and_every_one_listed_is_in_the_code() -> None:
    folders = ("megaflow_hpc", "sbatch", "containers", "launchers", "share")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [
        path.read_text(errors="replace") for path in files if path.suffix != ".pyc" and path.name != "variables.py"
    ]
    found = {name for text in texts for name in re.findall(rf"\b{PREFIX}([A-Z][A-Z0-9_]*)", text)}
    listed = [variable.name for variables in VARIABLES.values() for variable in variables] + [*INTERNAL]
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "list it in megaflow_hpc/config/variables.py"
    assert set(listed) - found == set(), "nobody reads it any more"
