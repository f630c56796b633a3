"""Reads a Dockerfile's instructions into stages of steps, each with what holds at its line.

dockerfile-parse finds the instructions; words, variables and here-documents are read by :mod:`.words`.
"""

from __future__ import annotations

import importlib
import io
import platform
import posixpath
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.dockerfile.context import Context
from megaflow_hpc.environments.images.dockerfile.steps import DEFAULT_SHELL, Copy, Mount, Run, Shell, Stage
from megaflow_hpc.environments.images.dockerfile.words import (
    Heredoc,
    Text,
    WordError,
    expand,
    json_form,
    literal,
    shell_word,
    take_heredocs,
    words,
)
from megaflow_hpc.errors import ConfigError, SiteError

_IGNORED = {
    "LABEL": "a sandbox has no labels",
    "EXPOSE": "a sandbox publishes no ports",
    "VOLUME": "the directory is part of the writable layer",
    "MAINTAINER": "it changes nothing",
    "CMD": "a sandbox runs the agent's commands",
    "ENTRYPOINT": "a sandbox runs the agent's commands",
    "STOPSIGNAL": "a sandbox is always ended by SIGKILL",
    "HEALTHCHECK": "task.toml says how a task's environment is checked",
}
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PLATFORM = {
    f"{which}{part}": value
    for which in ("TARGET", "BUILD")
    for part, value in (("PLATFORM", f"linux/{_ARCHITECTURE}"), ("OS", "linux"), ("ARCH", _ARCHITECTURE))
}


