"""Downloads source distributions of released packages, and computes the difference between two of them.

Archives are cached in a directory. The running interpreter's ``pip`` downloads them, using its configured indexes,
credentials, certificates and proxies.

``pip download`` also runs the build backend of a source distribution in a fresh environment. That takes seconds and
fails with old backends, but pip has no option to download only the file. So this module, when run as a program, uses
the internals of pip's ``download`` command, which respect the same configuration. If these internals have changed (exit
status :data:`CHANGED`), ``pip download`` itself is used.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib.util
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import Budget, Kind, Parts, TreeWriter, plain, unpack_tar

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
MAX_TREE = (1 << 30, 200_000)
"""Maximum size in bytes and maximum number of files of an unpacked source distribution. Guards against archive
bombs."""
TEST_DIRECTORIES = {"test", "tests", "testing"}
NOT_CODE = {
    "doc",
    "docs",
    "example",
    "examples",
    "bench",
    "benchmark",
    "benchmarks",
    "bin",
    "ci_tools",
    "scripts",
    "tools",
}
"""Names of top-level directories that are not part of an installed package."""
METADATA_FILES = {
    "setup.py",
    "noxfile.py",
    "tasks.py",
    "release.py",
    "hatch_build.py",
    "_version.py",
    "__about__.py",
    "_meta.py",
    "__meta__.py",
    "__version__.py",
}
VERSION_LINE = re.compile(rb"^__version__[ \t]*=[^\r\n]*", re.MULTILINE)
COMMIT_ENV = {
    "GIT_AUTHOR_NAME": "megaflow_hpc",
    "GIT_AUTHOR_EMAIL": "megaflow_hpc@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "megaflow_hpc",
    "GIT_COMMITTER_EMAIL": "megaflow_hpc@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
"""Environment variables that make commits reproducible, and disable the user's hooks, signing and line-ending
settings."""


@dataclass(frozen=True, order=True)
class Release:
    """A package at a specific version."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class ReleasePatch:
    """The code changes between two releases."""

    text: bytes
    """The patch, in the format of ``git apply``."""
    lines: int
    """Number of added and removed lines."""
    files: tuple[str, ...]


def cache_directory() -> Path:
    """Returns the directory in which downloaded archives are cached."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "megaflow-hpc" / "releases"


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs pip in this interpreter.

    Raises:
        SiteError: The interpreter has no pip.
    """
    if importlib.util.find_spec("pip") is None:
        raise SiteError(
            f"{sys.executable} has no pip, which fetches the releases; install it with: {sys.executable} -m ensurepip"
        )
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)


def fetch(releases: Iterable[Release], cache: Path) -> dict[Release, Path]:
    """Returns the path of each release's archive. Downloads missing archives. Omits releases that do not exist.

    Raises:
        SiteError: pip cannot be run, or cannot reach its index.
    """
    cache.mkdir(parents=True, exist_ok=True)
    wanted = sorted(set(releases))
    archives: dict[Release, Path] = {}
    for release in wanted:
        path = _cached(release, cache)
        if path is not None:
            archives[release] = path
    missing = [release for release in wanted if release not in archives]
    if not missing:
        return archives
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
        names = _fetch_files(missing, Path(scratch))
        for release, name in names.items():
            directory = cache / str(release)
            directory.mkdir(exist_ok=True)
            os.replace(Path(scratch) / name, directory / name)
            archives[release] = directory / name
    return archives


def _cached(release: Release, cache: Path) -> Path | None:
    try:
        return next((path for path in sorted((cache / str(release)).iterdir()) if path.name.endswith(ARCHIVES)), None)
    except OSError:
        return None


