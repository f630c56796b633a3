"""Versions of a policy's weights in a run directory: a trainer publishes them, model servers notice and load them.

::

    RUN/weights/
      current.<policy>.json   {"version": 3, "ordinal": 2, "policy": …}: what shall be served now
      3/                      a whole model directory, as the engine reads it, and megaflow-weights.json
      4/                      or a LoRA adapter (adapter_config.json) on the campaign's own model
      5/                      or what differs from an earlier version (delta.json); see weight_delta
      1/megaflow-weights.json all that is left of a version that was removed; its number is never given again

A version is complete before it can be seen: its files are written and fsynced beside it, one rename makes it number
``n``, another moves the pointer. *Numbers* are positive and grow, over all policies of a run together; version 0 is
the model of the campaign file. *Ordinals* count the versions of one policy, 0 the campaign's model, then 1, 2, …:
staleness is a difference of them. A *token* (a trainer's step) says which publishing this is: the same one again gives
the version that is there.

Publishers may run at the same time, on several nodes, and die at any instant. The rename decides: only one can win a
number, and whoever wins ``n`` has read all below it, so that the ordinal and the token among its files are right
without a lock. The pointer ends at the highest number whoever writes last; one that a dead publisher did not move is
moved by the next. A publisher that dies leaves a hidden directory that nobody reads and the next one removes.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import fsync, fsync_tree, make_directory, write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, boot_id
from megaflow_hpc.rundir.json_files import read_json, write_record
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weight_source import ADAPTER, base_of, check, complete, policy_of

ABOUT = "megaflow-weights.json"
LEFTOVER_S = 86_400.0
"""Age in seconds at which what a publisher on another node left is removed; a large model is copied in far less."""


@dataclass(frozen=True)
class Version:
    """One set of weights. ``version`` 0 with an empty path is the campaign's own model."""

    version: int = 0
    path: str = ""
    """Its directory; empty where its files were removed."""
    policy: str = ""
    published_at: float = 0.0
    """Seconds UTC."""
    ordinal: int = 0
    """How many versions of its policy were published with it."""
    token: str = ""
    """What its publisher called this publishing."""
    digest: str = ""
    """What its publisher said of its content."""

    @property
    def adapter(self) -> bool:
        """Whether it is a LoRA adapter on the campaign's own model."""
        return bool(self.path) and (Path(self.path) / ADAPTER).is_file()


class Pointer(msgspec.Struct):
    """The file that names the version to serve now."""

    version: int
    ordinal: int | None = None
    """``None`` in files of earlier versions of the package."""


class About(msgspec.Struct, kw_only=True):
    """The record in a version's directory."""

    policy: str
    published_at: float = 0.0
    """Seconds UTC."""
    ordinal: int | None = None
    """``None`` in files of earlier versions of the package."""
    token: str = ""
    digest: str = ""
    source: str = ""
    """The directory that was published."""
    staged: str = ""
    """Name under which the version was prepared."""
    removed: bool = False
    """True if the version's other files were removed."""


def current(run: RunDir, policy: str) -> Version:
    """Returns the version to serve now; one open and read, also where the file system caches attributes.

    Raises:
        OSError: the run directory cannot be read now; that says nothing of the version.
    """
    try:
        pointer = read_json(_pointer(run, policy), Pointer)
    except (FileNotFoundError, ValueError):
        return Version(policy=policy)
    ordinal = pointer.ordinal
    if ordinal is None:
        ordinal = ordinals(run, policy).get(pointer.version, 0)
    # A run directory may have been moved since: the number says where the files are.
    return Version(pointer.version, str(run.weights / str(pointer.version)), policy, ordinal=ordinal)


def newest(run: RunDir, policy: str) -> Version:
    """Returns the highest version of a policy: what the pointer names but for instants, and for publishers that died.

    It lists ``RUN/weights`` and reads a small file of each version above it.

    Raises:
        OSError: the run directory cannot be read now.
    """
    numbers = _numbers(run)
    for number in reversed(numbers):
        about = _about(run.weights / str(number))
        if about is not None and about.policy == policy and not about.removed:
            known = numbers if about.ordinal is None else [number]
            return next(version for version in _history(run, known) if version.version == number)
    return Version(policy=policy)