class Reader:
    """Reads a file's instructions one by one into ``stages``.

    Raises:
        ConfigError: names file and line of what is refused.
    """

    def __init__(self, path: Path, context: Context, build_args: Mapping[str, str]) -> None:
        self._path = path
        self._context = context
        self._build_args = build_args
        self.stages: list[Stage] = []
        self.ignored: list[tuple[int, str, str]] = []
        """Line, instruction and reason of what has no meaning in a sandbox."""
        self._global_args: dict[str, Text] = {}
        self._args: dict[str, Text] = {}
        self._stage: Stage | None = None
        self._line = 1
        self._heredocs: list[Heredoc] = []

    def read(self) -> None:
        """Fills ``stages`` and ``ignored``."""
        path = self._path
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
        try:
            for number, line in enumerate(lines, 1):
                if re.match(r"\s*#\s*escape\s*=\s*`", line, re.IGNORECASE):
                    self._line = number
                    raise WordError("escape=` is not supported; write the file with backslashes")
                if not re.match(r"\s*#\s*\w+\s*=", line):
                    break
            kept, heredocs = take_heredocs(lines)
            parser = _parser()(fileobj=io.BytesIO("".join(kept).encode("utf-8", "surrogateescape")), env_replace=False)
            for found in parser.structure:
                if found["instruction"] != "COMMENT":
                    self._line = found["startline"] + 1
                    self._heredocs = heredocs.get(found["startline"], [])
                    self._take(found["instruction"], found["value"] or "")
        except (WordError, ConfigError) as error:
            raise ConfigError(f"{path}:{self._line}: {error}") from None
        if self._stage is None:
            raise ConfigError(f"{path}: no FROM; a Dockerfile starts with one")

    def _take(self, name: str, value: str) -> None:
        if name in _IGNORED:
            self.ignored.append((self._line, name, _IGNORED[name]))
            return
        if self._stage is None and name not in ("ARG", "FROM"):
            raise WordError(f"{name} before FROM; a Dockerfile starts with FROM")
        handler = getattr(self, f"_take_{name.lower()}", None)
        if handler is None:
            raise WordError(f"{name} is not supported; build the image elsewhere and name it as docker_image")
        handler(value.strip())

    # --- what holds from here on --------------------------------------------------------------------------------

    def _take_from(self, value: str) -> None:
        _, rest = _options("FROM", value, ("platform",))
        found = [literal(word) for word in words(rest, self._global_args)]
        if len(found) not in (1, 3) or (len(found) == 3 and found[1].upper() != "AS"):
            raise WordError(f"FROM {value!r}; write FROM IMAGE, or FROM IMAGE AS NAME")
        name = found[2].lower() if len(found) == 3 else str(len(self.stages))
        if found[0] == "scratch":
            raise WordError("FROM scratch: an image without a shell cannot be a sandbox; start from one that has one")
        parent = self._stage_named(found[0])
        self._stage = Stage(name, found[0])
        if parent:
            self._stage = Stage(
                name,
                parent.base,
                list(parent.steps),
                dict(parent.variables),
                list(parent.exports),
                parent.workdir,
                parent.user,
                parent.shell,
            )
        self.stages.append(self._stage)
        self._args = {}

    def _stage_named(self, name: str) -> Stage | None:
        stages = self.stages
        if name.isdecimal() and int(name) < len(stages):
            return stages[int(name)]
        return next((stage for stage in reversed(stages) if stage.name == name.lower()), None)

    def _take_arg(self, value: str) -> None:
        given = self._build_args
        for word in words(value, self._scope()):
            name, equals, _ = _split(word)
            if name in given:
                found: Text | None = [given[name]]
            elif equals:
                found = _split(word)[2]
            else:
                found = self._global_args.get(name) or ([_PLATFORM[name]] if name in _PLATFORM else None)
            if found is None:
                continue
            if self._stage is None:
                self._global_args[name] = [literal(found)]
            else:
                self._args[name] = found

    def _take_env(self, value: str) -> None:
        stage = self._now()
        found = words(value, self._scope())
        if not found:
            raise WordError("ENV without a variable; write ENV NAME=VALUE")
        if not _split(found[0])[1]:  # ENV NAME value with blanks
            name, _, rest = value.partition(" ")
            pairs = [(name, expand(rest.strip(), self._scope()))]
        else:
            pairs = [(_split(word)[0], _split(word)[2]) for word in found]
            if not all(_split(word)[1] for word in found):
                raise WordError(f"ENV {value!r}; write ENV NAME=VALUE")
        for name, text in pairs:
            line = f"export {name}={shell_word(text)}"
            stage.exports.append(line)
            stage.steps.append(Shell(line))
            stage.variables[name] = text

    def _take_workdir(self, value: str) -> None:
        stage = self._now()
        stage.workdir = posixpath.normpath(posixpath.join(stage.workdir or "/", self._text(value)))
        stage.steps.append(Shell(f"mkdir -p {shlex.quote(stage.workdir)}"))

    def _take_user(self, value: str) -> None:
        self._now().user = self._text(value)

    def _take_shell(self, value: str) -> None:
        found = json_form(value)
        if found is None:
            raise WordError(f'SHELL {value}; write SHELL ["/bin/bash", "-c"]')
        self._now().shell = tuple(found)

    # --- what changes the image ---------------------------------------------------------------------------------

    def _take_run(self, value: str) -> None:
        stage = self._now()
        options, rest = _options("RUN", value, ("mount", "network"))
        for network in options.get("network", []):
            if network not in ("default", "host"):
                raise WordError(f"RUN --network={network} is not supported; a build has the network of its host")
        argv = json_form(rest)
        if argv is None:
            if len(self._heredocs) == 1 and rest.strip() == self._heredocs[0].word:
                body = self._heredocs[0].body
                script = re.match(r"#!\s*(.+)", body)
                # A body that names its interpreter is a program of its own; any other is the shell's text.
                argv = [*shlex.split(script[1]), "/dev/stdin"] if script else [*stage.shell, body]
                if script:
                    argv = [*DEFAULT_SHELL, f"{shlex.join(argv)} <<'{_unused(body)}'\n{body}{_unused(body)}"]
            else:
                ends = "".join(f"\n{each.body}{each.name}" for each in self._heredocs)
                argv = [*stage.shell, rest + ends]
        known = {name: literal(text) for name, text in self._args.items() if name not in stage.variables}
        mounts = [mount for text in options.get("mount", []) if (mount := self._mount(text))]
        stage.steps.append(Run(argv, stage.workdir or "/", stage.user, known, self._line, mounts))

    def _mount(self, text: str) -> Mount | None:
        fields = dict(part.partition("=")[::2] for part in literal(expand(text, self._scope())).split(","))
        kind = fields.get("type", "bind")
        if kind in ("secret", "ssh"):
            if fields.get("required", "false") not in ("", "true"):
                return None  # the command has to do without, as where none was given
            raise WordError(f"RUN --mount=type={kind},required: builds get no secrets; fetch what needs it beforehand")
        target = fields.get("target") or fields.get("dst") or fields.get("destination")
        if kind not in ("bind", "cache", "tmpfs") or not target:
            raise WordError(f"RUN --mount={text}: expected type=bind, cache or tmpfs, and target=PATH")
        place = posixpath.normpath(posixpath.join(self._now().workdir or "/", target))
        if kind != "bind":
            owner = f"{fields.get('uid', '0')}:{fields.get('gid', '0')}"
            return Mount(place, None, "" if owner == "0:0" else owner)
        source = fields.get("source") or fields.get("src") or "."
        copy = self._copy_of([source], place, into=False, origin=fields.get("from"))
        return Mount(place, copy)

    def _take_copy(self, value: str) -> None:
        self._place("COPY", value, ("from", "chown", "chmod", "link", "parents", "exclude"))

    def _take_add(self, value: str) -> None:
        self._place("ADD", value, ("chown", "chmod", "link", "exclude"))

    def _place(self, name: str, value: str, allowed: tuple[str, ...]) -> None:
        options, rest = _options(name, value, allowed)
        form = json_form(rest)
        found = [expand(word, self._scope(), quotes=False) for word in form] if form else words(rest, self._scope())
        *sources, target = [literal(word) for word in found] or [""]
        if not sources:
            raise WordError(f"{name} {rest!r}; write {name} SOURCE… TARGET")
        into = target.endswith("/") or target in (".", "..") or posixpath.basename(target) == "."
        if len(sources) > 1 and not into:
            raise WordError(f"{name} {rest!r}: several sources need a target that ends with /")
        texts = {}
        by_name = {each.word.replace('"', "").replace("'", ""): each for each in self._heredocs}
        for source in [source for source in sources if source in by_name]:
            here = by_name[source]
            body = literal(expand(here.body, self._scope(), quotes=False)) if here.expand else here.body
            texts[here.name] = body
            sources.remove(source)
        for source in sources:
            if re.match(r"[a-z+]+://|git@", source):
                raise WordError(
                    f"{name} {source}: addresses are not supported; download it into the context and COPY it"
                )
        for each in ("chown", "chmod", "from"):
            options[each] = [literal(expand(text, self._scope())) for text in options.get(each, [])]
        full = posixpath.join(self._now().workdir or "/", target)
        exclude = tuple(options.get("exclude", []))
        copy = self._copy_of(sources, full, into, next(iter(options["from"]), None), exclude)
        copy.owner = (options["chown"] or [""])[0]
        copy.mode = (options["chmod"] or [""])[0]
        copy.extract, copy.parents, copy.texts = name == "ADD", "parents" in options, texts
        self._now().steps.append(copy)

    def _copy_of(
        self, sources: list[str], target: str, into: bool, origin: str | None, exclude: tuple[str, ...] = ()
    ) -> Copy:
        if origin is not None:
            if exclude or any(character in source for source in sources for character in "*?["):
                raise WordError("patterns in a copy from another stage are not supported; copy the directory")
            stage = self._stage_named(origin)
            if stage is self._stage and stage is not None:
                raise WordError(f"--from={origin}: a stage cannot copy from itself; name an earlier one")
            origin = stage.name if stage else origin
            return Copy([posixpath.join("/", source) for source in sources], target, into, self._line, origin)
        names = [name for source in sources for name in self._context.find(source, exclude)]
        return Copy(names, target, into or len(names) > 1, self._line, exclude=exclude)

    # --- parts --------------------------------------------------------------------------------------------------

    def _now(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def _scope(self) -> dict[str, Text]:
        if self._stage is None:
            return self._global_args
        return {**self._args, **self._stage.variables}

    def _text(self, value: str) -> str:
        return literal(expand(value, self._scope()))


def _options(instruction: str, value: str, allowed: tuple[str, ...]) -> tuple[dict[str, list[str]], str]:
    """The ``--name=value`` words at the beginning, and the rest."""
    found: dict[str, list[str]] = {}
    rest = value.strip()
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        name, _, text = option[2:].partition("=")
        if name not in allowed:
            raise WordError(
                f"{instruction} --{name} is not supported; leave the option out, or build the image elsewhere"
            )
        found.setdefault(name, []).append(text)
        rest = rest.strip()
    return found, rest


def _split(word: Text) -> tuple[str, bool, Text]:
    """``NAME=VALUE`` → name, whether there is a ``=``, value."""
    if not word or not isinstance(word[0], str):
        return "", False, []
    name, equals, rest = word[0].partition("=")
    return name, bool(equals), [*([rest] if rest else []), *word[1:]]


def _unused(body: str) -> str:
    """A here-document's end that the text does not hold."""
    name = "MEGAFLOW"
    while name in body:
        name += "_"
    return name


def _parser() -> Any:
    """dockerfile-parse, loaded only for tasks that bring a Dockerfile to build."""
    try:
        return importlib.import_module("dockerfile_parse").DockerfileParser
    except ImportError as error:
        raise SiteError(
            f"building Dockerfiles needs dockerfile-parse ({error}); pip install dockerfile-parse"
        ) from error
