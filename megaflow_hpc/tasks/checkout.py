"""Records the commit of the agent's git checkout, and computes the agent's patch against it.

An agent may commit, switch branches, rewrite the history, break the index or remove ``.git``. It may also install
hooks, filters, attributes and drivers that run when git reads the checkout. The commit is therefore stored on the host,
in ``checkout.json`` next to the sandbox's layer. The patch is computed with a separate git directory that ignores the
agent's configuration, index and references, and reads only objects from the agent's repository. If the objects are
gone, the image's own repository is exposed briefly. Git runs in the sandbox, where the agent can replace it. So treat a
patch as the agent's submission, not as evidence.

Patches are stored as JSON. A patch that is not valid UTF-8 or contains NUL bytes is stored as binary hunks for all
files.
"""

from __future__ import annotations

import json
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
LOOK_TIMEOUT_S = 120.0
GIT_TIMEOUT_S = 300.0
"""Timeout of git commands in seconds, enough for a large checkout."""
MAX_PATCH_BYTES = 8 << 20
"""Maximum size of a patch in bytes. A larger patch is an error, because a truncated patch would be useless."""
EXIT_NO_DIRECTORY = 78
"""Exit status of the script if it cannot create the directories."""
EXIT_NO_COMMIT = 79
"""Exit status of the script if the commit is missing."""

_SETTINGS = ("core.fileMode", "core.autocrlf", "core.eol", "core.symlinks")
"""Git settings that influence whether git considers a file modified."""

_LOOK = f"""cd -P . && above=$PWD || exit 1
# Most tasks have no checkout, and a shell finds that out faster than git.
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
{diff}
"""
_DIFF = """{git} diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ \
  {commit} {options} || exit 1"""
_AS_BINARY = "echo '* -diff' >\"$d/git/info/attributes\"; g -c diff.default.binary=true"
_GITLINK = re.compile(rb"^(?:(?:new|deleted) file mode|old mode|new mode|index [0-9a-f]+\.\.[0-9a-f]+) 160000$", re.M)
"""Matches a patch's header line that refers to a commit of a nested repository."""


@dataclass(frozen=True)
class Start:
    """State of a checkout before the agent starts. Paths are inside the sandbox."""

    commit: str
    top: str
    objects: str
    exclude: str
    """The repository's private ignore patterns, which apply in addition to the tree's ``.gitignore`` files."""
    settings: list[str]


@dataclass(frozen=True)
class Patch:
    """The agent's changes. ``error`` explains why they are missing or incomplete, and is empty if they are complete."""

    data: bytes
    error: str = ""


async def remember(sandbox: ApptainerSandbox, workdir: str | None, make: Sequence[str] = ()) -> Start | None:
    """Records the commit of the checkout that contains ``workdir``. Returns ``None`` if there is no checkout or git is
    missing.

    Args:
        sandbox: The agent's sandbox.
        workdir: The task's working directory.
        make: Directories to create first, along with ``workdir``. Creating them in the same command saves time.

    Raises:
        SandboxError: The sandbox was lost, or the directories cannot be created.
    """
    note = Path(sandbox.directory, NOTE)
    write_json(note, None)
    script, cwd = _LOOK, workdir
    if make:
        first, cwd = shlex.quote(workdir or "/"), "/"
        script = f"mkdir -p {first} {shlex.join(make)} || exit {EXIT_NO_DIRECTORY}\ncd {first} || exit 1\n{_LOOK}"
    result = await sandbox.exec(script, cwd=cwd, timeout_s=LOOK_TIMEOUT_S)
    if make and result.exit_code == EXIT_NO_DIRECTORY:
        raise SandboxError(f"{workdir or '/'} and {', '.join(make)} cannot be created: {result.stderr.strip()[-300:]}")
    words = result.stdout_bytes.decode("utf-8", "surrogateescape").split("\0")[:-1]
    if result.exit_code or len(words) < 4 or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", words[0]):
        return None
    start = Start(words[0], words[1], words[2], words[3], words[4:])
    write_json(note, asdict(start))
    return start


async def remember_new(sandbox: ApptainerSandbox, workdir: str | None) -> None:
    """Records a checkout that a step has just created. Keeps an existing record.

    Raises:
        SandboxError: The sandbox was lost.
    """
    try:
        if _recorded_start(sandbox) is not None:
            return
    except FileNotFoundError:
        pass
    await remember(sandbox, workdir)


def read_note(sandbox: ApptainerSandbox) -> bytes:
    """Returns the record that :func:`remember` wrote, or an empty value if it is missing."""
    path = Path(sandbox.directory, NOTE)
    return path.read_bytes() if path.exists() else b""


def write_note(sandbox: ApptainerSandbox, content: bytes) -> None:
    """Writes a record from :func:`read_note` for another sandbox that continues the agent's work."""
    if content:
        write_atomic(Path(sandbox.directory, NOTE), content)


