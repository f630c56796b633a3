"""Parses a Dockerfile into stages of steps. Each step has the settings in effect at its line.

e2b-dockerfile-utils, a port of BuildKit's parser, splits the file into instructions. :mod:`.words` expands variables.
:mod:`megaflow_hpc.environments.builds` executes the steps. Lines that cannot be built as in Docker are rejected with
their line number. Instructions that have no meaning in a sandbox are listed in ``ignored``, with the reason. A
Dockerfile is untrusted, so it is first checked for input that would take too long to parse.
"""

from __future__ import annotations

import hashlib
import platform
import posixpath
import re
import shlex
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
    parse_heredoc,
)

from megaflow_hpc.environments.images.dockerfile.context import Context
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

MAX_CHARACTERS = 2**19
MAX_INSTRUCTIONS = 2000
_MAX_LINE_CHARACTERS = 65_535  # BuildKit's limit
_MAX_DIRECTIVE_CHARACTERS = 1000  # parsing time is quadratic in a directive's length
_MAX_ARGS = 1000

_DIRECTIVE = re.compile(r"\s*#\s*\w+\s*=")
_HEREDOC = re.compile(r"(?<![\w\"'<])\d*<<-?([\"']?)([A-Za-z_][\w.]*)\1(?=\s|$)")

_IGNORED = {
    "LABEL": "a sandbox has no labels",
    "EXPOSE": "only services have ports",
    "VOLUME": "the directory is part of the writable layer",
    "MAINTAINER": "it changes nothing",
    "CMD": "a sandbox runs the agent's commands, unless it is a service",
    "ENTRYPOINT": "a sandbox runs the agent's commands, unless it is a service",
    "STOPSIGNAL": "a sandbox is always ended by SIGKILL",
    "HEALTHCHECK": "task.toml says how a task's environment is checked",
}
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
"""Predefined build arguments, which need no ``ARG``."""


# --- instructions ---------------------------------------------------------------------------------------------------


def instructions(path: Path) -> list[DockerfileInstruction]:
    """Parses the Dockerfile at ``path``. Joins continuation lines and strips leading tabs in ``<<-`` bodies.

    Raises:
        ConfigError: The file is not a Dockerfile or is too large. The message names the file and the line.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path}: more than {MAX_CHARACTERS} characters; COPY large texts from files of the context")
    lines = text.split("\n")
    _check_lines(path, lines)
    try:
        parsed = parse_dockerfile_ast(text).instructions
    except DockerfileSyntaxError as error:
        raise ConfigError(f"{path}:{error.line}: {_explain(error, lines)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: brackets are nested too deeply to be read; write fewer") from None
    if len(parsed) > MAX_INSTRUCTIONS:
        raise ConfigError(f"{path}: {len(parsed)} instructions; at most {MAX_INSTRUCTIONS}: join some with &&")
    for instruction in parsed:
        if instruction.json:
            _check_json(path, instruction)
        for heredoc in instruction.heredocs:
            if heredoc.chomp:
                heredoc.content = chomp_heredoc_content(heredoc.content)
    return parsed


def _check_lines(path: Path, lines: list[str]) -> None:
    in_directives = True
    for number, line in enumerate(lines, 1):
        in_directives = in_directives and _DIRECTIVE.match(line) is not None
        refusal = ""
        if "\0" in line:
            refusal = "a NUL byte; a Dockerfile is text, remove it"
        elif len(line) > _MAX_LINE_CHARACTERS:
            refusal = f"a line of {len(line)} characters; Docker allows at most {_MAX_LINE_CHARACTERS}, split it"
        elif in_directives and len(line) > _MAX_DIRECTIVE_CHARACTERS:
            refusal = f"a directive of {len(line)} characters; write at most {_MAX_DIRECTIVE_CHARACTERS}"
        elif in_directives and re.match(r"\s*#\s*escape\s*=\s*`", line, re.IGNORECASE):
            refusal = "escape=` is not supported; write the file with backslashes"
        if refusal:
            raise ConfigError(f"{path}:{number}: {refusal}")


def _check_json(path: Path, instruction: DockerfileInstruction) -> None:
    """Rejects JSON strings that cannot be a path or a program argument."""
    for word in instruction.args:
        try:
            is_valid = b"\0" not in word.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{path}:{instruction.start_line}: {word[:100]!r}: a NUL or half a character; remove it")


def _explain(error: DockerfileSyntaxError, lines: list[str]) -> str:
    """Adds a remedy to the parser's message. Also names an unterminated here-document, which the message omits."""
    message = str(error).removeprefix(f"Dockerfile parse error on line {error.line}: ")
    if message != "unterminated heredoc":
        return f"{message[:300]}; correct it, or build the image elsewhere and name it as docker_image"
    rest = lines[(error.line or 1) - 1 :]
    ends = {line.strip("\t") for line in rest}
    for word in _HEREDOC.finditer("\n".join(rest)):
        if word[2] not in ends:
            return f"the here-document {word[0]} has no end; add a line {word[2]}"
    return "a here-document has no end; add its last line"


