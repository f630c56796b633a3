"""Command-line parser with one-line errors, and help that fits the terminal.

For a mistyped verb, ``argparse`` prints a long usage and a list of all verbs. This parser prints a line with the
wrong word, the expected words and a suggestion.

Options cannot be abbreviated. A script that uses ``--roll`` would break once another option with this prefix is
added.

Options may appear before, between and after positional arguments. In plain ``argparse``, an option with several
values would also consume ``campaign.yaml``.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megaflow_hpc.cli.output import note
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import in_one_line


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs of descriptions. Leaves indented lines, such as examples, unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.splitlines(), ""]:
            if line.strip() and not line.startswith(" "):
                paragraph.append(line)
                continue
            if paragraph:
                lines += textwrap.wrap(" ".join(paragraph), width, break_long_words=False, break_on_hyphens=False)
                paragraph = []
            lines.append(line)
        return "\n".join(indent + line if line else "" for line in lines).rstrip()


class Parser(argparse.ArgumentParser):
    """Parser for the command line or for the arguments of a verb. Accepts ``--debug`` after any verb."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    def error(self, message: str) -> NoReturn:
        """Prints a one-line error and exits with status 2."""
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = re.sub(r"^the following arguments are required: ", "missing: ", message)
        note(in_one_line(f"{self.prog}: {message}; see: {self.prog} --help"))
        raise SystemExit(ConfigError.exit_status)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses like ``argparse``, but rejects unknown options in the parser of the verb, so that the error names
        the verb."""
        for word in self._own_words(args or ()):
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in self._option_string_actions:
                self.error(f"{name}: no such option{_suggestion(name, self._option_string_actions)}")
        words = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(words if verbs_of(self) else self._options_first(words), namespace)
        if unknown:
            word = next((word for word in unknown if word != "--"), "--")
            what = "no such option" if word.startswith("-") else "one argument too many"
            self.error(f"{word}: {what}")
        return parsed, []

    def _own_words(self, words: Sequence[str]) -> Iterable[str]:
        """Yields the words that this parser handles itself, up to a subcommand or ``--``."""
        verbs = verbs_of(self)
        for word in words:
            if word == "--" or (verbs and not word.startswith("-")):
                return
            yield word

    def _options_first(self, words: Sequence[str]) -> list[str]:
        """Moves options and their values to the front, followed by ``--`` and the positional arguments.

        An option with any number of values leaves enough words for the required positional arguments.
        """
        options: list[list[str]] = []
        others: list[tuple[int, str]] = []
        greedy: list[tuple[list[str], int]] = []
        index = 0
        while index < len(words):
            word = words[index]
            index += 1
            if word == "--":
                others += enumerate(words[index:], index)
                break
            if not self._is_option(word):
                others.append((index, word))
                continue
            options.append([word])
            nargs = self._option_string_actions[word].nargs if word in self._option_string_actions else 0
            most = nargs if isinstance(nargs, int) else 1
            if nargs in ("+", "*"):
                most = len(words)
            while len(options[-1]) <= most and index < len(words) and not self._is_option(words[index]):
                options[-1].append(words[index])
                index += 1
            if nargs in ("+", "*"):
                greedy.append((options[-1], index))
        own = [action.nargs for action in self._actions if not action.option_strings]
        lacking = sum(n if isinstance(n, int) else n in (None, "+") for n in own) - len(others)
        for option, behind in reversed(greedy):
            spare = max(0, min(lacking, len(option) - 2))
            lacking -= spare
            others += [(behind - n, option.pop()) for n in range(spare)]
        moved = [word for option in options for word in option]
        return [*moved, "--", *(word for _, word in sorted(others))] if others else moved

    def _is_option(self, word: str) -> bool:
        return word.startswith("-") and word != "-" and not self._negative_number_matcher.match(word)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            what = f"no such {(action.metavar or 'verb').lower()}"  # type: ignore[union-attr]
            hint = _suggestion(value, action.choices)
            raise argparse.ArgumentError(None, f"{value}: {what}{hint}")
        *others, last = map(str, action.choices)
        raise argparse.ArgumentError(
            action, f"{value}: expected {', '.join(others)} or {last}{_suggestion(value, action.choices)}"
        )


class CommandParser(Parser):
    """Parser for the whole command line. Its help groups the verbs by activity.

    Args:
        sections: Maps each title to its verbs, in display order.
    """

    def __init__(self, sections: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(**options)
        self._sections = sections

    def format_help(self) -> str:
        """Returns the help: usage, verbs by section, options and first steps."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, lines in self._verbs().items():
            formatter.start_section(title)
            formatter.add_arguments(lines)
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(action for action in self._actions if action.option_strings)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _verbs(self) -> dict[str, list[argparse.Action]]:
        [verbs] = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        helps = {line.dest: line.help for line in verbs._choices_actions}
        return {
            title: [argparse.Action([], name, help=helps[name]) for name in names if name in helps]
            for title, names in self._sections.items()
        }


def verbs_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the subparsers of ``parser`` by verb. Empty if it has no subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _suggestion(word: str, valid_words: Iterable[Any]) -> str:
    """Returns ``; did you mean …?`` if a valid word is similar, otherwise an empty string."""
    near = difflib.get_close_matches(word, map(str, valid_words), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""
