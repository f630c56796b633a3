"""Publishes and reads versions of a policy's weights. Trainers publish them, and model servers detect and load them.

::

    RUN/weights/
      current.<policy>.json   {"version": 3, "ordinal": 2, "policy": …}: the version to serve now
      3/                      a full model directory in the engine's format, and megaflow-weights.json
                              (and checksums.json if the policy has several servers)
      4/                      or a LoRA adapter (adapter_config.json) for the campaign's own model
      5/                      or a delta to an earlier version (delta.json); see weight_delta
      1/megaflow-weights.json record of a removed version, whose number is never reused

A version is complete before it becomes visible. The publisher writes and fsyncs its files in a hidden directory. One
rename gives the version its number ``n``. Another rename updates the pointer. *Version numbers* are positive and
increase across all policies of a run. Version 0 is the campaign file's model. *Ordinals* count the versions of one
policy: 0 is the campaign's model, then 1, 2, … Staleness is a difference of ordinals. A *token*, such as a trainer's
step, makes publishing idempotent: publishing again with the same token returns the existing version.

Publishers may run concurrently on several nodes, and be killed at any moment. Only one publisher can rename its
directory to a given number, and it has read all lower versions beforehand. The ordinal and token in its files are
therefore correct without a lock. The pointer ends up at the highest number, no matter which publisher writes it last.
If a publisher was killed before it updated the pointer, the next one updates it. A killed publisher leaves behind a
hidden directory, which no process reads and the next publisher removes.

``checksums.json`` contains the size and SHA-256 of each file. Servers verify their copies against it. A policy's only
server reads versions in place, so it needs no checksums.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import fsync, fsync_tree, make_directory, write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, boot_id
from megaflow_hpc.rundir.layout import RunDir, read_json, write_record
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.weight_source import ADAPTER, base_of, check, complete, policy_of

# --- checksums ---


CHECKSUMS = "checksums.json"
MAX_THREADS = 8
"""Maximum number of files to read concurrently."""


class Checksum(msgspec.Struct, frozen=True):
    """Size and hash of a file."""

    size: int
    """Size of the file in bytes."""
    sha256: str
    """Hexadecimal SHA-256 of the file."""


def checksum(path: Path) -> Checksum:
    """Computes the checksum of a file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Checksum(file.tell(), digest.hexdigest())


def write_checksums(folder: Path, known: Mapping[str, Checksum]) -> None:
    """Writes the checksums of all files in a directory to ``checksums.json``. Raises OSError.

    Args:
        known: Checksums already computed, by file name. All other files are read.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    sums = {}
    for name in names:
        if name in known and known[name].size == (folder / name).stat().st_size:
            sums[name] = known[name]
    unread = [name for name in names if name not in sums and name != CHECKSUMS]
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        sums |= zip(unread, threads.map(lambda name: checksum(folder / name), unread), strict=True)
    write_json(folder / CHECKSUMS, msgspec.to_builtins(sums))


def read_checksums(folder: Path) -> dict[str, Checksum]:
    """Returns the published checksums by file name. Returns an empty mapping if there is no checksum file.

    Raises:
        OSError, ValueError: The file cannot be read, or is damaged.
    """
    try:
        return read_json(folder / CHECKSUMS, dict[str, Checksum])
    except FileNotFoundError:
        return {}


# --- versions ---


ABOUT = "megaflow-weights.json"
STALE_PUBLISHER_S = 86_400.0
"""Age in seconds at which a publisher's files are removed if it ran on another node. Copying a large model takes less
time."""


@dataclass(frozen=True)
class Version:
    """A weight version. Number 0 with an empty path is the campaign's own model."""

    version: int = 0
    path: str = ""
    """Directory of the version. Empty if its files have been removed."""
    policy: str = ""
    published_at: float = 0.0
    """Publication time, as a Unix timestamp in seconds."""
    ordinal: int = 0
    """Position among the policy's versions, starting at 1. 0 is the campaign's model."""
    token: str = ""
    """Idempotency token chosen by the publisher."""
    digest: str = ""
    """Digest of the content, if the publisher supplied it."""

    @property
    def adapter(self) -> bool:
        """True if the version is a LoRA adapter for the campaign's own model."""
        return bool(self.path) and (Path(self.path) / ADAPTER).is_file()


