#!/usr/bin/env python3
"""Writes the answers of a scripted engine that solves tasks by their reference patches.

usage: python launchers/solutions.py TASK_DIR... > solutions.yaml

A random model never writes a valid command. These answers come through the same gateway and drive the same agent, so
they show that what an agent does in its sandbox ends in a reward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from megaflow_hpc.model.engines.scripted.script import script_from_patch


def solution(task: Path) -> dict[str, object]:
    """The script of one task, recognised in a conversation by the first sentence of its instruction."""
    patches = sorted((task / "solution").glob("*.patch"))
    if len(patches) != 1:
        raise SystemExit(f"{task}/solution: {len(patches)} patches, expected one")
    first_line = next(line for line in (task / "instruction.md").read_text().splitlines() if line and line[0] != "#")
    return script_from_patch(first_line, patches[0].read_text())


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    yaml.safe_dump({"tasks": [solution(Path(task)) for task in sys.argv[1:]]}, sys.stdout, sort_keys=False)