def versions(run: RunDir, policy: str | None = None) -> list[Version]:
    """Returns every version whose files are there, of one policy or of all, oldest first."""
    return [version for version in _history(run, _numbers(run)) if version.path and policy in (None, version.policy)]


def ordinals(run: RunDir, policy: str, known: Mapping[int, int] | None = None) -> dict[int, int]:
    """Returns the ordinal of each version of a policy by number, 0 for 0, of removed versions too.

    Args:
        known: what an earlier call returned; only what was published since is read, a small file each.

    Raises:
        OSError: the run directory cannot be read now.
    """
    found = {0: 0, **(known or {})}
    newest = max(found)
    later = [number for number in _numbers(run) if number > newest]
    found |= {v.version: v.ordinal for v in _history(run, later, {policy: found[newest]}) if v.policy == policy}
    return found


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
) -> Version:
    """Publishes the model directory ``source`` as the policy's next version; its servers load it.

    Args:
        run: The campaign's run directory.
        source: Weights as the engine reads them (for most a Hugging Face directory with safetensors). What it lacks of
            the campaign's model beside tensors (configuration, tokenizer, chat template) is added to the copy. Or a
            LoRA adapter, where the engine was started for them (``args: {enable-lora: true}`` of vLLM).
        policy: Which model; may be left out where there is one.
        move: Rename the directory instead of copying it; it must be on the run directory's file system.
        keep: Remove all but this many of the policy's newest versions.
        token: Names this publishing, such as ``step-000012``. Where the policy has a version of that token, that one is
            returned and ``source`` is not looked at.
        digest: Names the content, where the publisher knows it. Kept, and compared where a token comes again.
        delta: Write what differs from the policy's last whole version, where that is small; ``source`` stays.

    Raises:
        ConfigError: No such policy, ``source`` is no directory with weights, or ``token`` was published with another
            digest.
    """
    source = Path(source)
    policy, model = policy_of(run, policy)
    made = _published(_history(run, _numbers(run)), policy, token, digest) if token else None
    if made is None:
        check(source, model)
        make_directory(run.weights)
        made = _add(run, source, model, Version(policy=policy, token=token, digest=digest), move, delta)
    point(run, policy)
    if keep is not None:
        prune(run, policy, keep)
    return made


def point(run: RunDir, policy: str) -> Version:
    """Moves the pointer to the policy's highest version; repeats until no higher one was published meanwhile."""
    written = None
    while written != (found := newest(run, policy)):
        write_json(_pointer(run, policy), asdict(found))
        written = found
    return found


def prune(run: RunDir, policy: str, keep: int) -> list[int]:
    """Removes all but the ``keep`` newest versions of a policy; returns their numbers.

    The current one stays, and so do those from which kept ones that are deltas are put together.
    """
    found = versions(run, policy)
    kept = [current(run, policy), *found[-max(1, keep) :]]
    needed = {v.version for v in kept} | {base_of(Path(v.path)) for v in kept if v.path}
    old = [v.version for v in found if v.version not in needed]
    for number in old:
        (run.weights / f".removing.{number}").touch(mode=0o600)
    for mark in run.weights.glob(".removing.*"):  # also those of one who died meanwhile
        if (name := mark.name.removeprefix(".removing.")).isdecimal():
            _empty(run.weights / name)
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


def _about(folder: Path) -> About | None:
    """Returns the record of a version's directory; ``None`` if it is not a version. Raises OSError."""
    try:
        return read_json(folder / ABOUT, About)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _history(run: RunDir, numbers: Iterable[int], counted: Mapping[str, int] | None = None) -> list[Version]:
    """Returns the versions of some numbers, removed ones too. ``counted``: ordinals of each policy before them."""
    found, last = [], dict(counted or {})
    for number in numbers:
        folder = run.weights / str(number)
        if (about := _about(folder)) is not None:
            policy = about.policy
            last[policy] = last.get(policy, 0) + 1 if about.ordinal is None else about.ordinal
            path = "" if about.removed else str(folder)
            published_at, ordinal = about.published_at, last[policy]
            found.append(Version(number, path, policy, published_at, ordinal, about.token, about.digest))
    return found


