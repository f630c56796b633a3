"""browser-use, unmodified, presses a button of a local page in a desktop's sandbox that reaches only the gateway.

It is not part of the suite, because it needs 400 MB from PyPI. ``launchers/test tests/agents/browser_use.py`` builds its
image as docs/how-to/screens.md says, over the image of desktops, and runs the script of that page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import open_trajectories
from tests.support.campaigns import cli, run_local
from tests.support.places import ROOT

PAGE = """\
<!doctype html><title>Form</title>
<button onclick="location.hash = 'pressed'; this.textContent = 'Pressed'">Go</button>
"""


def example(name: str) -> str:
    """Return a file that the page on screens shows."""
    text = (ROOT / "docs" / "how-to" / "screens.md").read_text()
    found = re.search(rf'```\w+ title="{re.escape(name)}"\n(.*?)\n```', text, re.DOTALL)
    assert found, f"docs/how-to/screens.md shows no {name}"
    return found[1] + "\n"


def step(**action: object) -> str:
    """An answer of browser-use's model: a plan, and one action."""
    plan = {"thinking": "so", "evaluation_previous_goal": "none", "memory": "none", "next_goal": "go on"}
    return json.dumps({**plan, "action": [action]})
