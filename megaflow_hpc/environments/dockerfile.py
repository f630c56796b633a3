"""Dockerfile → Apptainer definition, in the Dockerfile's own order.

Parsing (continuations, comments, escapes, ``ARG``/``ENV`` substitution) is dockerfile-parse's. What follows is
one shell script in ``%post``: each ``RUN`` in a subshell with the directory, variables and shell options that hold at
its line, each ``COPY`` in between, from a copy of the context that ``%setup`` puts into the image and the last line
takes out. What cannot be expressed faithfully is refused with its line, never approximated.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
import os
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError

CONTEXT_DIR = "/.megaflow-context"
"""Where the build context is while ``%post`` runs."""

_COPY = """\
copy() {
  place=$2
  if [ -d "$1" ]; then
    mkdir -p "$place"; cp -a "$1/." "$place/"
  else
    if [ "$3" = into ] || [ -d "$place" ]; then place=${place%/}/${1##*/}; fi
    mkdir -p "$(dirname "$place")"; cp -p "$1" "$place"
  fi
  if [ -n "$4" ]; then chmod -R "$4" "$place"; fi
}"""
"""As Docker copies: of a directory its contents; a file under its own name where the target is a directory."""

_NO_EFFECT = {"LABEL", "EXPOSE", "VOLUME", "MAINTAINER", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK", "COMMENT"}
_OF_THE_CONTAINER = {"FROM", "ENV", "ARG", "WORKDIR", "USER"}


@dataclass
class Dockerfile:
    """A single-stage Dockerfile. ``environment``, ``workdir`` and ``user`` are those at its end."""

    path: Path
    base: str = ""
    steps: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    needs_build: bool = False
    uses_context: bool = False

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """Raises :class:`ConfigError` naming file and line for what is refused."""
        DockerfileParser = _parser().DockerfileParser
        with open(path, "rb") as file:
            structure = DockerfileParser(fileobj=file, env_replace=False).structure
        result = cls(path)
        state = _State(result)
        for instruction in structure:
            state.take(
                instruction["instruction"],
                instruction["value"] or "",
                instruction["startline"] + 1,
                instruction["content"],
            )
        if not result.base:
            raise ConfigError(f"{path}: no FROM; a Dockerfile starts with one")
        return result

    def definition(self, base_image: str, context: Path | None = None) -> str:
        """The definition file that builds onto ``base_image``, a SIF or an unpacked image on this machine."""
        context = context or self.path.parent
        lines = ["Bootstrap: localimage", f"From: {base_image}", ""]
        if self.uses_context:
            # The host's shell runs %setup: only our own quoted paths are in it.
            inside = f'"${{APPTAINER_ROOTFS}}"{CONTEXT_DIR}'
            lines += ["%setup", f"    mkdir -p {inside}", f"    cp -a {shlex.quote(str(context))}/. {inside}/", ""]
        # Steps are not indented: that would alter strings of several lines.
        lines += ["%post -c /bin/sh", "set -e", *([_COPY] if self.uses_context else []), *self.steps]
        lines += [f"rm -rf {CONTEXT_DIR}", ""] if self.uses_context else [""]
        if self.environment:
            lines += [
                "%environment",
                *(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()),
                "",
            ]
        return "\n".join(lines)


def last_workdir(path: Path) -> str | None:
    """The WORKDIR at the end of any Dockerfile, multi-stage or not, without judging its other lines.

    ``None`` if there is none, or if it depends on variables.
    """
    workdir: str | None = None
    text = re.sub(r"\\\s*\n", " ", path.read_text(encoding="utf-8", errors="replace"))
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        value = value.strip().strip("\"'")
        if name.upper() == "FROM":
            workdir = None
        elif name.upper() == "WORKDIR" and value:
            workdir = None if "$" in value else posixpath.normpath(posixpath.join(workdir or "/", value))
    return workdir


def _parser() -> Any:
    """dockerfile-parse, loaded only for tasks that bring a Dockerfile to build."""
    try:
        importlib.import_module("dockerfile_parse.util")
        return importlib.import_module("dockerfile_parse")
    except ImportError as error:
        raise SiteError(
            f"building Dockerfiles needs dockerfile-parse ({error}); pip install dockerfile-parse"
        ) from error


def context_digest(dockerfile: Dockerfile, base: str = "") -> str:
    """SHA-256 over the Dockerfile, its base and every file of its context (names, modes, contents)."""
    digest = hashlib.sha256(f"megaflow-dockerfile-1\0{base}\0".encode())
    digest.update(dockerfile.path.read_bytes())
    if dockerfile.uses_context:
        root = dockerfile.path.parent
        for directory, names, files in os.walk(root):
            names.sort()
            for name in sorted([*files, *(n for n in names if os.path.islink(os.path.join(directory, n)))]):
                path = Path(directory, name)
                digest.update(
                    f"\0{path.relative_to(root)}\0{path.lstat().st_mode:o}\0".encode("utf-8", "surrogateescape")
                )
                digest.update(os.readlink(path).encode() if path.is_symlink() else path.read_bytes())
    return digest.hexdigest()


class _State:
    """What holds at a line: directory, variables, user."""

    def __init__(self, result: Dockerfile) -> None:
        self.result = result
        self.args: dict[str, str] = {}
        self.global_args: dict[str, str] = {}
        self.line = 0
        self.ignored = _ignore_patterns(result.path.parent)

    def error(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.result.path}:{self.line}: {what}; {remedy}")

    def take(self, name: str, value: str, line: int, content: str) -> None:
        self.line = line
        if name in _NO_EFFECT:
            return
        if name != "ARG" and not self.result.base and name != "FROM":
            raise self.error(f"{name} before FROM", "a Dockerfile starts with FROM")
        handler = getattr(self, f"take_{name.lower()}", None)
        if handler is None:
            raise self.error(f"{name} is not supported", "build the image elsewhere and name it as docker_image")
        if name in ("RUN", "COPY", "ADD") and "<<" in content and _is_heredoc(value):
            raise self.error(
                f"{name} with a here-document is not supported", "put the text into a file of environment/"
            )
        handler(value)
        if name not in _OF_THE_CONTAINER:
            self.result.needs_build = True

    # --- instructions -------------------------------------------------------------------------------------------

    def take_from(self, value: str) -> None:
        if self.result.base:
            raise self.error(
                "a second FROM: multi-stage builds are not supported",
                "build the image elsewhere and name it as docker_image",
            )
        words = [word for word in value.split() if not word.startswith("--platform")]
        if not words or words[0].startswith("--"):
            raise self.error(f"FROM {value!r}", "write FROM IMAGE")
        self.global_args = dict(self.args)
        self.result.base = self.substitute(words[0], self.global_args)
        self.args = {}

    def take_arg(self, value: str) -> None:
        for word in self.words(value, substitute=True):
            name, equals, default = word.partition("=")
            if equals:
                self.args[name] = default
            elif name in self.global_args:
                self.args[name] = self.global_args[name]

    def take_env(self, value: str) -> None:
        words = self.words(value, substitute=True)
        if words and "=" not in words[0]:  # ENV NAME value with blanks
            name, _, rest = value.strip().partition(" ")
            pairs = {name: self.substitute(rest.strip(), self.scope())}
        else:
            if any("=" not in word for word in words):
                raise self.error(f"ENV {value!r}", "write ENV NAME=VALUE")
            pairs = dict(word.split("=", 1) for word in words)
        self.result.environment.update(pairs)

    def take_workdir(self, value: str) -> None:
        target = self.substitute(value.strip(), self.scope())
        self.result.workdir = posixpath.normpath(posixpath.join(self.result.workdir or "/", target))
        self.step(f"mkdir -p {shlex.quote(self.result.workdir)}")

    def take_user(self, value: str) -> None:
        self.result.user = self.substitute(value.strip(), self.scope())

    def take_run(self, value: str) -> None:
        options, rest = self.options(value)
        for option in options:
            if not option.startswith("--mount=type=cache") and not option.startswith("--network=default"):
                raise self.error(f"RUN {option} is not supported", "leave the option out, or build the image elsewhere")
        form = _json_form(rest)
        command = " ".join(map(shlex.quote, form)) if form is not None else f"/bin/sh -c {shlex.quote(rest)}"
        variables = {**self.args, **self.result.environment}
        exports = "".join(f" {name}={shlex.quote(text)}" for name, text in variables.items())
        export = f"export{exports} && " if exports else ""
        self.step(f"( cd {shlex.quote(self.result.workdir or '/')} && {export}{command} )")

    def take_copy(self, value: str) -> None:
        self.copy("COPY", value)

    def take_add(self, value: str) -> None:
        self.copy("ADD", value)

    def copy(self, name: str, value: str) -> None:
        options, rest = self.options(value)
        mode = ""
        for option in options:
            if option.startswith("--chmod="):
                mode = option.partition("=")[2]
            elif not option.startswith(("--chown=", "--link")):
                raise self.error(
                    f"{name} {option} is not supported", "leave the option out, or build the image elsewhere"
                )
        form = _json_form(rest)
        words = (
            [self.substitute(word, self.scope()) for word in form]
            if form is not None
            else self.words(rest, substitute=True)
        )
        if len(words) < 2:
            raise self.error(f"{name} {rest!r}", f"write {name} SOURCE… TARGET")
        *sources, target = words
        into = target.endswith("/") or len(sources) > 1 or target in (".", "..")
        full = posixpath.join(self.result.workdir or "/", target)
        self.result.uses_context = True
        for source in sources:
            if "://" in source or source.startswith("git@"):
                raise self.error(
                    f"{name} {source}: addresses are not supported", "download the file into environment/ and COPY it"
                )
            for match in self.context_paths(name, source):
                self.step(
                    _copy_line(match, self.result.path.parent / match, full, into or _has_wildcard(source), name, mode)
                )

    # --- parts --------------------------------------------------------------------------------------------------

    def context_paths(self, name: str, source: str) -> list[str]:
        """Paths below the context that a COPY source names, wildcards resolved; ``.dockerignore`` holds at the top."""
        clean = posixpath.normpath(source.lstrip("/") or ".")
        if clean.startswith(".."):
            raise self.error(f"{name} {source}: outside of the build context", "put the file into environment/")
        root = self.result.path.parent
        if _has_wildcard(clean):
            found = sorted(str(path.relative_to(root)) for path in root.glob(clean))
        else:
            found = [clean] if os.path.lexists(root / clean) else []
        found = [path for path in found if not any(fnmatch.fnmatch(path, pattern) for pattern in self.ignored)]
        if not found:
            raise self.error(f"{name} {source}: no such file in {root}", "add it, or correct the line")
        return found

    def scope(self) -> dict[str, str]:
        return {**self.args, **self.result.environment}

    def words(self, value: str, substitute: bool) -> list[str]:
        return list(_parser().util.WordSplitter(value, args={}, envs=self.scope() if substitute else {}).split())

    def substitute(self, text: str, scope: dict[str, str]) -> str:
        if ":-" in text or ":+" in text:
            raise self.error(f"{text!r}: ${{NAME:-default}} is not supported", "write the value out")
        return str(_parser().util.WordSplitter(text, args={}, envs=scope).dequote())

    def options(self, value: str) -> tuple[list[str], str]:
        options = []
        rest = value.strip()
        while rest.startswith("--"):
            option, _, rest = rest.partition(" ")
            options.append(option)
            rest = rest.strip()
        return options, rest

    def step(self, text: str) -> None:
        self.result.steps.append(text)


def _copy_line(source: str, on_host: Path, target: str, into: bool, name: str, mode: str) -> str:
    inside, place = shlex.quote(posixpath.join(CONTEXT_DIR, source)), shlex.quote(target)
    if name == "ADD" and on_host.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        return f"mkdir -p {place} && tar -C {place} --no-same-owner -xf {inside}"
    return f"copy {inside} {place} {'into' if into else 'as'} {shlex.quote(mode)}"


def _has_wildcard(text: str) -> bool:
    return any(character in text for character in "*?[")


def _is_heredoc(value: str) -> bool:
    """A word of the instruction itself is ``<<NAME``; ``RUN a << b`` inside quotes is the shell's affair."""
    return re.search(r"<<-?[\"']?[A-Za-z_]", value) is not None


def _json_form(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and value and all(isinstance(word, str) for word in value) else None


def _ignore_patterns(context: Path) -> list[str]:
    try:
        lines = (context / ".dockerignore").read_text().splitlines()
    except OSError:
        return []
    return [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith(("#", "!"))]
