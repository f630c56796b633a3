"""Records the commit of the git checkout that an agent gets, and computes the agent's patch against it.

An agent may commit, switch branches, rewrite the history, break the index or remove ``.git``. It may also set hooks,
filters, attributes and drivers that run when git reads the checkout. So the commit is stored on the host
(``checkout.json`` next to the sandbox's layer). The patch is computed with a separate git directory that has none of
the agent's configuration, index or references; only the objects of the agent's repository are read. If those are gone,
the repository of the image is exposed for a moment. Patches are stored as JSON, so files that are not UTF-8 or contain
NUL bytes become binary hunks. Git runs in the sandbox, where the agent can replace it. So a patch is a submission,
never a proof.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.atomic import write_atomic, write_json
from megaflow_hpc.types import Artifact

NOTE = "checkout.json"
LOOK_S = 120.0
READ_S = 300.0
"""For git at work on a large checkout."""
LIMIT = 8 << 20
"""Bytes of a patch. A larger one is an error: half a patch is none."""
UNMADE = 78
"""Exit status of the script that cannot make the directories it is to make."""
GONE = 79
"""Exit status of the script that finds the commit nowhere."""

_SETTINGS = ("core.fileMode", "core.autocrlf", "core.eol", "core.symlinks")
"""What of a checkout's configuration decides whether an untouched file counts as changed."""

_LOOK = f"""cd -P . && above=$PWD || exit 1
# Most tasks have no checkout, and a shell learns that sooner than git is started.
until [ -e "$above/.git" ] || [ -n "$GIT_DIR" ]; do [ -n "$above" ] || exit 1; above=${{above%/*}}; done
commit=$(git -c safe.directory='*' rev-parse -q --verify 'HEAD^{{commit}}') || exit 1
top=$(git -c safe.directory='*' rev-parse --show-toplevel) || exit 1
objects=$(cd "$(git -c safe.directory='*' rev-parse --git-path objects)" && pwd -P) || exit 1
exclude=$(git -c safe.directory='*' rev-parse --git-path info/exclude)
printf '%s\\0' "$commit" "$top" "$objects" "$(grep -v '^#' "$exclude" 2>/dev/null)"
for name in {" ".join(_SETTINGS)}; do
  if value=$(git -c safe.directory='*' config --get $name); then printf '%s\\0' "$name=$value"; fi
done"""

_READ = """cd {top} && d=$(mktemp -d) || exit 1
trap 'rm -rf "$d"' EXIT
mkdir -p "$d/git/objects/info" "$d/git/refs" "$d/git/info" && echo 'ref: refs/heads/none' >"$d/git/HEAD" || exit 1
printf '[core]\\n\\tbare = false\\n\\trepositoryformatversion = {version}\\n{more}' >"$d/git/config" || exit 1
printf '%s\\n' {objects} >"$d/git/objects/info/alternates" && printf '%s\\n' {exclude} >"$d/git/info/exclude" || exit 1
unset GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_INDEX_FILE GIT_EXTERNAL_DIFF GIT_CONFIG_COUNT
export GIT_DIR="$d/git" GIT_WORK_TREE={top} HOME="$d" XDG_CONFIG_HOME="$d" GIT_CONFIG_NOSYSTEM=1
export GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_ATTR_SOURCE={commit} GIT_TERMINAL_PROMPT=0
g() {{ git {settings} "$@"; }}
g cat-file -e '{commit}^{{tree}}' 2>/dev/null || exit {gone}
g read-tree {commit} || exit 1
g add -A --ignore-errors . >&2 # reports files that cannot be added, and continues
{diffs}
"""
_DIFF = """diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ \
  {commit} {paths} || exit 1"""
_AS_BINARY = "echo '* -diff' >\"$d/git/info/attributes\"; g -c diff.default.binary=true"
_PATHS_BYTES = 40_000
"""Maximum bytes of paths in one command. If the paths of files that are not UTF-8 need more, all files become binary
hunks."""
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2}|.)")
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


@dataclass(frozen=True)
class Start:
    """Where a checkout stood when an agent got it. Paths are the sandbox's."""

    commit: str
    top: str
    objects: str
    exclude: str
    """What its repository, beside the files of the tree, says is not to be looked at."""
    settings: list[str]


@dataclass(frozen=True)
class Patch:
    """The changes since then. ``error``: why they cannot be found, or what is missing in them; else empty."""

    data: bytes
    error: str = ""


