"""Writes the pages of the docs that are made from code, and builds the site.

usage: python launchers/docs.py pages [--check] | site [DIRECTORY]

``pages`` writes campaign-file.md, commands.md, python.md, request-options.md, task-sets.md and variables.md in
docs/reference, recipes.md in docs/how-to, and the man page in share/man. With ``--check`` it lists stale pages instead.
``site`` builds the whole site with MkDocs (``pip install 'megaflow-hpc[docs]'``) into DIRECTORY, build/site by default,
and fails at a broken link.
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

`megaflow-hpc check FILE` reports every error in a file. Unknown keys are errors. A key is optional unless it is
required; without a default it is unset. Each section has a heading: `[]` stands for an entry of a list, `NAME` for a
name that you choose.

"""

COMMANDS = """\
# Commands

This page shows what `megaflow-hpc VERB --help` prints, without its examples. A heading is how a verb is called, without
options. `CAMPAIGN` is a campaign file. `RUN` is a run directory, or `latest`: the newest one here. `show`, `diff`,
`export`, `report`, `validate`, `verify`, `compact`, `anonymise` and `du` also take a `trajectories.h5`.

Every verb takes `-h` and `--debug`, which shows the traceback of an error. All but `completion` and `help` take
`--json`: stdout then holds only JSON; errors are text on stderr. Both may precede the verb.

Exit status: 0 every rollout was carried out, whatever its reward; 1 some could not be carried out; 2 a bad file or
argument; 3 the site refused; 130 interrupted.

"""

COMMON_OPTIONS = {"help", "debug", "json"}
COMMON_ARGUMENTS = {
    "run directory, or latest: the newest here",
    "run directory, a trajectories.h5, or latest: the newest here",
    "campaign file (YAML)",
}
"""Help texts of arguments that the top of the page explains."""
LONG_HELP = 5
"""If an option is repeated with the same help of at least so many words, later verbs refer to the first one."""

VARIABLES = """\
# Variables

`megaflow-hpc help variables` prints this list. In brackets: what reads the variable. Jobs take the variables of the
shell that submitted them.

"""

RECIPES = """\
# Recipes

A recipe is a complete campaign to start from: tasks, an agent, a rehearsal and figures to compare with.

<!-- not run: tests/recipes runs every recipe -->
```bash
megaflow-hpc recipes                       # the list
megaflow-hpc recipes reasoning             # what one needs, and its figures
megaflow-hpc init --recipe reasoning       # writes its files into the directory reasoning
cd reasoning && python make.py
megaflow-hpc run rehearsal.yaml --launcher local
megaflow-hpc run campaign.yaml
```

`init` writes this site's partitions, account and walltimes into the campaign files, and prints the commands that
follow. The rehearsal takes seconds and no model: right solutions must get reward 1, and doing nothing 0. Then set
`model.path` in `campaign.yaml`.

## All recipes

"""

SETS = """\
# Task sets by name

`megaflow-hpc tasks import NAME` reads these sets ([how](../how-to/swebench.md#import-a-set-by-name)). The numbers and
licences come from each set's own pages, and are left out if no page states them.

The ten sets of the MegaFlow paper ([arXiv 2601.07526](https://arxiv.org/abs/2601.07526), table 1) are listed, and all
but SWE-Flow and the first Terminal-Bench are read. Its training (table 2) took 2,438 tasks of SWE-Gym, 21,336 of
SWE-rebench, 4,723 of Multi-SWE-RL, and 30,274 that are not public.

"""

OPTIONS = """\
# Options of a model call

How the gateway handles each option of an agent's call, by API, and how the option affects `loss_mask`. The gateway
drops options that no table lists. A refused option is an error 400 that names it, unless its value is null or empty.

A call is *free* if it is sampled under the policy's own settings (`model.sampling` in the campaign file) and nothing
constrains the answer. Its tokens get `loss_mask` 1. Tokens of any other call get 0 and keep their `logprob`. If a call
omits a sampling option, the gateway sends the policy's setting.

"""

