"""The small language inside a Dockerfile's lines: words, quotes, variables, here-documents, JSON forms.

Variables are replaced where their value is known from the file itself (``ARG``, ``ENV``). One that only the base image
can know, such as ``PATH``, stays as a reference for the shell of the build.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEREDOC = re.compile(
    r"(?<![<\w])\d*<<(?P<strip>-?)(?P<quote>[\"']?)(?P<name>[A-Za-z_][A-Za-z0-9_.]*)(?P=quote)(?=\s|$)"
)
_TAKES_HEREDOC = re.compile(r"\s*(?:ONBUILD\s+)?(?:RUN|COPY|ADD)\s", re.IGNORECASE)


class WordError(ValueError):
    """A line that cannot be read; says what and what to write instead."""


@dataclass(frozen=True)
class Reference:
    """A variable whose value only the build knows."""

    name: str


@dataclass(frozen=True)
class Heredoc:
    """A here-document: its ``body`` with line ends, whether variables are replaced in it, and the word as written."""

    name: str
    body: str
    expand: bool
    word: str


Text = Sequence[str | Reference]
"""A value in parts."""


def literal(text: Text) -> str:
    """The value as one text.

    Raises:
        WordError: names a variable in it that the file does not set.
    """
    for part in text:
        if isinstance(part, Reference):
            raise WordError(
                f"${part.name} is set neither by ARG nor by ENV in this file; set it, or write the value out"
            )
    return "".join(str(part) for part in text)


def is_known(text: Text) -> bool:
    """Whether the file alone tells the value."""
    return not any(isinstance(part, Reference) for part in text)


def shell_word(text: Text) -> str:
    """The value as one word of a POSIX shell script."""
    return (
        "".join(f'"${{{part.name}-}}"' if isinstance(part, Reference) else shlex.quote(part) for part in text) or "''"
    )


def expand(text: str, scope: Mapping[str, Text], *, quotes: bool = True) -> Text:
    """``text`` with its variables replaced and, with ``quotes``, its quotes and escapes removed."""
    words = _scan(text, scope, quotes=quotes, split=False)
    return words[0] if words else []


def words(text: str, scope: Mapping[str, Text]) -> list[Text]:
    """The words of a line, each with its variables replaced; what a variable holds is never split."""
    return _scan(text, scope, quotes=True, split=True)


def _scan(text: str, scope: Mapping[str, Text], *, quotes: bool, split: bool) -> list[Text]:
    found: list[list[str | Reference]] = []
    current: list[str | Reference] | None = None if split else []
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
        elif character == "\\" and text[position + 1 : position + 2] == "$":
            current.append("$")
            position += 2
        elif quotes and character in "\"'" and quote in ("", character):
            quote = "" if quote else character
            position += 1
        elif character == "$" and quote != "'":
            value, position = _variable(text, position, scope)
            current += value
        else:
            current.append(character)
            position += 1
    if quote:
        raise WordError(f"{text!r}: a {quote} is not closed; close it")
    if current is not None:
        found.append(current)
    return [_join(word) for word in found]


def _variable(text: str, start: int, scope: Mapping[str, Text]) -> tuple[Text, int]:
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
    other = expand(rest[operator.end() :], scope)
    if operator[0].endswith("-"):
        return (value or []) if is_set else other, end + 1
    return other if is_set else [], end + 1


FROM_BASE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL")
"""Variables that base images are known to set."""


def _value(name: str, scope: Mapping[str, Text]) -> Text:
    return scope[name] if name in scope else [Reference(name)]


def _closing(text: str, position: int) -> int:
    depth = 1
    for index in range(position, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise WordError(f"{text!r}: ${{ is not closed; add }}")


def _join(parts: list[str | Reference]) -> Text:
    joined: list[str | Reference] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return joined


def json_form(text: str) -> list[str] | None:
    """The words of ``["a", "b"]``; ``None`` where it is not that form, and then it is a shell's text, as in Docker."""
    if not text.startswith("["):
        return None
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and value and all(isinstance(word, str) for word in value) else None


def take_heredocs(lines: Sequence[str]) -> tuple[list[str], dict[int, list[Heredoc]]]:
    """Takes the bodies of here-documents out of a Dockerfile, for a parser that does not know them.

    Returns:
        The lines with a comment in place of each that was taken and of each blank one within a continuation, so that
        line numbers stay; and the here-documents by the number (from 0) of the line on which their instruction starts.
    """
    kept: list[str] = []
    found: dict[int, list[Heredoc]] = {}
    index = 0
    start: int | None = None
    logical = ""
    while index < len(lines):
        line = lines[index]
        stripped = line.strip()
        if start is None and (not stripped or stripped.startswith("#")):
            kept.append(line)
            index += 1
            continue
        if start is None:
            start, logical = index, ""
        elif not stripped or stripped.startswith("#"):
            kept.append("#\n")
            index += 1
            continue
        kept.append(line)
        index += 1
        body, backslash, _ = line.rstrip().rpartition("\\")
        if backslash and line.rstrip().endswith("\\"):
            logical += body
            continue
        logical += line
        if _TAKES_HEREDOC.match(logical) and json_form(logical.split(None, 1)[-1].strip()) is None:
            for match in _heredoc_words(logical):
                index = _take_body(lines, index, match, kept, found.setdefault(start, []))
        start = None
    return kept, found


def _heredoc_words(text: str) -> list[re.Match[str]]:
    """``<<NAME`` outside of quotes."""
    quoted = r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\""
    without = re.sub(quoted, lambda match: match[0] if _is_name(text, match) else "x" * len(match[0]), text)
    return [match for match in _HEREDOC.finditer(without)]


def _is_name(text: str, match: re.Match[str]) -> bool:
    """Whether a quoted stretch is the name of a here-document, as in ``<<'EOF'``."""
    return re.search(r"<<-?$", text[: match.start()]) is not None


def _take_body(lines: Sequence[str], index: int, match: re.Match[str], kept: list[str], found: list[Heredoc]) -> int:
    body: list[str] = []
    while index < len(lines):
        line = lines[index].lstrip("\t") if match["strip"] else lines[index]
        kept.append("#\n")
        index += 1
        if line.rstrip("\r\n") == match["name"]:
            found.append(Heredoc(match["name"], "".join(body), not match["quote"], match[0]))
            return index
        body.append(line)
    raise WordError(f"the here-document {match[0]} has no end; add a line {match['name']}")