async def difference(sandbox: ApptainerSandbox, workdir: str | None) -> Patch | None:
    """Returns all changes since :func:`remember` as one git patch: committed, uncommitted and untracked files.

    If no checkout was recorded, returns ``None`` without running a command. Does not modify the checkout. Call this
    after killing the agent's processes, and kill all processes again afterwards, because the agent may have replaced
    git.

    Raises:
        SandboxError: The sandbox was lost.
    """
    try:
        start = _recorded_start(sandbox)
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

        def set_changes_aside(paths: LayerPaths) -> None:
            moved.append(upperdir.set_aside(paths.upper, where, aside))

        def put_back(paths: LayerPaths) -> None:
            upperdir.replace(paths.upper, where, aside)

        await sandbox.restart(change=set_changes_aside)
        if moved[0]:
            try:
                patch = await _read(sandbox, start)
            finally:
                await sandbox.restart(change=put_back)
    return patch or Patch(b"", f"{start.top}: the initial commit {start.commit[:12]} is missing")


async def apply(sandbox: ApptainerSandbox, patch: bytes) -> str:
    """Applies a patch from :func:`difference` to an unmodified checkout. Returns the reason for a failure, or an empty
    string on success.

    Raises:
        SandboxError: The sandbox was lost.
    """
    note = read_note(sandbox)
    start = json.loads(note) if note else None
    if start is None:
        return "the sandbox has no checkout"
    words = ["git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "-"]
    done = await sandbox.exec(words, cwd=start["top"], user_input=patch, timeout_s=GIT_TIMEOUT_S)
    return "" if done.exit_code == 0 else done.stderr.strip()[-300:] or f"git apply ended with {done.exit_code}"


def to_artifacts(patch: Patch | None, prefix: str = "") -> list[Artifact]:
    """Converts a patch to artifacts: ``patch``, which is empty if there are no changes, and ``patch.error`` if there
    was an error.

    If there was no checkout, there are no artifacts.
    """
    if patch is None:
        return []
    error = patch.error.encode("utf-8", "surrogateescape")
    parts = {"patch": patch.data if patch.data or not error else None, "patch.error": error or None}
    return [Artifact(prefix + name, data) for name, data in parts.items() if data is not None]


def _recorded_start(sandbox: ApptainerSandbox) -> Start | None:
    """Reads the record of :func:`remember`. Raises FileNotFoundError if it is missing."""
    note = json.loads(Path(sandbox.directory, NOTE).read_bytes())
    return Start(**note) if note else None


async def _read(sandbox: ApptainerSandbox, start: Start) -> Patch | None:
    """Computes the patch in the sandbox. Returns ``None`` if the recorded commit is missing."""
    patch = await _diff(sandbox, start, _DIFF.format(git="g", commit=start.commit, options=""))
    if patch is None or _is_text(patch.data):
        return patch
    patch = await _diff(sandbox, start, _DIFF.format(git=_AS_BINARY, commit=start.commit, options="--no-renames"))
    if patch is None or _is_text(patch.data):
        return patch
    return Patch(patch.data, f"{patch.error}\nnot UTF-8, although git was asked for binary hunks".strip()[-2000:])


async def _diff(sandbox: ApptainerSandbox, start: Start, diff: str) -> Patch | None:
    """Runs a command that prints a patch. Returns ``None`` if the recorded commit is missing."""
    long = len(start.commit) == 64
    script = _READ.format(
        top=shlex.quote(start.top),
        objects=shlex.quote(start.objects),
        exclude=shlex.quote(start.exclude),
        commit=start.commit,
        version=1 if long else 0,
        more="[extensions]\\n\\tobjectformat = sha256\\n" if long else "",
        settings=" ".join(f"-c {shlex.quote(setting)}" for setting in start.settings),
        gone=EXIT_NO_COMMIT,
        diff=diff,
    )
    # Truncated output keeps its first and last half, so the first half must be large enough for the whole patch.
    done = await sandbox.exec(script, cwd="/", timeout_s=GIT_TIMEOUT_S, output_limit=2 * MAX_PATCH_BYTES)
    if done.exit_code == EXIT_NO_COMMIT:
        return None
    if done.timed_out:
        return Patch(b"", f"{start.top}: git took longer than {GIT_TIMEOUT_S:g} s")
    if done.exit_code:
        return Patch(b"", f"{start.top}: git cannot compare it with the initial commit: {done.stderr.strip()[-2000:]}")
    if len(done.stdout_bytes) > MAX_PATCH_BYTES:
        return Patch(b"", f"the patch of {start.top} is larger than {MAX_PATCH_BYTES >> 20} MiB")
    left_out = [line for line in done.stderr.splitlines() if line.startswith(("error:", "fatal:"))]
    for part in re.split(rb"^diff --git ", done.stdout_bytes, flags=re.M)[1:]:
        if _GITLINK.search(part.partition(b"\n@@")[0]):
            names = part.partition(b"\n")[0]  # contains the name twice, after a/ and b/
            name = names[: len(names) // 2].strip(b'"').removeprefix(b"a/").decode("utf-8", "surrogateescape")
            left_out.append(
                f"{name!a}: a separate repository; the patch names its commit and contains none of its files"
            )
    return Patch(done.stdout_bytes, "\n".join(left_out)[-2000:])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