async def remember(sandbox: ApptainerSandbox, workdir: str | None, make: Sequence[str] = ()) -> Start | None:
    """Notes where the checkout around ``workdir`` stands; ``None`` where there is none, or no git to see it.

    Args:
        make: directories to make before, and with them ``workdir``: every command takes time.

    Raises:
        SandboxError: the sandbox was lost, or the directories cannot be made.
    """
    note = Path(sandbox.directory, NOTE)
    write_json(note, None)
    script, place = _LOOK, workdir
    if make:
        first, place = shlex.quote(workdir or "/"), "/"
        script = f"mkdir -p {first} {shlex.join(make)} || exit {UNMADE}\ncd {first} || exit 1\n{_LOOK}"
    seen = await sandbox.exec(script, cwd=place, timeout_s=LOOK_S)
    if make and seen.exit_code == UNMADE:
        raise SandboxError(f"{workdir or '/'} and {', '.join(make)} cannot be made: {seen.stderr.strip()[-300:]}")
    words = seen.stdout_bytes.decode("utf-8", "surrogateescape").split("\0")[:-1]
    if seen.exit_code or len(words) < 4 or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", words[0]):
        return None
    start = Start(words[0], words[1], words[2], words[3], words[4:])
    write_json(note, asdict(start))
    return start


async def remember_new(sandbox: ApptainerSandbox, workdir: str | None) -> None:
    """Notes the checkout that a step began with making; one that was there before it stays what is compared with.

    Raises:
        SandboxError: the sandbox was lost.
    """
    try:
        if _noted(sandbox) is not None:
            return
    except FileNotFoundError:
        pass
    await remember(sandbox, workdir)


def read_note(sandbox: ApptainerSandbox) -> bytes:
    """The note that :func:`remember` wrote; empty if there is none."""
    path = Path(sandbox.directory, NOTE)
    return path.read_bytes() if path.exists() else b""


def write_note(sandbox: ApptainerSandbox, content: bytes) -> None:
    """Gives a sandbox that goes on where another was the note of that one."""
    if content:
        write_atomic(Path(sandbox.directory, NOTE), content)


async def difference(sandbox: ApptainerSandbox, workdir: str | None) -> Patch | None:
    """Returns what was changed since :func:`remember`, committed or not, new files included, as one patch for git.

    ``None`` where there was no checkout; nothing is run then. The checkout itself is left as it is. Call when the
    agent's processes have ended; end what is started by its programs afterwards.

    Raises:
        SandboxError: the sandbox was lost.
    """
    try:
        start = _noted(sandbox)
    except FileNotFoundError:
        start = await remember(sandbox, workdir)
    if start is None:
        return None
    patch = await _read(sandbox, start)
    if patch is not None:
        return patch
    where = f"{start.top}/.git"
    if start.objects == f"{where}/objects":
        aside = Path(sandbox.directory, "layer", "git-aside")
        moved: list[bool] = []

        def lay_bare(paths: LayerPaths) -> None:
            moved.append(upperdir.set_aside(paths.upper, where, aside))

        def put_back(paths: LayerPaths) -> None:
            upperdir.replace(paths.upper, where, aside)

        await sandbox.restart(change=lay_bare)
        if moved[0]:
            try:
                patch = await _read(sandbox, start)
            finally:
                await sandbox.restart(change=put_back)
    return patch or Patch(b"", f"{start.top}: the commit {start.commit[:12]} that it stood at is nowhere any more")


