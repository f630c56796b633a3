"""A Dockerfile's instructions, as e2b-dockerfile-utils reads them: a port of BuildKit's own parser.

A Dockerfile is somebody else's text. What would keep the parser busy for long is refused before it sees it.
"""

from __future__ import annotations

import re
from pathlib import Path

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
)

from megaflow_hpc.errors import ConfigError

MAX_CHARACTERS = 2**19
MAX_INSTRUCTIONS = 2000
_MAX_LINE_CHARACTERS = 65_535  # BuildKit's limit
_MAX_DIRECTIVE_CHARACTERS = 1000  # the parser's time grows with the square of a directive's length

_DIRECTIVE = re.compile(r"\s*#\s*\w+\s*=")
_HEREDOC = re.compile(r"(?<![\w\"'<])\d*<<-?([\"']?)([A-Za-z_][\w.]*)\1(?=\s|$)")


def instructions(path: Path) -> list[DockerfileInstruction]:
    """Reads the Dockerfile at ``path``: continuations are joined, and ``<<-`` bodies have lost their leading tabs.

    Raises:
        ConfigError: names file and line of what is no Dockerfile, or too large for one.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path}: more than {MAX_CHARACTERS} characters; COPY large texts from files of the context")
    lines = text.split("\n")
    _check(path, lines)
    try:
        found = parse_dockerfile_ast(text).instructions
    except DockerfileSyntaxError as error:
        raise ConfigError(f"{path}:{error.line}: {_explain(error, lines)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: brackets are nested too deeply to be read; write fewer") from None
    if len(found) > MAX_INSTRUCTIONS:
        raise ConfigError(f"{path}: {len(found)} instructions; at most {MAX_INSTRUCTIONS}: join some with &&")
    for each in found:
        if each.json:
            _check_words(path, each)
    for heredoc in (heredoc for each in found for heredoc in each.heredocs):
        if heredoc.chomp:
            heredoc.content = chomp_heredoc_content(heredoc.content)
    return found


def _check(path: Path, lines: list[str]) -> None:
    directives = True
    for number, line in enumerate(lines, 1):
        directives = directives and _DIRECTIVE.match(line) is not None
        refusal = ""
        if "\0" in line:
            refusal = "a NUL byte; a Dockerfile is text, remove it"
        elif len(line) > _MAX_LINE_CHARACTERS:
            refusal = f"a line of {len(line)} characters; Docker takes at most {_MAX_LINE_CHARACTERS}, split it"
        elif directives and len(line) > _MAX_DIRECTIVE_CHARACTERS:
            refusal = f"a directive of {len(line)} characters; write at most {_MAX_DIRECTIVE_CHARACTERS}"
        elif directives and re.match(r"\s*#\s*escape\s*=\s*`", line, re.IGNORECASE):
            refusal = "escape=` is not supported; write the file with backslashes"
        if refusal:
            raise ConfigError(f"{path}:{number}: {refusal}")


def _check_words(path: Path, found: DockerfileInstruction) -> None:
    """JSON spells what no path and no argument of a program holds."""
    for word in found.args:
        try:
            spelled = b"\0" not in word.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            spelled = False
        if not spelled:
            raise ConfigError(f"{path}:{found.start_line}: {word[:100]!r}: a NUL or half a character; remove it")


def _explain(error: DockerfileSyntaxError, lines: list[str]) -> str:
    """The parser's message with a remedy; it does not name the here-document that has no end."""
    message = str(error).removeprefix(f"Dockerfile parse error on line {error.line}: ")
    if message != "unterminated heredoc":
        return f"{message[:300]}; correct it, or build the image elsewhere and name it as docker_image"
    rest = lines[(error.line or 1) - 1 :]
    ends = {line.strip("\t") for line in rest}
    word = next((word for word in _HEREDOC.finditer("\n".join(rest)) if word[2] not in ends), None)
    if word is None:
        return "a here-document has no end; add its last line"
    return f"the here-document {word[0]} has no end; add a line {word[2]}"
