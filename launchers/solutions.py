#!/usr/bin/env python3
"""Writes the answers of a scripted engine that solves tasks by their reference patches.

usage: python launchers/solutions.py TASK_DIR... > solutions.yaml

A random model never writes a valid command. These answers come through the same gateway and drive the same agent, so
they show that what an agent does in its sandbox ends in a reward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml


def script_from_patch(instruction_snippet: str, patch: str) -> dict[str, Any]:
    """Returns an entry of a script's ``tasks`` that lets mini-swe-agent solve a task with a known patch.

    Args:
        instruction_snippet: A text that only this task's conversation contains.
        patch: A unified diff that applies with ``-p1`` from the sandbox's work directory, by git or patch.
    """
    delimiter = "END_OF_PATCH"
    while f"\n{delimiter}\n" in f"\n{patch}\n":
        delimiter += "_"
    apply = (
        f"cat > /tmp/fix.patch <<'{delimiter}'\n{patch.rstrip(chr(10))}\n{delimiter}\n"
        "if command -v git >/dev/null; then git apply -p1 -v /tmp/fix.patch; else patch -p1 -i /tmp/fix.patch; fi"
    )
    steps = [
        ("I look at the source tree first.", "pwd && ls -a"),
        ("The defect is clear; I apply the repair.", apply),
        ("The repair is in place, so I submit.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    answers = [f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```" for thought, command in steps]
    return {"when": instruction_snippet, "answers": answers}


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
