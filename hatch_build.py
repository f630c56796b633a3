"""Compiles the program that starts commands in sandboxes, for the wheel, and in a clone (``python hatch_build.py``).

By ziglang, where that is installed, for every machine that the program knows; else by a C compiler of this machine for
this machine. Where there is neither, the shells of runner.sh do the same more slowly.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "megaflow_hpc" / "environments" / "sandbox" / "commands"
MACHINES = ("x86_64", "aarch64")
OPTIONS = (
    *("-O1", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-pie", "-no-pie", "-fno-stack-protector"),
    *("-fno-asynchronous-unwind-tables", "-fno-sanitize=all", "-Wl,--build-id=none", "-s"),
)


def compilers() -> dict[str, list[str]]:
    """Machine → words of a compiler for it."""
    if importlib.util.find_spec("ziglang") is not None:
        zig = [sys.executable, "-m", "ziglang", "cc", "-target"]
        return {machine: [*zig, f"{machine}-linux-musl"] for machine in MACHINES}
    own = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    return {machine: [own] for machine in MACHINES if own and machine == os.uname().machine}


def build() -> list[Path]:
    """Compiles the program beside its source; returns what was made."""
    made = []
    for machine, words in compilers().items():
        target = HERE / f"runner-{machine}"
        with tempfile.TemporaryDirectory(dir=HERE, prefix=".build-") as place:
            partial = Path(place, target.name)
            done = subprocess.run(
                [*words, *OPTIONS, "-o", str(partial), str(HERE / "runner.c")], capture_output=True, text=True
            )
            if done.returncode:
                print(f"{words[0]}: {target.name} was not made: {done.stderr.strip()[-2000:]}", file=sys.stderr)
                continue
            os.replace(partial, target)
        made.append(target)
    return made


if __name__ == "__main__":
    print(*build(), sep="\n")
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Called by hatchling; what it makes is named as an artifact in pyproject.toml."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compiles before files are gathered."""
            if not build():
                self.app.display_warning("no compiler made the sandboxes' runner; shells will start their commands")
