"""Writes the pages of the docs that are made from code, and builds the site.

usage: python launchers/docs.py pages [--check] | site [DIRECTORY]

``pages`` writes campaign-file.md, commands.md, request-options.md and variables.md in docs/reference, and the man page
in share/man. With ``--check`` it lists stale pages instead. ``site`` builds the whole site with MkDocs (``pip install
'megaflow-hpc[docs]'``) into DIRECTORY, build/site by default, and fails at a broken link.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

WIDTH = 100
"""Columns of help texts on the page."""

CAMPAIGN = """\
# The campaign file

Every key, as the code has it: unknown keys are errors, and every key but `name`, `tasks` and `agent` has a default.
Sections have a table of their own, under the path by which the file reaches them; `[]` stands for each entry of a list,
`NAME` for a name of your own. `megaflow-hpc check FILE` says what is wrong with a file.

"""

COMMANDS = """\
# Commands

What `megaflow-hpc --help` and `megaflow-hpc VERB --help` print. `--json` and `--debug` may stand before the verb too.
With `--json` stdout holds JSON and nothing else; errors are text on stderr all the same: a program tells them by the
exit status.

"""

VARIABLES = """\
# Variables

What can be set in the environment, as `megaflow-hpc help variables` prints it. Jobs take the variables of the shell
that submitted them.

"""

OPTIONS = """\
# Options of a model call

This page lists how the gateway handles each option of an agent's call, by API, and how the option affects `loss_mask`.
The gateway drops options that no table lists. A null value counts as missing.

A call is *free* if it is sampled under the policy's own settings (`model.sampling` in the campaign file) and nothing
constrains the answer. Tokens of a free call get `loss_mask` 1. Tokens of any other call get 0 and keep their `logprob`.
If a call omits a sampling option, the gateway sends the policy's setting.

"""

APIS = {
    "/chat/completions": "OpenAI's chat completions. The gateway converts the messages and responses APIs to it.",
    "/completions": "OpenAI's completions of a prompt.",
    "/messages": "Anthropic's messages, and `/v1/messages/count_tokens`.",
    "/responses": "OpenAI's responses.",
}
"""Path below ``/v1`` → description."""


def main() -> int:
    what, *rest = sys.argv[1:] or ["--help"]
    if what == "pages":
        stale = [(path, text) for path, text in pages() if not path.exists() or path.read_text() != text]
        for path, text in stale:
            print(path.relative_to(ROOT))
            if rest != ["--check"]:
                path.write_text(text)
        return int(bool(stale) and rest == ["--check"])
    if what == "site":
        directory = Path(rest[0] if rest else ROOT / "build" / "site").absolute()
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode
    print(__doc__)
    return 0 if what in ("-h", "--help") else 2


def pages() -> Iterator[tuple[Path, str]]:
    """Yields each page that is made from code, and its text."""
    from launchers import manpage
    from megaflow_hpc.config import reference, variables

    yield ROOT / "docs/reference/campaign-file.md", CAMPAIGN + reference.markdown()
    yield ROOT / "docs/reference/commands.md", COMMANDS + "\n".join(commands())
    yield ROOT / "docs/reference/request-options.md", OPTIONS + "\n".join(options())
    yield ROOT / "docs/reference/variables.md", VARIABLES + variables.markdown()
    yield ROOT / "share/man/man1/megaflow-hpc.1", manpage.page()


def options() -> Iterator[str]:
    """Yields the lines of the page on options of a model call."""
    from megaflow_hpc.model.gateway.dialects import TABLES

    for path, what in APIS.items():
        yield from (
            f"## `/v1{path}`",
            "",
            what,
            "",
            "| option | handling | `loss_mask` |",
            "| --- | --- | --- |",
        )
        rows: dict[tuple[str, str], list[str]] = {}
        for option, entry in sorted(TABLES[path].items()):
            constrains = (TABLES["/chat/completions"][entry.becomes] if entry.becomes else entry).constrains
            if entry.refused:
                fate = f"error 400 unless it is empty: {entry.refused}"
            elif not entry.passed:
                fate = "dropped"
            else:
                fate = f"passed on as `{entry.becomes}`" if entry.becomes not in ("", option) else "passed on"
            mask = ("0" if constrains == "always" else f"0 if {constrains}") if constrains else "1"
            rows.setdefault((fate, "no call" if entry.refused else mask), []).append(f"`{option}`")
        order = sorted(rows, key=lambda row: (row[1] == "no call", row[0] == "dropped", row[1] == "1", row))
        yield from (f"| {' '.join(rows[row])} | {row[0]} | {row[1]} |" for row in order)
        yield ""


def commands() -> Iterator[str]:
    """Yields the lines of the page of all verbs."""
    os.environ["COLUMNS"] = str(WIDTH)
    from megaflow_hpc.cli import build_parser

    parser = build_parser()
    yield from ("```text", parser.format_help().rstrip(), "```", "")
    yield from _helps(parser, 2)


def _helps(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if level > 2:
        yield from (
            f"{'#' * (level - 1)} `{parser.prog.partition(' ')[2]}`",
            "",
            "```text",
            parser.format_help().rstrip(),
            "```",
            "",
        )
    for action in subparsers:
        for verb in dict.fromkeys(action.choices.values()):
            yield from _helps(verb, level + 1)


if __name__ == "__main__":
    sys.exit(main())