def _fetch_files(releases: Sequence[Release], directory: Path) -> dict[Release, str]:
    """Downloads releases into ``directory`` and returns the file names. Omits releases that do not exist."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", __name__, "-d", str(directory), *map(str, releases)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
            return {release: name for release, (_, name) in zip(releases, lines, strict=True) if name}
        if done.returncode != CHANGED:
            names = ", ".join(map(str, releases))
            raise SiteError(f"pip could not fetch {names}: {_tail(done)}; check its index and proxy settings")
    downloaded: dict[Release, str] = {}
    for release in releases:
        file_name = _pip_download(release, directory)
        if file_name is not None:
            downloaded[release] = file_name
    return downloaded


def _pip_download(release: Release, directory: Path) -> str | None:
    before = set(os.listdir(directory))
    options = ["--no-deps", "--no-binary", release.package, "--no-input", "-d", str(directory)]
    done = run_pip(["download", *options, "--", str(release)])
    if done.returncode == 0:
        return next(iter(set(os.listdir(directory)) - before))
    if "No matching distribution" in done.stderr:
        return None
    raise SiteError(f"pip could not fetch {release}: {_tail(done)}; check its index and proxy settings")


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = [
        line for line in (done.stderr + done.stdout).splitlines() if line.strip() and not line.startswith("WARNING")
    ]
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def fetch_wheels(requirements: Sequence[str], python: str, directory: Path) -> list[str]:
    """Downloads wheels of ``requirements`` and their dependencies, and returns the file names.

    Args:
        python: Python version to download for, such as ``3.11``.

    Raises:
        ConfigError: No matching wheel exists for a requirement.
    """
    options = ["--only-binary", ":all:", "--python-version", python, "--no-input", "-d", str(directory)]
    done = run_pip(["download", *options, "--", *requirements])
    if done.returncode != 0:
        raise ConfigError(
            f"no wheels for Python {python} of {', '.join(requirements)}: {_tail(done)}; correct `requires`"
        )
    return sorted(os.listdir(directory))


# --- source trees ---------------------------------------------------------------------------------------------------


def unpack(archive: Path, directory: Path, budget: Budget | None = None) -> Path:
    """Unpacks a source distribution into ``directory`` and returns the root of its tree.

    Args:
        budget: Limit on the unpacked size. Default: :data:`MAX_TREE`.

    Raises:
        ConfigError: The archive is not a valid source distribution, or exceeds the limit.
    """
    budget = budget or Budget(*MAX_TREE)
    try:
        if archive.name.endswith(".zip"):
            _unpack_zip(archive, directory, budget)
        else:
            with open(archive, "rb") as file:
                begin = file.read(2)
            openers: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
            with openers.get(begin, open)(archive, "rb") as stream:
                unpack_tar(stream, directory, budget, _harmless)
        roots = [path for path in directory.iterdir() if path.is_dir()]
        if len(roots) != 1:
            raise ValueError(f"{len(roots)} directories at its top, expected one")
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
        raise ConfigError(f"{archive}: not a source distribution ({reason}); delete it and try again") from error
    return roots[0]


def _unpack_zip(archive: Path, directory: Path, budget: Budget) -> None:
    with zipfile.ZipFile(archive) as bundle, TreeWriter(directory, budget) as tree:
        for entry in bundle.infolist():
            parts = plain(entry.filename.encode("utf-8", "surrogateescape"))
            if parts and not entry.is_dir() and _harmless(parts, "file"):
                with bundle.open(entry) as content:
                    tree.file(parts, iter(functools.partial(content.read, 1 << 20), b""))


def _harmless(parts: Parts, kind: Kind) -> bool:
    """Accepts files and directories, but not links or ``__pycache__``."""
    return kind in ("file", "directory") and b"__pycache__" not in parts


def is_test(name: str) -> bool:
    """Returns whether a file in a source tree belongs to the tests."""
    path = PurePosixPath(name)
    in_tests = any(part in TEST_DIRECTORIES for part in path.parts[:-1])
    return (
        in_tests
        or path.name in ("conftest.py", "tests.py")
        or re.fullmatch(r"test_.*\.py|.*_tests?\.py", path.name) is not None
    )


def is_code(name: str) -> bool:
    """Returns whether a file is the package's own Python code, as opposed to a test, document, tool or metadata
    file."""
    path = PurePosixPath(name)
    if path.suffix not in (".py", ".pyi") or is_test(name) or path.name in METADATA_FILES:
        return False
    return len(path.parts) == 1 or path.parts[0] not in NOT_CODE


def tree_files(root: Path) -> list[str]:
    """Returns the relative paths of all files below ``root``, except those in ``.git`` and ``__pycache__``."""
    names = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    skipped = {".git", "__pycache__"}
    return sorted(name.as_posix() for name in names if not skipped & set(name.parts))


def source_root(root: Path) -> str:
    """Returns the directory of the tree to put on ``PYTHONPATH``, relative to ``root``."""
    return next((name for name in ("src", "lib") if any((root / name).glob("**/*.py"))), ".")


def git(tree: Path, *arguments: str) -> bytes:
    """Runs git in ``tree`` and returns its output.

    Raises:
        SiteError: Git is missing or failed.
    """
    if shutil.which("git") is None:
        raise SiteError("git is not on PATH; it is needed to make source trees and patches")
    env: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | COMMIT_ENV
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, env=env, check=False)
    if done.returncode != 0:
        raise SiteError(f"git {' '.join(arguments)} failed in {tree}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def commit(tree: Path, message: str) -> None:
    """Makes ``tree`` a git repository with a single commit that contains all files."""
    git(tree, "init", "-q", "-b", "main")
    git(tree, "config", "core.autocrlf", "false")
    git(tree, "add", "-A", "-f")
    git(tree, "commit", "-q", "--no-verify", "-m", message)
    git(tree, "repack", "-a", "-d", "-q")
    remove_tree(tree / ".git" / "hooks", ignore_errors=True)


def keep_version(old: bytes, new: bytes) -> bytes:
    """Returns ``new`` with the ``__version__`` line of ``old``, because tests compare the version with package
    metadata."""
    before = VERSION_LINE.search(old)
    return VERSION_LINE.sub(lambda _: before[0], new, count=1) if before else new


def difference(buggy: Path, fixed: Path) -> ReleasePatch:
    """Returns the code changes from ``buggy`` to ``fixed``. ``buggy`` must be committed. It is modified, but restored
    afterwards."""
    old, new = ({name for name in tree_files(tree) if is_code(name)} for tree in (buggy, fixed))
    for name in old - new:
        (buggy / name).unlink()
    for name in new:
        target = buggy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_bytes() if name in old else b""
        target.write_bytes(keep_version(before, (fixed / name).read_bytes()))
    git(buggy, "add", "-A", "-f")
    text = git(buggy, "diff", "--cached", "--binary", "--no-color", "--no-ext-diff", "--no-renames")
    counts = [
        line.split("\t") for line in git(buggy, "diff", "--cached", "--numstat", "--no-renames").decode().splitlines()
    ]
    git(buggy, "reset", "-q", "--hard")
    git(buggy, "clean", "-q", "-f", "-d", "-x")
    lines = sum(int(count) for row in counts for count in row[:2] if count.isdigit())
    return ReleasePatch(text, lines, tuple(row[2] for row in counts))


# --- pip's own download, in a process ---


CHANGED = 90


def main() -> int:
    """Downloads files like ``pip download``, but without building them. Returns pip's exit status, or ``CHANGED`` if
    pip's internals have changed.

    ``python -m megaflow_hpc.tasks.releases.sdists -d DIR NAME==VERSION…`` prints one JSON line per argument:
    ``[argument, file name or null]``.
    """
    try:
        from pip._internal.commands.download import DownloadCommand
        from pip._vendor.packaging.specifiers import SpecifierSet
    except ImportError:
        return CHANGED

    class Fetch(DownloadCommand):
        def run(self, options: Any, args: list[str]) -> int:
            session: Any = self.get_default_session(options)
            finder: Any = self._build_package_finder(options, session)
            for argument in args:
                name, _, version = argument.partition("==")
                best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
                if best is not None:
                    self.fetch(session, best.link, os.path.join(options.download_dir, best.link.filename))
                print(json.dumps([argument, best and best.link.filename]), flush=True)
            return 0

        def fetch(self, session: Any, link: Any, target: str) -> None:
            response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
            response.raise_for_status()
            if link.hash_name:
                import hashlib

                digest = hashlib.new(link.hash_name, response.content).hexdigest()
                if digest != link.hash:
                    raise ValueError(f"{link.filename}: {link.hash_name} is {digest}, the index says {link.hash}")
            with open(target, "wb") as file:
                file.write(response.content)

    try:
        return int(Fetch("fetch", "").main(["--no-binary", ":all:", "--no-input", *sys.argv[1:]]))
    except (AttributeError, TypeError):
        return CHANGED


if __name__ == "__main__":
    sys.exit(main())