class Pointer(msgspec.Struct):
    """Content of the pointer file, which names the version to serve now."""

    version: int
    ordinal: int


class VersionRecord(msgspec.Struct, kw_only=True):
    """Metadata stored in a version's directory."""

    policy: str
    published_at: float = 0.0
    """Publication time, as a Unix timestamp in seconds."""
    ordinal: int
    token: str = ""
    digest: str = ""
    source: str = ""
    """Source directory of the version."""
    staged: str = ""
    """Name of the hidden directory in which the version was staged."""
    removed: bool = False
    """True if the version's other files have been removed."""


def current(run: RunDir, policy: str) -> Version:
    """Returns the version to serve now. Opens and reads only one file, so stale file attributes do not matter.

    Raises:
        OSError: The run directory is temporarily unreadable, so the version is unknown.
    """
    try:
        pointer = read_json(_pointer(run, policy), Pointer)
    except (FileNotFoundError, ValueError):
        return Version(policy=policy)
    # Derive the path from the number, because the run directory may have been moved.
    return Version(pointer.version, str(run.weights / str(pointer.version)), policy, ordinal=pointer.ordinal)


def newest(run: RunDir, policy: str) -> Version:
    """Returns a policy's newest version. If a publisher was killed, the pointer may still name an older version.

    Lists ``RUN/weights`` and reads one small file for each version above the pointer's.

    Raises:
        OSError: The run directory is temporarily unreadable.
    """
    return next((version for version in newest_first(run, policy) if version.path), Version(policy=policy))


def newest_first(run: RunDir, policy: str) -> Iterator[Version]:
    """Yields a policy's versions, including removed ones. Reads one small file for each version of the run."""
    for number in reversed(_numbers(run)):
        yield from (version for version in _history(run, [number]) if version.policy == policy)


def versions(run: RunDir, policy: str | None = None) -> list[Version]:
    """Returns the versions of one policy, or of all policies, oldest first. Omits removed versions."""
    return [version for version in _history(run, _numbers(run)) if version.path and policy in (None, version.policy)]


def version(run: RunDir, number: int) -> Version | None:
    """Returns the version with the given number. Returns ``None`` if it does not exist or was removed. Raises
    OSError."""
    return next((found for found in _history(run, [number]) if found.path), None)


def ordinals(run: RunDir, policy: str, known: Mapping[int, int] | None = None) -> dict[int, int]:
    """Returns a policy's ordinals by version number, including removed versions. Version 0 has ordinal 0.

    Args:
        known: Result of an earlier call. Only newer versions are read, one small file each.

    Raises:
        OSError: The run directory is temporarily unreadable.
    """
    counted = {0: 0, **(known or {})}
    newest = max(counted)
    later = [number for number in _numbers(run) if number > newest]
    counted |= {version.version: version.ordinal for version in _history(run, later) if version.policy == policy}
    return counted