# --- stages ---------------------------------------------------------------------------------------------------------


class Reader:
    """Converts a Dockerfile's instructions to ``stages``.

    Raises:
        ConfigError: A line is rejected. The message names the file and the line.
    """

    def __init__(self, path: Path, context: Context, build_args: Mapping[str, str]) -> None:
        self._path = path
        self._context = context
        self._build_args = build_args
        self.stages: list[Stage] = []
        self.ignored: list[tuple[int, str, str]] = []
        """Instructions that have no effect in a sandbox, as (line, name, reason)."""
        self.unset: list[tuple[int, str]] = []
        """Variables that the file uses with a default but does not set, as (line, name). The base image might set
        them."""
        self._global_args: dict[str, Text] = {}
        self._defaulted: list[str] = []
        """Names of unset variables with a default in the current instruction."""
        self._current: Stage | None = None
        self._line = 1

    def read(self) -> None:
        path = self._path
        parsed = instructions(path)
        try:
            for instruction in parsed:
                self._line = instruction.start_line
                self._take(instruction)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path}:{self._line}: {error}") from None
        if self._current is None:
            raise ConfigError(f"{path}: no FROM; a Dockerfile starts with one")

    def _take(self, instruction: DockerfileInstruction) -> None:
        name = instruction.name
        if self._current is None and name not in ("ARG", "FROM"):
            raise WordError(f"{name} before FROM; a Dockerfile starts with FROM")
        if name in _IGNORED:
            self.ignored.append((self._line, name, _IGNORED[name]))
            self._take_start(instruction)
            return
        handler = getattr(self, f"_take_{name.lower()}", None)
        if handler is None:
            raise WordError(f"{name} is not supported; build the image elsewhere and name it as docker_image")
        self._defaulted = []
        handler(instruction)
        if self._current is not None:  # Before the first FROM there is no base image to set them.
            self.unset += [(self._line, variable) for variable in dict.fromkeys(self._defaulted)]

    # --- instructions that affect later steps -------------------------------------------------------------------

    def _take_from(self, instruction: DockerfileInstruction) -> None:
        _options(instruction, ("platform",))
        words = [literal(expand(word, self._global_args)) for word in instruction.args]
        has_name = len(words) == 3 and words[1].upper() == "AS"
        if len(words) != 1 and not has_name:
            raise WordError(f"FROM {_value(instruction)!r}; write FROM IMAGE, or FROM IMAGE AS NAME")
        if words[0] == "scratch":
            raise WordError("FROM scratch: an image without a shell cannot be a sandbox; start from one that has one")
        name = words[2].lower() if has_name else str(len(self.stages))
        if self._stage_named(name) is None:
            origins = {copy.origin for stage in self.stages for copy in copies(stage)}
            if name in origins:
                raise WordError(f"FROM {words[0]} AS {name}: a stage before copies from it; move it up")
        parent = self._stage_named(words[0])
        if parent is None:
            self._current = Stage(name, words[0])
        else:
            self._current = Stage(
                name,
                parent.base,
                list(parent.steps),
                dict(parent.variables),
                parent.workdir,
                parent.user,
                parent.shell,
                dict(parent.args),
                parent.entrypoint,
                parent.command,
                parent.ports,
            )
        self.stages.append(self._current)

    def _stage_named(self, name: str) -> Stage | None:
        stages = self.stages
        if name.isdecimal() and int(name) < len(stages):
            return stages[int(name)]
        return next((stage for stage in reversed(stages) if stage.name == name.lower()), None)

    def _take_arg(self, instruction: DockerfileInstruction) -> None:
        # Expand all defaults before setting any argument.
        defaults: list[tuple[str, Text | None]] = []
        for word in instruction.args:
            name, sign, text = word.partition("=")
            defaults.append((self._text(name), self._expand(text) if sign else None))
        for name, default in defaults:
            value: Text | None = default
            if name in self._build_args:
                value = [self._build_args[name]]
            if value is None:
                value = self._global_args.get(name) or ([_PLATFORM[name]] if name in _PLATFORM else None)
            if value is None:
                continue
            if self._current is None:
                self._global_args[name] = [literal(value)]
            else:
                self._current.args[name] = value
        if self._current and len(self._current.args) > _MAX_ARGS:  # Every RUN step gets a copy of all of them.
            raise WordError(f"more than {_MAX_ARGS} arguments; remove those that no RUN needs")

    def _take_env(self, instruction: DockerfileInstruction) -> None:
        stage = self._stage()
        if not instruction.args:
            raise WordError("ENV without a variable; write ENV NAME=VALUE")
        # The parser returns the name, value and separator of each variable.
        names, values = instruction.args[::3], instruction.args[1::3]
        pairs = [(self._text(name), self._expand(value)) for name, value in zip(names, values, strict=True)]
        # Use one shell line, because values refer to the variables as they were before the instruction.
        stage.steps.append(Env("export " + " ".join(f"{name}={shell_word(text)}" for name, text in pairs)))
        for name, text in pairs:
            # The shell evaluates a value that depends on the base image once. Later uses refer to the variable.
            stage.variables[name] = text if is_known(text) else [VariableReference(name)]
            stage.args.pop(name, None)

    def _take_workdir(self, instruction: DockerfileInstruction) -> None:
        stage = self._stage()
        stage.workdir = posixpath.normpath(posixpath.join(stage.workdir or ".", self._text(_value(instruction))))
        stage.steps.append(Workdir(stage.workdir, self._line, stage.user))

    def _take_user(self, instruction: DockerfileInstruction) -> None:
        self._stage().user = self._text(_value(instruction))

    def _take_shell(self, instruction: DockerfileInstruction) -> None:
        if not instruction.json or not instruction.args:
            raise WordError(f'SHELL {_value(instruction)}; write SHELL ["/bin/bash", "-c"]')
        self._stage().shell = tuple(instruction.args)

    def _take_start(self, instruction: DockerfileInstruction) -> None:
        """Records the program that the image runs as a service."""
        stage = self._stage()
        words = tuple(instruction.args if instruction.json else [*stage.shell, *instruction.args])
        if instruction.name == "CMD":
            stage.command = words
        elif instruction.name == "ENTRYPOINT":
            stage.entrypoint, stage.command = words, stage.command or ()  # an ENTRYPOINT cancels the base image's CMD
        elif instruction.name == "EXPOSE":
            with suppress(WordError):
                stage.ports += tuple(self._text(word) for word in instruction.args)

    # --- steps that change the image ----------------------------------------------------------------------------

    def _take_run(self, instruction: DockerfileInstruction) -> None:
        stage = self._stage()
        options = _options(instruction, ("mount", "network"))
        for network in options.get("network", []):
            if network not in ("default", "host"):
                raise WordError(f"RUN --network={network} is not supported; a build has the network of its host")
        if not instruction.args:
            raise WordError("RUN without a command; write RUN COMMAND")
        exports = {name: value for name, value in self._build_args.items() if name in _WITHOUT_ARG}
        exports |= {name: literal(text) for name, text in stage.args.items()}
        mounts = list(filter(None, map(self._mount, options.get("mount", []))))
        argv = _run_argv(instruction, stage.shell)
        stage.steps.append(RunStep(argv, stage.workdir or ".", stage.user, exports, self._line, mounts))

    def _mount(self, text: str) -> Mount | None:
        fields = dict(part.partition("=")[::2] for part in self._text(text).split(","))
        kind = fields.get("type", "bind")
        if kind in ("secret", "ssh"):
            if fields.get("required", "false") not in ("", "true"):
                return None  # As in Docker, the command must work without it.
            raise WordError(f"RUN --mount=type={kind},required: builds get no secrets; fetch what needs it beforehand")
        target = fields.get("target") or fields.get("dst") or fields.get("destination")
        if kind not in ("bind", "cache", "tmpfs") or not target:
            raise WordError(f"RUN --mount={text}: expected type=bind, cache or tmpfs, and target=PATH")
        target = posixpath.normpath(posixpath.join(self._stage().workdir or ".", target))
        if kind == "bind":
            source = fields.get("source") or fields.get("src") or "."
            copy = self._copy([source], target, into=False, origin=fields.get("from"))
            writable = any(fields.get(name, "false") in ("", "true") for name in ("rw", "readwrite"))
            return Mount(kind, target, copy, writable=writable)
        owner = f"{fields.get('uid', '0')}:{fields.get('gid', '0')}"
        mode = fields.get("mode", "1777" if kind == "tmpfs" else "755")
        if not re.fullmatch(r"[0-7]{1,4}", mode) or not re.fullmatch(r"\d{1,9}:\d{1,9}", owner):
            raise WordError(f"RUN --mount={text}: expected an octal mode, and numbers for uid and gid")
        return Mount(kind, target, None, "" if owner == "0:0" else owner, mode)

    def _take_copy(self, instruction: DockerfileInstruction) -> None:
        self._copy_or_add(instruction, ("from", "chown", "chmod", "link", "exclude"))

    def _take_add(self, instruction: DockerfileInstruction) -> None:
        self._copy_or_add(instruction, ("chown", "chmod", "link", "exclude"))

    def _copy_or_add(self, instruction: DockerfileInstruction, allowed: tuple[str, ...]) -> None:
        name, options = instruction.name, _options(instruction, allowed)
        words = [self._text(word) for word in instruction.args]
        *sources, target = words or [""]
        if not sources:
            raise WordError(f"{name} {_value(instruction)!r}; write {name} SOURCE… TARGET")
        into = target.endswith("/") or target in (".", "..") or posixpath.basename(target) == "."
        if len(sources) > 1 and not into:
            raise WordError(f"{name} {_value(instruction)!r}: several sources need a target that ends with /")
        texts = {}
        if instruction.heredocs:
            heredocs = [parse_heredoc(word) for word in instruction.args[:-1]]
            sources = [source for source, heredoc in zip(sources, heredocs, strict=True) if heredoc is None]
            texts = self._texts(instruction, {heredoc.name for heredoc in heredocs if heredoc})
        for source in sources:
            if re.match(r"[a-z+]+://|git@", source):
                raise WordError(
                    f"{name} {source}: addresses are not supported; download it into the context and COPY it"
                )
        values = {option: self._text(options[option][0]) for option in ("from", "chown", "chmod") if option in options}
        target = posixpath.join(self._stage().workdir or ".", target)
        copy = self._copy(sources, target, into, values.get("from"), tuple(options.get("exclude", [])))
        copy.owner, copy.mode = values.get("chown", ""), values.get("chmod", "")
        copy.extract, copy.texts = name == "ADD", texts
        self._stage().steps.append(copy)

    def _texts(self, instruction: DockerfileInstruction, names: set[str]) -> dict[str, str]:
        """Returns the contents of the here-documents that an instruction copies, by file name."""
        texts = {}
        for heredoc in instruction.heredocs:
            if heredoc.name not in names:
                continue
            if not re.fullmatch(r"[\w+-][\w.+-]*", heredoc.name):
                raise WordError(
                    f"{instruction.name} <<{heredoc.name}: it names the file; write letters, digits and _.+-"
                )
            text = self._expand(heredoc.content, quotes=False) if heredoc.expand else [heredoc.content]
            texts[heredoc.name] = literal(text)
        return texts

    def _copy(
        self, sources: list[str], target: str, into: bool, origin: str | None, exclude: tuple[str, ...] = ()
    ) -> Copy:
        if origin is None:
            names = [name for source in sources for name in self._context.find(source)]
            return Copy(names, target, into, self._line, exclude=exclude)
        if exclude or any(character in source for source in sources for character in "*?["):
            raise WordError("patterns in a copy from another stage are not supported; copy the directory")
        stage = self._stage_named(origin)
        if stage is self._current and stage is not None:
            raise WordError(f"--from={origin}: a stage cannot copy from itself; name an earlier one")
        sources = [posixpath.join("/", source) for source in sources]
        return Copy(sources, target, into, self._line, stage.name if stage else origin)

    # --- variables ----------------------------------------------------------------------------------------------

    def _stage(self) -> Stage:
        assert self._current is not None
        return self._current

    def _expand(self, value: str, quotes: bool = True) -> Text:
        scope: Mapping[str, Text] = self._global_args
        if self._current is not None:
            scope = ChainMap(self._current.args, self._current.variables)
        return expand(value, scope, quotes=quotes, defaulted=self._defaulted)

    def _text(self, value: str) -> str:
        return literal(self._expand(value))


