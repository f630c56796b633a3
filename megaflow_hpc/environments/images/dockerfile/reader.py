"""Reads a Dockerfile's instructions into stages of steps, each with what holds at its line.

:mod:`.instructions` finds the instructions and their here-documents; :mod:`.words` replaces variables.
"""

from __future__ import annotations

import platform
import posixpath
import re
import shlex
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

from e2b_dockerfile_utils import DockerfileInstruction, parse_heredoc

from megaflow_hpc.environments.images.dockerfile.context import Context
from megaflow_hpc.environments.images.dockerfile.instructions import instructions
from megaflow_hpc.environments.images.dockerfile.steps import (
    DEFAULT_SHELL,
    Copy,
    Env,
    Mount,
    RunStep,
    Stage,
    Workdir,
    copies,
)
from megaflow_hpc.environments.images.dockerfile.words import (
    Text,
    VariableReference,
    WordError,
    expand,
    is_known,
    literal,
    shell_word,
)
from megaflow_hpc.errors import ConfigError

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
_MAX_ARGS = 1000
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PLATFORM = {
    f"{which}{part}": value
    for which in ("TARGET", "BUILD")
    for part, value in (
        ("PLATFORM", f"linux/{_ARCHITECTURE}"),
        ("OS", "linux"),
        ("ARCH", _ARCHITECTURE),
        ("VARIANT", ""),
        ("OSVERSION", ""),
    )
}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_WITHOUT_ARG = frozenset((*_PROXIES, *(name.lower() for name in _PROXIES)))
"""Arguments that a build takes without an ``ARG``."""


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
        self.unset: list[tuple[int, str]] = []
        """Line and name of each variable with a default that the file does not set, and a base image might."""
        self._global_args: dict[str, Text] = {}
        self._defaulted: list[str] = []
        """Such variables of the instruction that is being read."""
        self._stage: Stage | None = None
        self._line = 1

    def read(self) -> None:
        """Fills ``stages`` and ``ignored``."""
        path = self._path
        found = instructions(path)
        try:
            for instruction in found:
                self._line = instruction.start_line
                self._take(instruction)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path}:{self._line}: {error}") from None
        if self._stage is None:
            raise ConfigError(f"{path}: no FROM; a Dockerfile starts with one")

    def _take(self, found: DockerfileInstruction) -> None:
        name = found.name
        if self._stage is None and name not in ("ARG", "FROM"):
            raise WordError(f"{name} before FROM; a Dockerfile starts with FROM")
        if name in _IGNORED:
            self.ignored.append((self._line, name, _IGNORED[name]))
            return
        handler = getattr(self, f"_take_{name.lower()}", None)
        if handler is None:
            raise WordError(f"{name} is not supported; build the image elsewhere and name it as docker_image")
        self._defaulted = []
        handler(found)
        if self._stage is not None:  # before, there is no base image that might know better
            self.unset += [(self._line, variable) for variable in dict.fromkeys(self._defaulted)]

    # --- what holds from here on --------------------------------------------------------------------------------

    def _take_from(self, found: DockerfileInstruction) -> None:
        _options(found, ("platform",))
        words = [literal(expand(word, self._global_args)) for word in found.args]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise WordError(f"FROM {_value(found)!r}; write FROM IMAGE, or FROM IMAGE AS NAME")
        name = words[2].lower() if len(words) == 3 else str(len(self.stages))
        if words[0] == "scratch":
            raise WordError("FROM scratch: an image without a shell cannot be a sandbox; start from one that has one")
        if self._stage_named(name) is None and any(
            each.origin == name for stage in self.stages for each in copies(stage)
        ):
            raise WordError(f"FROM {words[0]} AS {name}: a stage before copies from it; move it up")
        parent = self._stage_named(words[0])
        self._stage = Stage(name, words[0])
        if parent:
            self._stage = Stage(
                name,
                parent.base,
                list(parent.steps),
                dict(parent.variables),
                parent.workdir,
                parent.user,
                parent.shell,
                dict(parent.args),
            )
        self.stages.append(self._stage)

    def _stage_named(self, name: str) -> Stage | None:
        stages = self.stages
        if name.isdecimal() and int(name) < len(stages):
            return stages[int(name)]
        return next((stage for stage in reversed(stages) if stage.name == name.lower()), None)

    def _take_arg(self, found: DockerfileInstruction) -> None:
        given = self._build_args
        parts = [word.partition("=") for word in found.args]
        defaults = [(self._text(name), self._expand(text) if sign else None) for name, sign, text in parts]
        for name, default in defaults:
            text: Text | None = [given[name]] if name in given else default
            if text is None:
                text = self._global_args.get(name) or ([_PLATFORM[name]] if name in _PLATFORM else None)
            if text is None:
                continue
            if self._stage is None:
                self._global_args[name] = [literal(text)]
            else:
                self._stage.args[name] = text
        if self._stage and len(self._stage.args) > _MAX_ARGS:  # each RUN step has them all
            raise WordError(f"more than {_MAX_ARGS} arguments; remove those that no RUN needs")

    def _take_env(self, found: DockerfileInstruction) -> None:
        stage = self._now()
        if not found.args:
            raise WordError("ENV without a variable; write ENV NAME=VALUE")
        names, values = found.args[::3], found.args[1::3]  # the third of each three is the sign between them
        pairs = [(self._text(name), self._expand(value)) for name, value in zip(names, values, strict=True)]
        # In one line of shell: what a value names is what it was before the instruction.
        stage.steps.append(Env("export " + " ".join(f"{name}={shell_word(text)}" for name, text in pairs)))
        for name, text in pairs:
            # What only the base image knows is looked up once, by the shell; from then on the variable stands for it.
            stage.variables[name] = text if is_known(text) else [VariableReference(name)]
            stage.args.pop(name, None)

    def _take_workdir(self, found: DockerfileInstruction) -> None:
        stage = self._now()
        stage.workdir = posixpath.normpath(posixpath.join(stage.workdir or ".", self._text(_value(found))))
        stage.steps.append(Workdir(stage.workdir, self._line, stage.user))

    def _take_user(self, found: DockerfileInstruction) -> None:
        self._now().user = self._text(_value(found))

    def _take_shell(self, found: DockerfileInstruction) -> None:
        if not found.json or not found.args:
            raise WordError(f'SHELL {_value(found)}; write SHELL ["/bin/bash", "-c"]')
        self._now().shell = tuple(found.args)

    # --- what changes the image ---------------------------------------------------------------------------------

    def _take_run(self, found: DockerfileInstruction) -> None:
        stage = self._now()
        options = _options(found, ("mount", "network"))
        for network in options.get("network", []):
            if network not in ("default", "host"):
                raise WordError(f"RUN --network={network} is not supported; a build has the network of its host")
        if not found.args:
            raise WordError("RUN without a command; write RUN COMMAND")
        if found.json:
            argv = found.args
        elif len(found.heredocs) == 1 and parse_heredoc(found.args[0]):
            body = found.heredocs[0].content
            script = re.match(r"#!\s*(.+)", body)
            # A body that names its interpreter is a program of its own; any other is the shell's text.
            argv = [*shlex.split(script[1]), "/dev/stdin"] if script else [*stage.shell, body]
            if script:
                argv = [*DEFAULT_SHELL, f"{shlex.join(argv)} <<'{_unused(body)}'\n{body}{_unused(body)}"]
        else:
            ends = "".join(f"\n{each.content}{each.name}" for each in found.heredocs)
            argv = [*stage.shell, found.args[0] + ends]
        known = {name: value for name, value in self._build_args.items() if name in _WITHOUT_ARG}
        known |= {name: literal(text) for name, text in stage.args.items()}
        mounts = [mount for text in options.get("mount", []) if (mount := self._mount(text))]
        stage.steps.append(RunStep(argv, stage.workdir or ".", stage.user, known, self._line, mounts))

    def _mount(self, text: str) -> Mount | None:
        fields = dict(part.partition("=")[::2] for part in self._text(text).split(","))
        kind = fields.get("type", "bind")
        if kind in ("secret", "ssh"):
            if fields.get("required", "false") not in ("", "true"):
                return None  # the command has to do without, as where none was given
            raise WordError(f"RUN --mount=type={kind},required: builds get no secrets; fetch what needs it beforehand")
        target = fields.get("target") or fields.get("dst") or fields.get("destination")
        if kind not in ("bind", "cache", "tmpfs") or not target:
            raise WordError(f"RUN --mount={text}: expected type=bind, cache or tmpfs, and target=PATH")
        place = posixpath.normpath(posixpath.join(self._now().workdir or ".", target))
        if kind != "bind":
            owner = f"{fields.get('uid', '0')}:{fields.get('gid', '0')}"
            mode = fields.get("mode", "1777" if kind == "tmpfs" else "755")
            if not re.fullmatch(r"[0-7]{1,4}", mode) or not re.fullmatch(r"\d{1,9}:\d{1,9}", owner):
                raise WordError(f"RUN --mount={text}: expected an octal mode, and numbers for uid and gid")
            return Mount(kind, place, None, "" if owner == "0:0" else owner, mode)
        source = fields.get("source") or fields.get("src") or "."
        copy = self._copy_of([source], place, into=False, origin=fields.get("from"))
        writable = any(fields.get(name, "false") in ("", "true") for name in ("rw", "readwrite"))
        return Mount(kind, place, copy, writable=writable)

    def _take_copy(self, found: DockerfileInstruction) -> None:
        self._place(found, ("from", "chown", "chmod", "link", "parents", "exclude"))

    def _take_add(self, found: DockerfileInstruction) -> None:
        self._place(found, ("chown", "chmod", "link", "exclude"))

    def _place(self, found: DockerfileInstruction, allowed: tuple[str, ...]) -> None:
        name, options = found.name, _options(found, allowed)
        words = [self._text(word) for word in found.args]
        *sources, target = words or [""]
        if not sources:
            raise WordError(f"{name} {_value(found)!r}; write {name} SOURCE… TARGET")
        into = target.endswith("/") or target in (".", "..") or posixpath.basename(target) == "."
        if len(sources) > 1 and not into:
            raise WordError(f"{name} {_value(found)!r}: several sources need a target that ends with /")
        texts = {}
        if found.heredocs:
            written = [parse_heredoc(word) for word in found.args[:-1]]
            sources = [source for source, heredoc in zip(sources, written, strict=True) if heredoc is None]
            named = {heredoc.name for heredoc in written if heredoc}
            for each in (each for each in found.heredocs if each.name in named):
                if not re.fullmatch(r"[\w+-][\w.+-]*", each.name):
                    raise WordError(f"{name} <<{each.name}: it names the file; write letters, digits and _.+-")
                text = self._expand(each.content, quotes=False) if each.expand else [each.content]
                texts[each.name] = literal(text)
        for source in sources:
            if re.match(r"[a-z+]+://|git@", source):
                raise WordError(
                    f"{name} {source}: addresses are not supported; download it into the context and COPY it"
                )
        for option in ("chown", "chmod", "from"):
            options[option] = [self._text(value) for value in options.get(option, [])]
        if "parents" in options and (options["from"] or any(re.search(r"\*\*|[^/]/\./", source) for source in sources)):
            raise WordError("--parents with **, with /./ or from another stage is not supported; name the directories")
        full = posixpath.join(self._now().workdir or ".", target)
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
        names = [name for source in sources for name in self._context.find(source)]
        return Copy(names, target, into, self._line, exclude=exclude)

    # --- parts --------------------------------------------------------------------------------------------------

    def _now(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def _scope(self) -> Mapping[str, Text]:
        if self._stage is None:
            return self._global_args
        return ChainMap(self._stage.args, self._stage.variables)

    def _expand(self, value: str, quotes: bool = True) -> Text:
        return expand(value, self._scope(), quotes=quotes, defaulted=self._defaulted)

    def _text(self, value: str) -> str:
        return literal(self._expand(value))


def _options(found: DockerfileInstruction, allowed: tuple[str, ...]) -> dict[str, list[str]]:
    """Values of the ``--name=value`` words at the beginning, by name."""
    options: dict[str, list[str]] = {}
    for flag in found.flags:
        name, _, value = flag[2:].partition("=")
        if name not in allowed:
            raise WordError(
                f"{found.name} --{name} is not supported; leave the option out, or build the image elsewhere"
            )
        options.setdefault(name, []).append(value)
    return options


def _value(found: DockerfileInstruction) -> str:
    """What follows the instruction's name and options."""
    return " ".join(found.args)


def _unused(body: str) -> str:
    """A here-document's end that the text does not hold."""
    name = "MEGAFLOW"
    while name in body:
        name *= 2
    return name