def _published(history: Iterable[Version], policy: str, token: str, digest: str) -> Version | None:
    """Returns the version of a token.

    Raises:
        ConfigError: It was published with another digest.
    """
    for version in history:
        if version.policy == policy and version.token == token:
            if digest and version.digest and digest != version.digest:
                raise ConfigError(
                    f"token {token!r} of policy {policy!r}: published as version {version.version} with digest "
                    f"{version.digest}, not {digest}; publish other weights under a token of their own"
                )
            return version
    return None


# --- publishing -------------------------------------------------------------------------------------------------------


def _add(run: RunDir, source: Path, model: Mapping[str, Any], new: Version, move: bool, delta: bool) -> Version:
    """Stages a new version and gives it the next number; returns it, or who was faster under its token."""
    place = _place()
    staged = run.weights / f".publishing.{place}.{Identity.of(os.getpid())}.{secrets.token_hex(4)}"
    try:
        small = False
        if delta and (wholes := [v for v in versions(run, new.policy) if base_of(Path(v.path)) is None]):
            from megaflow_hpc.rundir.weight_delta import write_small_delta  # numpy, which readers do without

            small = write_small_delta(source, Path(wholes[-1].path), wholes[-1].version, staged)
        if move and not small:
            _move(source, staged)
        elif not small:
            shutil.copytree(source, staged, symlinks=False)
        complete(staged, model)
        fsync_tree(staged)
        return _take_number(run, staged, replace(new, published_at=time.time()), source)
    finally:
        if move and staged.is_dir() and not source.exists():
            (staged / ABOUT).unlink(missing_ok=True)
            os.rename(staged, source)
        remove_tree(staged, ignore_errors=True)
        _sweep(run, place)


def _take_number(run: RunDir, staged: Path, new: Version, source: Path) -> Version:
    """Renames to the first free number: onto a directory that has files a rename fails, so each number is won once.

    As no version ever vanishes, who wins ``n`` knows all versions below: the ordinal written before was right.
    """
    numbers = _numbers(run)
    below = _history(run, numbers)
    number = max(numbers, default=0) + 1
    while True:
        if new.token and (made := _published(below, new.policy, new.token, new.digest)):
            return made
        ordinal = max((version.ordinal for version in below if version.policy == new.policy), default=0) + 1
        folder = run.weights / str(number)
        new = replace(new, version=number, path=str(folder), ordinal=ordinal)
        about = About(
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
            taken = _about(folder)
            if taken is None or taken.staged != staged.name:  # else a network file system repeated the request
                if not folder.exists():
                    raise
                below += _history(run, [number], {new.policy: ordinal - 1})
                number += 1
                continue
        fsync(run.weights)
        return new


def _empty(folder: Path) -> None:
    """Removes a version's files; its number and what is known of it stay, so that no ordinal ever changes."""
    about = _about(folder)
    if about is None:
        return
    if not about.removed:
        about.removed = True
        write_record(folder / ABOUT, about)
    for name in os.listdir(folder):
        if ABOUT not in name:  # nor what another one is about to rename to it
            remove_tree(folder / name, ignore_errors=True)


def _place() -> str:
    """Names this boot of this node and its process namespace, within which pids mean something."""
    return hashlib.sha256(f"{boot_id()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]


def _sweep(run: RunDir, place: str) -> None:
    """Removes what publishers that died left."""
    for path in run.weights.glob(".publishing.*"):
        where, process = [*path.name.split("."), "", ""][2:4]
        identity = Identity.parse(process) if where == place else None
        try:
            died = identity is not None and not identity.alive()
            if died or time.time() - path.stat().st_mtime > LEFTOVER_S:
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
