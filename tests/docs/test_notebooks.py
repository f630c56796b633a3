"""Every notebook of the docs is executed, and shows what it stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.docs.session import matches

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def outputs(path: Path) -> list[tuple[list[str], str]]:
    """Return (kinds of the outputs, their text) of each code cell."""
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    found = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        kinds, text = [], ""
        for output in cell["outputs"]:
            data = output.get("data", {"stream": ""})
            kinds += sorted(data)
            text += "".join(output.get("text", data.get("text/plain", [])))
        found.append((kinds, text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_runs_as_it_stands_and_shows_what_it_stores(notebook: Path, tmp_path: Path) -> None:
    copy, place = tmp_path / notebook.name, tmp_path / "place"
    copy.write_text(notebook.read_text())
    place.mkdir()
    command = [sys.executable, "-m", "tests.support.notebooks", str(copy), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for number, (stored, shown) in enumerate(zip(outputs(notebook), outputs(copy), strict=True)):
        assert stored[0] == shown[0], f"cell {number}"
        assert matches(stored[1], shown[1]), f"cell {number}\nstores:\n{stored[1]}\nshows:\n{shown[1]}"
    assert any("image/png" in kinds for kinds, _ in outputs(copy)), "it ends with a plot"
