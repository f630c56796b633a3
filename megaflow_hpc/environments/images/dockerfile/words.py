"""The small language inside a Dockerfile's lines: words, quotes and variables.

Variables are replaced where their value is known from the file itself (``ARG``, ``ENV``). One that only the base image
can know, such as ``PATH``, stays as a reference for the shell of the build.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_MAX_DEPTH = 32


class WordError(ValueError):
    """A line that cannot be read; says what and what to write instead."""


@dataclass(frozen=True)
class VariableReference:
    """A variable whose value only the build knows."""

    name: str


Text = Sequence[str | VariableReference]
"""A value in parts."""


def literal(text: Text) -> str:
    """The value as one text.

    Raises:
        WordError: names a variable in it that the file does not set.
    """
    for part in text:
        if isinstance(part, VariableReference):
            raise WordError(
                f"${part.name} is set neither by ARG nor by ENV in this file; set it, or write the value out"
            )
    return "".join(str(part) for part in text)


def is_known(text: Text) -> bool:
    """Whether the file alone tells the value."""
    return not any(isinstance(part, VariableReference) for part in text)


def shell_word(text: Text) -> str:
    """The value as one word of a POSIX shell script."""
    return (
        "".join(f'"${{{part.name}-}}"' if isinstance(part, VariableReference) else shlex.quote(part) for part in text)
        or "''"
    )


def expand(text: str, scope: Mapping[str, Text], *, quotes: bool = True, defaulted: list[str] | None = None) -> Text:
    """``text`` with its variables replaced, its escapes and, with ``quotes``, its quotes removed.

    Args:
        defaulted: Gets the names of variables that ``scope`` lacks and for which a default or a substitute is written.
    """
    words = _scan(text, scope, quotes=quotes, split=False, defaulted=defaulted)
    return words[0] if words else []


def words(text: str, scope: Mapping[str, Text]) -> list[Text]:
    """The words of a line, each with its variables replaced; what a variable holds is never split."""
    return _scan(text, scope, quotes=True, split=True)


def _scan(
    text: str, scope: Mapping[str, Text], *, quotes: bool, split: bool, defaulted: list[str] | None = None
) -> list[Text]:
    found: list[list[str | VariableReference]] = []
    current: list[str | VariableReference] | None = None if split else []
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        if split and not quote and character.isspace():
            if current is not None:
                found.append(current)
            current = None
            position += 1
            continue
        if current is None:
            current = []
        if quotes and character == "\\" and quote != "'" and position + 1 < len(text):
            following = text[position + 1]
            # Within double quotes a backslash escapes only what would be special there.
            keeps = quote == '"' and following not in '"$\\'
            current.append(character + following if keeps else following)
            position += 2
        elif not quotes and character == "\\" and position + 1 < len(text):
            current.append(text[position + 1])
            position += 2
        elif quotes and character in "\"'" and quote in ("", character):
            quote = "" if quote else character
            position += 1
        elif character == "$" and quote != "'":
            value, position = _variable(text, position, scope, defaulted)
            current += value
        else:
            current.append(character)
            position += 1
    if quote:
        raise WordError(f"{text!r}: a {quote} is not closed; close it")
    if current is not None:
        found.append(current)
    return [_join(word) for word in found]


def _variable(text: str, start: int, scope: Mapping[str, Text], defaulted: list[str] | None) -> tuple[Text, int]:
    """The value of the variable at ``start`` and the position behind it."""
    plain = _NAME.match(text, start + 1)
    if plain:
        return _value(plain[0], scope), plain.end()
    if text[start + 1 : start + 2] != "{":
        return ["$"], start + 1
    end = _closing(text, start + 2)
    inside = text[start + 2 : end]
    name = _NAME.match(inside)
    if name is None:
        raise WordError(f"{text[start : end + 1]!r}: expected the name of a variable")
    rest = inside[name.end() :]
    if not rest:
        return _value(name[0], scope), end + 1
    operator = re.match(r":?[-+]", rest)
    if operator is None:
        raise WordError(f"{text[start : end + 1]!r} is not supported; write ${{NAME}}, ${{NAME:-default}} or the value")
    value = scope.get(name[0])
    is_set = value is not None and (not operator[0].startswith(":") or bool(value))
    if value is None and name[0] in FROM_BASE:
        raise WordError(f"{text[start : end + 1]!r}: only the base image knows {name[0]}; write ${{{name[0]}}}")
    if value is None and defaulted is not None:
        defaulted.append(name[0])
    other = expand(rest[operator.end() :], scope, defaulted=defaulted)
    if operator[0].endswith("-"):
        return (value or []) if is_set else other, end + 1
    return other if is_set else [], end + 1


FROM_BASE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL")
"""Variables that base images are known to set."""


def _value(name: str, scope: Mapping[str, Text]) -> Text:
    return scope[name] if name in scope else [VariableReference(name)]


def _closing(text: str, position: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
        if depth > _MAX_DEPTH:
            raise WordError(f"${{ is nested more than {_MAX_DEPTH} deep; set variables in between")
    raise WordError(f"{text!r}: ${{ is not closed; add }}")


def _join(parts: list[str | VariableReference]) -> Text:
    joined: list[str | VariableReference] = []
    for is_reference, run in itertools.groupby(parts, lambda part: isinstance(part, VariableReference)):
        if is_reference:
            joined += run
        elif text := "".join(map(str, run)):
            joined.append(text)
    return joined