def publish(
    run: RunDir,
    source: str | os.PathLike[str],
    policy: str | None = None,
    *,
    move: bool = False,
    keep: int | None = None,
    token: str = "",
    digest: str = "",
    delta: bool = False,
    checksums: Mapping[str, Checksum] | None = None,
) -> Version:
    """Publishes the model directory ``source`` as the policy's next version, which its servers then load.

    Args:
        run: The campaign's run directory.
        source: Weights in the engine's format, usually a Hugging Face directory with safetensors. Missing files
            (configuration, tokenizer, chat template) are copied from the campaign's model. May also be a LoRA adapter,
            if the engine was started for adapters (``args: {enable-lora: true}`` for vLLM).
        policy: The policy to publish for. May be omitted if only one policy has a model.
        move: Rename ``source`` instead of copying it. It must be on the same file system as the run directory.
        keep: Remove all but this many of the policy's newest versions. ``None`` keeps all.
        token: Idempotency token, such as ``step-000012``. If the policy already has a version with this token, that
            version is returned and ``source`` is ignored.
        digest: Digest of the content, if known. A repeated token with a different digest is an error.
        delta: If the difference from the policy's last full version is small, store only that difference and keep
            ``source``.
        checksums: Checksums already computed, by file name. These files are not read again.

    Raises:
        ConfigError: The policy does not exist, ``source`` contains no weights that its engine can load, or ``token``
            was published with another digest.
    """
    source = Path(source)
    policy, model = policy_of(run, policy)
    made = _published(_history(run, _numbers(run)), policy, token, digest) if token else None
    if made is None:
        check(source, model)
        make_directory(run.weights)
        made = _add(run, source, model, Version(policy=policy, token=token, digest=digest), move, delta, checksums)
    point(run, policy)
    if keep is not None:
        prune(run, policy, keep)
    return made


def point(run: RunDir, policy: str) -> Version:
    """Moves the pointer to the policy's newest version. Repeats this if another process publishes a newer one
    meanwhile."""
    written = None
    while written != (latest := newest(run, policy)):
        write_json(_pointer(run, policy), asdict(latest))
        written = latest
    return latest


def prune(run: RunDir, policy: str, keep: int) -> list[int]:
    """Removes all but the ``keep`` newest versions of a policy. Returns the removed version numbers.

    Always keeps the current version and the bases of remaining deltas.
    """
    present = versions(run, policy)
    kept = [current(run, policy), *present[-max(1, keep) :]]
    needed = {v.version for v in kept} | {base_of(Path(v.path)) for v in kept if v.path}
    old = [v.version for v in present if v.version not in needed]
    for number in old:
        (run.weights / f".removing.{number}").touch(mode=0o600)
    for mark in run.weights.glob(".removing.*"):  # including those of publishers that were killed
        if (name := mark.name.removeprefix(".removing.")).isdecimal():
            _remove_files(run.weights / name)
        remove_tree(mark, ignore_errors=True)
    return old


# --- reading ----------------------------------------------------------------------------------------------------------


def _pointer(run: RunDir, policy: str) -> Path:
    return run.weights / f"current.{policy}.json"


def _numbers(run: RunDir) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(run.weights) if re.fullmatch(r"[1-9]\d*", name))
    except FileNotFoundError:
        return []


def read_about(folder: Path) -> VersionRecord | None:
    """Returns the metadata in a version's directory. Returns ``None`` if the directory is not a version. Raises
    OSError."""
    try:
        return read_json(folder / ABOUT, VersionRecord)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _history(run: RunDir, numbers: Iterable[int]) -> list[Version]:
    """Returns the versions with the given numbers, including removed versions."""
    history = []
    for number in numbers:
        folder = run.weights / str(number)
        if (about := read_about(folder)) is not None:
            path = "" if about.removed else str(folder)
            version = Version(number, path, about.policy, about.published_at, about.ordinal, about.token, about.digest)
            history.append(version)
    return history


def _published(history: Iterable[Version], policy: str, token: str, digest: str) -> Version | None:
    """Returns the version that was published with a token. Returns ``None`` if there is none.

    Raises:
        ConfigError: The version was published with another digest.
    """
    for version in history:
        if version.policy == policy and version.token == token:
            if digest and version.digest and digest != version.digest:
                raise ConfigError(
                    f"token {token!r} of policy {policy!r}: published as version {version.version} with digest "
                    f"{version.digest}, not {digest}; publish other weights with a different token"
                )
            return version
    return None


# --- publishing -------------------------------------------------------------------------------------------------------


