"""Runs the blocks of one page, one after another, in one directory.

Shell blocks share their variables and directory, Python blocks their names; a YAML block is checked as a campaign (or
as the form that its mark names) and written to the file that its title names. In ``console`` blocks what a command
prints is compared with what the page shows: ``…`` stands for anything, and numbers for any numbers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.config.campaign import parse
from tests.docs.blocks import Block

TIMEOUT_S = 300.0


class Session:
    """One page's directory, variables and names.

    Args:
        directory: working directory of its commands.
        environment: their variables.
    """

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self._environment = environment
        self._state = directory / ".session"
        self._state.mkdir()
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        """Run a block. Raises an error if it fails or its output differs from the page."""
        if block.title:
            file = self._cwd / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.source)
        getattr(self, f"_{block.language}")(block)

    @property
    def _cwd(self) -> Path:
        """Return the working directory after the last shell block."""
        place = self._state / "cwd"
        return Path(place.read_text().strip()) if place.exists() else self.directory

    def _yaml(self, block: Block) -> None:
        form, _, under = (block.value or "campaign").partition(" ") if block.mark == "form" else ("campaign", "", "")
        value = yaml.safe_load(textwrap.dedent(block.source))
        if form != "campaign":
            return  # a command on the page reads it
        for key in reversed(under.split(".") if under else []):
            value = {key: value}
        if "pool" not in value:  # a part of a campaign; complete it
            value = {"tasks": "tasks/*", "agent": "nop"} | value
        if "training" in value:
            value = {"samples": 2} | ({} if "models" in value else {"model": {}}) | value
        if "model" in value:
            value["model"].setdefault("path", "/models/some")
        parse({"name": "page"} | value, str(block))

    def _python(self, block: Block) -> None:
        if block.title:
            compile(block.source, str(block), "exec")
            return
        padded = "\n" * block.line + block.source
        exec(compile(padded, block.page, "exec"), self._names)

    def _sql(self, block: Block) -> None:
        import duckdb

        duckdb.sql(block.source.partition(";")[0]).fetchall()

    def _bash(self, block: Block) -> None:
        self._shell(block, block.source)

    def _console(self, block: Block) -> None:
        for command, expected in sessions(block.source):
            printed = self._shell(block, command)
            if expected:
                assert matches(expected, printed), f"{block}: {command}\nshows:\n{expected}\nprinted:\n{printed}"

    def _shell(self, block: Block, script: str) -> str:
        """Run a script in the state that the last one left; return its output on both streams."""
        state, variables = self._state, self._state / "variables"
        before = f"cd {shlex.quote(str(self.directory))}\n"
        if variables.exists():
            before = f'source {shlex.quote(str(variables))}\ncd "$(cat {shlex.quote(str(state / "cwd"))})"\n'
        after = f"declare -p | grep -v '^declare -[a-zA-Z]*r' > {variables}; pwd > {state / 'cwd'}"
        done = subprocess.run(
            ["bash", "-c", f"{before}set -euo pipefail\ntrap {shlex.quote(after)} EXIT\n{script}"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}: exit status {done.returncode}\n{script}\n{done.stdout}"
        return done.stdout


def sessions(text: str) -> list[tuple[str, str]]:
    """Split a ``console`` block into commands and their outputs."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def matches(expected: str, printed: str) -> bool:
    """Return whether a command printed what the page shows, except numbers, widths of columns and ``…``."""
    wanted = [re.escape(part) for part in _shape(expected).split("…")]
    return re.search(r".*?".join(wanted), _shape(printed), re.DOTALL) is not None


def _shape(text: str) -> str:
    text = re.sub(r"\d[\d.,:]*", "#", text)
    text = re.sub(r"-{2,}", "--", text)
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def variables(directory: Path) -> dict[str, str]:
    """Return the environment of a page's commands: this Python's ``megaflow-hpc`` first on PATH, and the page's own
    paths."""
    return {
        **os.environ,
        "HOME": str(directory),
        "COLUMNS": "120",
        "TERM": "dumb",
    }
