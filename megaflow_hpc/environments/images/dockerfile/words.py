"""Handles quotes, escapes and variables in Dockerfile lines.

A variable that the file itself sets (``ARG``, ``ENV``) is expanded. A variable that only the base image sets, such as
``PATH``, remains a reference that the build's shell resolves.
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
    """Raised for an invalid line of a Dockerfile. The message includes the remedy."""


@dataclass(frozen=True)
class VariableReference:
    """A variable whose value is not known before the build."""

    name: str


Text = Sequence[str | VariableReference]
"""A value as a sequence of literal parts and variable references."""


def literal(text: Text) -> str:
    """Returns the value as one string.

    Raises:
        WordError: The value contains a variable that the file does not set.
    """
    for part in text:
        if isinstance(part, VariableReference):
            raise WordError(
                f"${part.name} is set neither by ARG nor by ENV in this file; set it, or write the value out"
            )
    return "".join(str(part) for part in text)


def is_known(text: Text) -> bool:
    """Returns whether the value is known before the build."""
    return not any(isinstance(part, VariableReference) for part in text)


def shell_word(text: Text) -> str:
    """Quotes the value as a single word for a POSIX shell."""
    parts = []
    for part in text:
        parts.append(f'"${{{part.name}-}}"' if isinstance(part, VariableReference) else shlex.quote(part))
    return "".join(parts) or "''"


def expand(text: str, scope: Mapping[str, Text], *, quotes: bool = True, defaulted: list[str] | None = None) -> Text:
    """Expands variables and removes escapes.

    Args:
        quotes: Also remove quotes.
        defaulted: Collects the names of variables that are missing from ``scope`` but have a default or alternative.

    Raises:
        WordError: A quote or brace is not closed, or the form of a variable is not supported.
    """
    parts: list[str | VariableReference] = []
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        following = text[position + 1 : position + 2]
        if character == "\\" and following and quote != "'":
            # Inside double quotes, a backslash escapes only special characters.
            keeps = quote == '"' and following not in '"$\\'
            parts.append(character + following if keeps else following)
            position += 2
        elif quotes and character in "\"'" and quote in ("", character):
            quote = "" if quote else character
            position += 1
        elif character == "$" and quote != "'":
            value, position = _variable(text, position, scope, defaulted)
            parts += value
        else:
            parts.append(character)
            position += 1
    if quote:
        raise WordError(f"{text!r}: a {quote} is not closed; close it")
    return _join(parts)


def _variable(text: str, start: int, scope: Mapping[str, Text], defaulted: list[str] | None) -> tuple[Text, int]:
    """Expands the variable at ``start``. Returns its value and the position after it."""
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
    if value is None and name[0] in FROM_BASE:
        raise WordError(f"{text[start : end + 1]!r}: only the base image knows {name[0]}; write ${{{name[0]}}}")
    if value is None and defaulted is not None:
        defaulted.append(name[0])
    alternative = expand(rest[operator.end() :], scope, defaulted=defaulted)
    is_set = value is not None
    if operator[0].startswith(":"):  # ${NAME:-…} also replaces an empty value.
        is_set = bool(value)
    if operator[0].endswith("+"):
        return alternative if is_set else [], end + 1
    return (value or []) if is_set else alternative, end + 1


FROM_BASE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL")
"""Variables that base images often set. The parser rejects defaults for them."""


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
    """Joins consecutive literal parts."""
    joined: list[str | VariableReference] = []
    for is_reference, run in itertools.groupby(parts, lambda part: isinstance(part, VariableReference)):
        if is_reference:
            joined += run
        elif text := "".join(map(str, run)):
            joined.append(text)
    return joined