def _add(
    run: RunDir,
    source: Path,
    model: Mapping[str, Any],
    new: Version,
    move: bool,
    delta: bool,
    checksums: Mapping[str, Checksum] | None,
) -> Version:
    """Stages a new version and gives it the next number.

    Returns the new version, or the version that another process has already published with the same token.
    """
    staged = staging(run)
    try:
        small = False
        wholes: list[Version] = []
        if delta:
            wholes = [version for version in versions(run, new.policy) if base_of(Path(version.path)) is None]
        if wholes:
            from megaflow_hpc.rundir.weight_delta import write_small_delta  # imports numpy, which readers do not need

            small = write_small_delta(source, Path(wholes[-1].path), wholes[-1].version, staged)
        if move and not small:
            _move(source, staged)
        elif not small:
            shutil.copytree(source, staged, symlinks=False)
        complete(staged, model)
        for described in (ABOUT, CHECKSUMS):  # if the source is a version itself
            (staged / described).unlink(missing_ok=True)
        if sum(server.policy == new.policy for server in read_run(run).servers) > 1:
            write_checksums(staged, checksums or {})
        fsync_tree(staged)
        return _take_number(run, staged, replace(new, published_at=time.time()), source)
    finally:
        if move and staged.is_dir() and not source.exists():
            for added in (ABOUT, CHECKSUMS):
                (staged / added).unlink(missing_ok=True)
            os.rename(staged, source)
        remove_tree(staged, ignore_errors=True)
        _remove_killed(run)


def _take_number(run: RunDir, staged: Path, new: Version, source: Path) -> Version:
    """Renames a staged version to the first free number. Renaming to a nonempty directory fails, so numbers are unique.

    Version directories never disappear. The process that gets a number therefore knows all lower versions, so the
    ordinal that it wrote beforehand is correct.
    """
    numbers = _numbers(run)
    below = _history(run, numbers)
    number = max(numbers, default=0) + 1
    while True:
        made = _published(below, new.policy, new.token, new.digest) if new.token else None
        if made is not None:
            return made
        ordinal = max((version.ordinal for version in below if version.policy == new.policy), default=0) + 1
        folder = run.weights / str(number)
        new = replace(new, version=number, path=str(folder), ordinal=ordinal)
        about = VersionRecord(
            policy=new.policy,
            published_at=new.published_at,
            ordinal=new.ordinal,
            token=new.token,
            digest=new.digest,
            source=str(source.absolute()),
            staged=staged.name,
        )
        write_record(staged / ABOUT, about)
        try:
            os.rename(staged, folder)
        except OSError:
            taken = read_about(folder)
            if taken is None or taken.staged != staged.name:  # else a network file system resent our own request
                if not folder.exists():
                    raise
                below += _history(run, [number])
                number += 1
                continue
        fsync(run.weights)
        return new


def _remove_files(folder: Path) -> None:
    """Removes a version's files. Its number and metadata stay, so that ordinals never change."""
    about = read_about(folder)
    if about is None:
        return
    if not about.removed:
        about.removed = True
        write_record(folder / ABOUT, about)
    for name in os.listdir(folder):
        if ABOUT not in name:  # keep a record that another process is about to rename, too
            remove_tree(folder / name, ignore_errors=True)


def staging(run: RunDir) -> Path:
    """Returns a new hidden path in ``RUN/weights``. If this process is killed, the next publisher removes it."""
    return run.weights / f".publishing.{_place()}.{Identity.of(os.getpid())}.{secrets.token_hex(4)}"


def _place() -> str:
    """Returns an id of this node's boot and PID namespace, within which a pid identifies a process."""
    return hashlib.sha256(f"{boot_id()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]


def _remove_killed(run: RunDir) -> None:
    """Removes the staging directories of killed publishers."""
    host = _place()
    for path in run.weights.glob(".publishing.*"):
        fields = path.name.split(".")
        identity = Identity.parse(fields[3]) if len(fields) > 3 and fields[2] == host else None
        try:
            died = identity is not None and not identity.alive()
            if died or time.time() - path.stat().st_mtime > STALE_PUBLISHER_S:
                remove_tree(path, ignore_errors=True)
        except FileNotFoundError:
            continue


def _move(source: Path, staged: Path) -> None:
    try:
        os.rename(source, staged)
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot be moved to {staged.parent}: {error.strerror}; publish a copy (without --move) "
            "or write it on the run directory's file system"
        ) from None
