"""The man page, made from the parser of the command line: ``python launchers/docs.py pages`` writes it to share/man.

The tools that make man pages of parsers fill examples as if they were prose, and know nothing of our variables.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

ESCAPES = {"\\": r"\(rs", "-": r"\-", "^": r"\(ha", "~": r"\(ti", "`": r"\(ga", "'": r"\(aq"}
"""What roff would take for a request, an escape or another character."""


def page() -> str:
    """Returns the page in roff, in the macros of man."""
    from megaflow_hpc.cli import SECTIONS, build_parser
    from megaflow_hpc.cli.parser import verbs_of
    from megaflow_hpc.config.variables import PREFIX, VARIABLES
    from megaflow_hpc.resources import __version__

    parser = build_parser()
    verbs = verbs_of(parser)
    lines = [
        r".\" -*- coding: utf-8 -*-",
        rf'.TH MEGAFLOW\-HPC 1 "" "megaflow\-hpc {__version__}" "User Commands"',
        ".SH NAME",
        r"megaflow\-hpc \- LLM agent rollouts at scale on Slurm",
        ".SH SYNOPSIS",
        r"\fBmegaflow\-hpc\fR [\-\-json] [\-\-debug] \fIVERB\fR …",
        ".SH DESCRIPTION",
        *_text(parser.description or ""),
        *_text(parser.epilog or ""),
    ]
    for title, names in SECTIONS.items():
        lines.append(f".SH {_roff(title.upper())}")
        for name in names:
            lines += _verb(verbs[name])
    lines.append(".SH ENVIRONMENT")
    for title, variables in VARIABLES.items():
        lines.append(f".SS {_roff(title)}")
        for variable in variables:
            text = f"{variable.meaning}. Default: {variable.default}. Read by: {variable.reader}."
            lines += [".TP", rf"\fB{PREFIX}{variable.name}\fR", _roff(text)]
    return "\n".join(lines) + "\n"


def _verb(parser: argparse.ArgumentParser) -> Iterator[str]:
    from megaflow_hpc.cli.parser import verbs_of

    yield f".SS {_roff(parser.prog)}"
    yield from _text(parser.description or "")
    for action in parser._actions:
        name = ", ".join(action.option_strings)
        if isinstance(action, argparse._SubParsersAction) or name in ("-h, --help", "--debug", "--json"):
            continue
        choices = "|".join(map(str, action.choices or ()))
        value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
        yield ".TP"
        yield " ".join([rf"\fB{_roff(name)}\fR"] * bool(name) + [rf"\fI{_roff(value)}\fR"] * bool(value))
        yield _roff(str(action.help) % {"default": action.default})
    yield from _text(parser.epilog or "")
    for verb in dict.fromkeys(verbs_of(parser).values()):
        yield from _verb(verb)


def _text(text: str) -> Iterator[str]:
    """Paragraphs, filled; lines that are indented stay as they are."""
    as_is = False
    yield ".PP"
    for line in text.strip().splitlines():
        if line.startswith(" ") != as_is:
            as_is = not as_is
            yield ".nf" if as_is else ".fi"
        yield _roff(line) if line.strip() else ".PP"
    if as_is:
        yield ".fi"


def _roff(text: str) -> str:
    text = re.sub(r"[-^~`'\\]", lambda found: ESCAPES[found[0]], text)
    text = re.sub(r"https?://\S+", lambda found: found[0].replace("/", r"/\:"), text)  # may be broken there
    return rf"\&{text}" if text.startswith(".") else text