def _run_argv(instruction: DockerfileInstruction, shell: tuple[str, ...]) -> list[str]:
    """Returns the argv that executes a ``RUN`` instruction."""
    if instruction.json:
        return instruction.args
    if len(instruction.heredocs) != 1 or not parse_heredoc(instruction.args[0]):
        bodies = "".join(f"\n{heredoc.content}{heredoc.name}" for heredoc in instruction.heredocs)
        return [*shell, instruction.args[0] + bodies]
    body = instruction.heredocs[0].content
    shebang = re.match(r"#!\s*(.+)", body)
    if shebang is None:
        return [*shell, body]
    # A body with a shebang runs as a program.
    end = "MEGAFLOW"
    while end in body:
        end *= 2
    command = shlex.join([*shlex.split(shebang[1]), "/dev/stdin"])
    return [*DEFAULT_SHELL, f"{command} <<'{end}'\n{body}{end}"]


def _options(instruction: DockerfileInstruction, allowed: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the values of an instruction's ``--name=value`` options, by name. Raises :class:`WordError` unless all
    are ``allowed``."""
    options: dict[str, list[str]] = {}
    for flag in instruction.flags:
        name, _, value = flag[2:].partition("=")
        if name not in allowed:
            raise WordError(
                f"{instruction.name} --{name} is not supported; leave the option out, or build the image elsewhere"
            )
        options.setdefault(name, []).append(value)
    return options


def _value(instruction: DockerfileInstruction) -> str:
    """Returns an instruction's arguments as one string, without its options."""
    return " ".join(instruction.args)


class Dockerfile:
    """A parsed Dockerfile. Its directory is the build context.

    ``base``, ``environment``, ``workdir`` and ``user`` apply to the end of the last stage.

    Args:
        build_args: Values for ``ARG``.

    Raises:
        ConfigError: A line is rejected. The message names the file and the line.
    """

    def __init__(self, path: Path, build_args: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.context = Context(path.parent, path)
        self.build_args = dict(build_args or {})
        reader = Reader(path, self.context, self.build_args)
        reader.read()
        self.stages = reader.stages
        self.ignored = reader.ignored
        self.unset = reader.unset

    @property
    def last(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    @property
    def base(self) -> str:
        """Name of the image that the last stage starts from."""
        return self.last.base

    @property
    def workdir(self) -> str | None:
        """Absolute path of the last ``WORKDIR``, or ``None``. A relative path is resolved against ``/``, because the
        base image's directory is unknown."""
        return posixpath.normpath(posixpath.join("/", self.last.workdir)) if self.last.workdir else None

    @property
    def user(self) -> str | None:
        """Value of the last ``USER``, or ``None``."""
        return self.last.user

    @property
    def environment(self) -> dict[str, str]:
        """Variables whose values do not depend on the base image. The built image also has variables that do."""
        return {name: literal(value) for name, value in self.last.variables.items() if is_known(value)}

    @property
    def needs_build(self) -> bool:
        """True if the file requires a build: it does more than set known variables, a working directory and a
        user."""
        if not all(is_known(value) for value in self.last.variables.values()):
            return True
        return any(isinstance(step, Copy | RunStep) for step in self.last.steps)

    @property
    def needed(self) -> list[Stage]:
        """The last stage and the stages that it depends on, in file order. Like BuildKit, builds skip all other
        stages."""
        wanted = {self.last.name}
        for stage in reversed(self.stages):
            if stage.name in wanted:
                wanted |= {copy.origin for copy in copies(stage) if copy.origin}
        return [stage for stage in self.stages if stage.name in wanted]

    @property
    def bases(self) -> list[str]:
        """Names of the images that the build starts from or copies from, without duplicates. ``base`` comes first."""
        stages = {stage.name for stage in self.stages}
        names = [self.base]
        names += [stage.base for stage in self.needed]
        for stage in self.needed:
            names += [copy.origin for copy in copies(stage) if copy.origin and copy.origin not in stages]
        return list(dict.fromkeys(names))


class Dockerfiles:
    """Caches parsed Dockerfiles. Planning needs each one twice: to read its task and to resolve its image.

    Discard the cache when the files change.
    """

    def __init__(self) -> None:
        self._read: dict[Path, Dockerfile] = {}

    def read(self, path: Path) -> Dockerfile:
        """Returns the parsed Dockerfile at ``path``. Its directory is the build context.

        Raises:
            ConfigError: A line is rejected. The message names the file and the line.
        """
        if path not in self._read:
            self._read[path] = Dockerfile(path)
        return self._read[path]


def last_workdir(path: Path) -> str | None:
    """Returns the final working directory of any Dockerfile, without validating the file.

    Returns ``None`` if the last stage has no ``WORKDIR``, or if the path depends on variables.
    """
    workdir: str | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        text = re.sub(r"\\\s*\n", " ", file.read(MAX_CHARACTERS))
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        value = value.strip().strip("\"'")
        if name.upper() == "FROM":
            workdir = None
        elif name.upper() == "WORKDIR" and value:
            workdir = None if "$" in value else posixpath.normpath(posixpath.join(workdir or "/", value))
    return workdir


def context_digest(dockerfile: Dockerfile, base: str = "") -> str:
    """Returns the SHA-256 of a build's inputs: the Dockerfile, its base and arguments, and the files it copies."""
    args = sorted(dockerfile.build_args.items())
    digest = hashlib.sha256(f"megaflow-dockerfile-4\0{base}\0{args}\0".encode())
    digest.update(dockerfile.path.read_bytes())
    for stage in dockerfile.needed:
        for copy in copies(stage):
            if copy.origin is None:
                dockerfile.context.feed(digest.update, copy.sources)
    return digest.hexdigest()