async def apply(sandbox: ApptainerSandbox, patch: bytes) -> str:
    """Applies what :func:`difference` returned to a checkout that stands where it was; returns why not, or nothing.

    Raises:
        SandboxError: the sandbox was lost.
    """
    note = read_note(sandbox)
    start = json.loads(note) if note else None
    if start is None:
        return "there is no checkout in the sandbox"
    words = ["git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "-"]
    done = await sandbox.exec(words, cwd=start["top"], user_input=patch, timeout_s=READ_S)
    return "" if done.exit_code == 0 else done.stderr.strip()[-300:] or f"git apply ended with {done.exit_code}"


def to_artifacts(patch: Patch | None, prefix: str = "") -> list[Artifact]:
    """A patch as artifacts: ``patch`` where anything was changed, ``patch.error`` where one is stated."""
    if patch is None:
        return []
    parts = {"patch": patch.data, "patch.error": patch.error.encode("utf-8", "surrogateescape")}
    return [Artifact(prefix + name, data) for name, data in parts.items() if data]


def _noted(sandbox: ApptainerSandbox) -> Start | None:
    """What :func:`remember` found; :class:`FileNotFoundError` if it was not called."""
    found = json.loads(Path(sandbox.directory, NOTE).read_bytes())
    return Start(**found) if found else None


async def _read(sandbox: ApptainerSandbox, start: Start) -> Patch | None:
    """``None`` if the commit is not to be found."""
    patch = await _diff(sandbox, start, [f"g {_DIFF.format(commit=start.commit, paths='')}"])
    if patch is None or _is_text(patch.data):
        return patch
    names = _not_text(patch.data)
    some = " ".join(shlex.quote(f":(literal){name}") for name in names)
    others = " ".join(shlex.quote(f":(exclude,literal){name}") for name in names)
    diffs = [f"{_AS_BINARY} {_DIFF.format(commit=start.commit, paths=f'--no-renames -- {some}')}"]
    if names and len(os.fsencode(some)) < _PATHS_BYTES:
        diffs.insert(0, f"g {_DIFF.format(commit=start.commit, paths=f'-- . {others}')}")
    else:
        diffs = [f"{_AS_BINARY} {_DIFF.format(commit=start.commit, paths='--no-renames')}"]
    patch = await _diff(sandbox, start, diffs)
    if patch is None or _is_text(patch.data):
        return patch
    left = f"not UTF-8, although git was asked for binary hunks: {', '.join(map(ascii, _not_text(patch.data)))}"
    return Patch(patch.data, f"{patch.error}\n{left}".strip()[-2000:])


async def _diff(sandbox: ApptainerSandbox, start: Start, diffs: Sequence[str]) -> Patch | None:
    """Runs commands that print parts of a patch. Returns ``None`` if the commit does not exist."""
    long = len(start.commit) == 64
    script = _READ.format(
        top=shlex.quote(start.top),
        objects=shlex.quote(start.objects),
        exclude=shlex.quote(start.exclude),
        commit=start.commit,
        version=1 if long else 0,
        more="[extensions]\\n\\tobjectformat = sha256\\n" if long else "",
        settings=" ".join(f"-c {shlex.quote(setting)}" for setting in start.settings),
        gone=GONE,
        diffs="\n".join(diffs),
    )
    # Half of what is kept is the head.
    done = await sandbox.exec(script, cwd="/", timeout_s=READ_S, output_limit=2 * LIMIT)
    if done.exit_code == GONE:
        return None
    if done.timed_out:
        return Patch(b"", f"{start.top}: git was not through with it after {READ_S:g} s")
    if done.exit_code:
        return Patch(b"", f"{start.top} cannot be compared with what it was: {done.stderr.strip()[-2000:]}")
    if len(done.stdout_bytes) > LIMIT:
        return Patch(b"", f"the patch of {start.top} is larger than {LIMIT >> 20} MiB")
    left_out = [line for line in done.stderr.splitlines() if line.startswith(("error:", "fatal:"))]
    for part in _parts(done.stdout_bytes):
        if _GITLINK.search(part.partition(b"\n@@")[0]):
            name = ", ".join(map(ascii, _names(part)))
            left_out.append(f"{name}: a repository of its own; the patch names its commit and holds none of its files")
    return Patch(done.stdout_bytes, "\n".join(left_out)[-2000:])


_GITLINK = re.compile(rb"^(?:(?:new|deleted) file mode|old mode|new mode|index [0-9a-f]+\.\.[0-9a-f]+) 160000$", re.M)


def _not_text(patch: bytes) -> list[str]:
    """Returns the files whose changes contain NUL or bytes that are not UTF-8."""
    found = dict.fromkeys(name for part in _parts(patch) if not _is_text(part) for name in _names(part))
    return [name for name in found if "\0" not in name]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _parts(patch: bytes) -> list[bytes]:
    """Splits a patch by file. No line of a change begins like the header of a file."""
    return re.split(rb"^(?=diff --git )", patch, flags=re.M)[1:]


def _names(part: bytes) -> list[str]:
    """Returns the names of a file before and after its change."""
    head, *lines = part.split(b"\n")
    for line in lines:
        if line.startswith((b"@@ ", b"GIT binary patch")):
            break
        if line.startswith(b"rename from "):
            to = next((other for other in lines if other.startswith(b"rename to ")), line)
            return [_unquoted(line[12:]), _unquoted(to[10:])]
    both = head[len(b"diff --git ") :]  # the same name twice, after a/ and b/
    name = _unquoted(both[: len(both) // 2])
    return [name.removeprefix("a/")]


def _unquoted(name: bytes) -> str:
    """Decodes a path that git has put in quotes because of special characters."""
    if name.startswith(b'"'):

        def plain(found: re.Match[bytes]) -> bytes:
            given = found[1]
            return bytes([int(given, 8)]) if len(given) == 3 else _ESCAPES.get(given, given)

        name = _ESCAPED.sub(plain, name[1:-1])
    return name.decode("utf-8", "surrogateescape")