APIS = {
    "/chat/completions": "OpenAI's chat completions. The gateway converts the messages and responses APIs to it.",
    "/completions": "OpenAI's completions of a prompt. As for chat completions, but without the options of chats, such "
    "as `messages` and `tools`, which are dropped. In addition:",
    "/messages": "Anthropic's messages, and `/v1/messages/count_tokens`.",
    "/responses": "OpenAI's responses.",
    "/models/MODEL:generateContent": "Gemini's generateContent, also below `/v1beta`, with "
    "`:streamGenerateContent?alt=sse` and `:countTokens`. Fields of `generationConfig` are converted one by one; a "
    "temperature, `topP`, `topK` or penalty that differs from the policy's `sampling`, and JSON, give `loss_mask` 0.",
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
    from launchers import manpage, python_reference
    from megaflow_hpc.config import reference, variables

    yield ROOT / "docs/reference/campaign-file.md", CAMPAIGN + reference.markdown()
    yield ROOT / "docs/reference/commands.md", COMMANDS + "\n".join(commands())
    yield ROOT / "docs/reference/python.md", python_reference.page()
    yield ROOT / "docs/reference/request-options.md", OPTIONS + "\n".join(options())
    yield ROOT / "docs/reference/variables.md", VARIABLES + variables.markdown()
    yield ROOT / "docs/reference/task-sets.md", SETS + "\n".join(sets())
    yield ROOT / "docs/how-to/recipes.md", RECIPES + "\n".join(recipes())
    yield ROOT / "share/man/man1/megaflow-hpc.1", manpage.page()


def recipes() -> Iterator[str]:
    """Yields the lines of the page on recipes."""
    from megaflow_hpc.recipes import find_recipe, recipe_names
    from megaflow_hpc.resources import PROJECT

    found = [find_recipe(name) for name in recipe_names()]
    yield from ("| recipe | what it is | image | GPU | packages |", "| --- | --- | --- | --- | --- |")
    for recipe in found:
        packages = ", ".join(f"{p.name} {p.version} ({p.licence})" for p in recipe.needs.packages) or "none"
        readme = f"{PROJECT}/blob/main/share/recipes/{recipe.name}/README.md"
        cells = (f"[`{recipe.name}`]({readme})", recipe.summary, recipe.needs.image, recipe.needs.gpu, packages)
        yield f"| {' | '.join(cells)} |"
    yield from ("", "## Figures", "")
    yield "Published figures to compare with. `megaflow-hpc recipes NAME` names their sources, and what the recipe gave"
    yield "here, with model, machine and time. Only tiny models were measured here (SmolLM2-135M-Instruct and smaller);"
    yield "they solve little or nothing. Solutions get 1 and doing nothing 0."
    yield from ("", "| recipe | published |", "| --- | --- |")
    yield from (f"| `{recipe.name}` | {'; '.join(e.figure for e in recipe.expected)} |" for recipe in found)
    yield ""


def sets() -> Iterator[str]:
    """Yields the lines of the page on task sets."""
    from megaflow_hpc.tasks.sets.download import task_sets

    for name, each in sorted(task_sets().items()):
        sizes = ((each.bytes, "download"), (each.image_bytes, "images"))
        parts = [f"{each.tasks:,} tasks"] if each.tasks and isinstance(each.tasks, int) else []
        parts += [f"{what} {_size(size)}" for size, what in sizes if size and isinstance(size, int)]
        parts += [f"images: {each.images}"] if each.images not in ("", "unknown") else []
        parts += [f"licence: {each.licence}"] if each.licence not in ("", "unknown") else []
        parts.append(f"read as {each.format}" if each.format else f"not read: {each.unread}")
        yield f"- `{name}` ([{each.title}]({each.page})): {'; '.join(parts)}"
    yield ""


def _size(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def options() -> Iterator[str]:
    """Yields the lines of the page on options of a model call."""
    from megaflow_hpc.model.gateway.dialects import TABLES

    chat: dict[str, tuple[str, str]] = {}
    for path, what in APIS.items():
        yield from (
            f"## `/v1{path}`",
            "",
            what,
            "",
            "| option | handling | `loss_mask` |",
            "| --- | --- | --- |",
        )
        handling: dict[str, tuple[str, str]] = {}
        for option, entry in sorted(TABLES[path].items()):
            constrains = (TABLES["/chat/completions"][entry.becomes] if entry.becomes else entry).constrains
            if entry.refused:
                fate = f"refused: {entry.refused.removeprefix('is ')}"
            elif not entry.passed:
                continue
            else:
                fate = f"passed on as `{entry.becomes}`" if entry.becomes not in ("", option) else "passed on"
            mask = ("0" if constrains == "always" else f"0 if {constrains}") if constrains else "1"
            handling[option] = fate, "" if entry.refused else mask
        if path == "/chat/completions":
            chat = handling
        if path == "/completions":
            handling = {option: row for option, row in handling.items() if chat.get(option) != row}
        rows: dict[tuple[str, str], list[str]] = {}
        for option, row in handling.items():
            rows.setdefault(row, []).append(f"`{option}`")
        order = sorted(rows, key=lambda row: (not row[1], row[1] == "1", row))
        yield from (f"| {' '.join(rows[row])} | {row[0]} | {row[1]} |" for row in order)
        yield ""


def commands() -> Iterator[str]:
    """Yields the lines of the page of all verbs."""
    os.environ["COLUMNS"] = str(WIDTH)
    from megaflow_hpc.cli import SECTIONS, build_parser

    parsers = {parser.prog.partition(" ")[2]: parser for parser in _verbs(build_parser())}
    seen: dict[str, str] = {}
    for section, verbs in SECTIONS.items():
        yield from (f"## {section[0].upper()}{section[1:]}", "")
        for verb in verbs:
            yield from _helps(parsers[verb], 3, seen)


def _helps(parser: argparse.ArgumentParser, level: int, seen: dict[str, str]) -> Iterator[str]:
    """Yields the help of a verb and of the verbs in its group.

    Args:
        parser: the verb's.
        level: of its heading.
        seen: help texts that were printed, and the verb that has each.
    """
    name = parser.prog.partition(" ")[2]
    verbs = _verbs(parser)
    if verbs:
        yield from (f"{'#' * level} `{name}`", "", parser.description or "", "")
        for verb in verbs:
            yield from _helps(verb, level + 1, seen)
        return
    usage = parser._get_formatter()
    required = [action for action in parser._actions if action.required or not action.option_strings]
    usage.add_usage(None, required, [], "")
    heading = " ".join(usage.format_help().split()).removeprefix(f"{parser.prog} ")
    heading = name if heading == parser.prog else f"{name} {heading}"
    arguments: list[argparse.Action] = []
    repeated: dict[str, list[str]] = {}
    for action in parser._actions:
        text = action.help or ""
        if action.dest in COMMON_OPTIONS or text in COMMON_ARGUMENTS or text == argparse.SUPPRESS:
            continue
        if len(text.split()) >= LONG_HELP and seen.setdefault(text, name) != name:
            shown = action.option_strings[-1:] or [str(action.metavar or action.dest)]
            repeated.setdefault(seen[text], []).extend(shown)
        else:
            arguments.append(action)
    formatter = parser._get_formatter()
    formatter.add_text(parser.description)
    formatter.start_section(None)
    formatter.add_arguments(arguments)
    formatter.end_section()
    formatter.add_text("; ".join(f"as for {verb}: {', '.join(options)}" for verb, options in repeated.items()))
    formatter.add_text(None if (parser.epilog or "").startswith("example") else parser.epilog)
    yield from (f"{'#' * level} `{heading}`", "", "```text", formatter.format_help().strip(), "```", "")


def _verbs(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return list(dict.fromkeys(verb for group in groups for verb in group.choices.values()))


if __name__ == "__main__":
    sys.exit(main())
