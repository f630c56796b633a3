"""Small tasks that benchmarks make for themselves, as Harbor directories on the image ``base``."""

from __future__ import annotations

import stat
from pathlib import Path


def write_task(task: Path, instruction: str, solution: str, test: str, sections: str = "") -> None:
    """Makes the directory ``task``.

    Args:
        solution, test: lines of shell.
        sections: further ones of ``task.toml``.
    """
    (task / "environment").mkdir(parents=True)
    (task / "task.toml").write_text(f'version = "1.0"\n{sections}[environment]\ndocker_image = "base"\n')
    (task / "instruction.md").write_text(f"{instruction}\n")
    for name, body in (("solution/solve.sh", solution), ("tests/test.sh", test)):
        (task / name).parent.mkdir()
        (task / name).write_text(f"#!/bin/bash\n{body}\n")
        (task / name).chmod(stat.S_IRWXU)
