"""Relays a policy's weights to a run at another site that shares no file system with this one.

::

    site A                                    any transport                         site B
    RUN/weights/10 ── send ──► DIR/10.<sha256>/ ──► DIR/10.<sha256>/ ── receive ──► RUN/weights/4

    DIR/10.<sha256>/  files of the newest version, and checksums.json; <sha256> is the SHA-256 of checksums.json
    DIR/9.<sha256>/   its base, if version 10 is a delta (:mod:`.weight_delta`)

The hash in a directory's name covers every file in it. The receiver therefore recognises an incomplete or damaged copy,
in whatever order the transport writes the files and however often it is interrupted. It publishes only files that it
has copied and verified, and restores a delta to a full version first.

``DIR`` is not a queue: it contains only the newest version. The sender replaces that version only when it is called. It
uses hard links where possible, so a version remains intact during the transfer even if the run removes it. Versions
superseded in the meantime are never sent. The receiver keeps no state: the token of a received version contains its
number at the sender's site, and only versions with higher numbers are published.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import fsync, fsync_tree, make_directory
from megaflow_hpc.host.files import read_regular, remove_tree
from megaflow_hpc.host.locks import locked_if_supported
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir, try_read_json
from megaflow_hpc.rundir.weight_source import DELTA, Delta, base_of, policy_of
from megaflow_hpc.rundir.weights import ABOUT, CHECKSUMS, MAX_THREADS, Checksum, Version, checksum, read_about

KEPT_VERSIONS = 3
"""Number of newest versions that a receiver keeps. An engine may still serve one while it loads the next."""
TOKEN = r"sent-(\d+)"
"""Pattern of a received version's token. It contains the version's number at the sender's site."""
DAMAGED = "its SHA-256 differs; if no copy is under way, remove it, so that it is copied again"


@dataclass(frozen=True)
class Sent:
    """A version in the directory that is copied between two sites. At the receiver, its files may be incomplete."""

    number: int
    """Version number at the sender's site."""
    sha256: str
    """SHA-256 of its ``checksums.json``."""
    folder: Path


@dataclass(frozen=True)
class Received:
    """Result of one call of :func:`receive`."""

    version: Version | None
    """The version that the call published. ``None`` if there was no newer one."""
    sent: int
    """Number of the newest version received so far, as counted at the sender's site. 0 if none was received."""
    waiting: str
    """Reason why a newer version is not complete. Empty if the newest version sent is complete."""


class _IncompleteError(Exception):
    """Raised if files of a version are missing, incomplete or damaged."""


def send(run: RunDir, directory: Path, policy: str | None = None) -> Version:
    """Puts the policy's newest version into ``directory`` and removes earlier ones, except its base.

    Do not call this function while the directory is being copied to the other site.

    Returns:
        The newest version. Its number is 0 if nothing has been published.

    Raises:
        ConfigError: The policy does not exist, or the directory contains versions of another run or policy.
    """
    policy, _ = policy_of(run, policy)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_if_supported(directory / ".lock"):
        for killed in directory.glob(".sending.*"):
            remove_tree(killed)
        before = list(_sent(directory))
        for sent in before:
            ours, theirs = read_about(run.weights / str(sent.number)), read_about(sent.folder)
            if not ours or not theirs or (theirs.policy, theirs.staged) != (policy, ours.staged):
                raise ConfigError(
                    f"{sent.folder}: is not a version of policy {policy!r} of {run}; give each run and policy a "
                    "directory of its own"
                )
        while True:
            latest = weights.newest(run, policy)
            if not latest.path:
                return latest
            try:
                base = base_of(Path(latest.path))
                wanted = {latest.version} | ({base} if base is not None else set())
                for number in wanted - {sent.number for sent in before}:
                    _send(run, number, directory)
                break
            except OSError:
                if weights.version(run, latest.version):
                    raise
                continue  # the run has removed the version in the meantime, so it has a newer one
        for sent in before:
            if sent.number not in wanted:
                old = directory / f".sending.{sent.number}"
                os.rename(sent.folder, old)
                remove_tree(old)
    return latest


def receive(run: RunDir, directory: Path, policy: str | None = None) -> Received:
    """Publishes the newest complete version in ``directory``, if it is newer than the last one received.

    The call may safely be repeated or killed at any time. Removes versions from ``directory`` that are no longer
    needed.

    Raises:
        ConfigError: The policy does not exist, its engine cannot load the weights, or the weights come from a different
            run than earlier versions.
    """
    policy, _ = policy_of(run, policy)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a directory; name the one to which the sender's directory is copied")
    make_directory(run.weights)
    with locked_if_supported(run.weights / f".receiving.{policy}"):
        if weights.current(run, policy).version < weights.newest(run, policy).version:
            weights.point(run, policy)  # a killed call may have published a version without updating the pointer
        last, number = _last_received(run, policy)
        sent = sorted(_sent(directory), key=lambda sent: sent.number, reverse=True)
        same = {other.sha256 for other in sent if other.number == number}
        if last and same and last.digest not in same:
            raise ConfigError(
                f"{directory}: its version {number} is not the one that was received before; weights of another run "
                "need a new run here"
            )
        waiting, made = "", None
        for new in sent:
            if new.number <= number:
                break
            try:
                made = _publish(run, policy, new, sent)
                number = new.number
                break
            except _IncompleteError as error:
                waiting = waiting or str(error)
        _remove_old(sent, number)
    return Received(made, number, waiting)


# --- sending ----------------------------------------------------------------------------------------------------------


def _sent(directory: Path) -> Iterator[Sent]:
    for name in os.listdir(directory):
        if match := re.fullmatch(r"([1-9]\d*)\.([0-9a-f]{64})", name):
            yield Sent(int(match[1]), match[2], directory / name)


def _send(run: RunDir, number: int, directory: Path) -> None:
    """Puts a version into the directory. Raises OSError if the run removes the version in the meantime."""
    published, staged = run.weights / str(number), directory / f".sending.{number}"
    try:
        shutil.copytree(published, staged, copy_function=_link, ignore=lambda *_: [CHECKSUMS])
        if weights.version(run, number) is None:
            raise FileNotFoundError(str(published))
        weights.write_checksums(staged, weights.read_checksums(published))
        fsync_tree(staged)
        os.rename(staged, directory / f"{number}.{checksum(staged / CHECKSUMS).sha256}")
        fsync(directory)
    finally:
        remove_tree(staged)


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)  # published files never change
    except OSError:  # another file system
        shutil.copyfile(source, target)


# --- receiving --------------------------------------------------------------------------------------------------------


def _last_received(run: RunDir, policy: str) -> tuple[Version | None, int]:
    """Returns the last version received, and its number at the sender's site."""
    for version in weights.newest_first(run, policy):
        if match := re.fullmatch(TOKEN, version.token):
            return version, int(match[1])
    return None, 0


def _publish(run: RunDir, policy: str, new: Sent, sent: list[Sent]) -> Version:
    """Publishes a version. Raises _IncompleteError."""
    staged = weights.staging(run)
    try:
        whole = staged / "sent"
        sums = _copy(new, whole)
        if delta := try_read_json(whole / DELTA, Delta):
            from megaflow_hpc.rundir.weight_delta import put_together  # imports numpy, which full versions do not need

            base = next((other.folder for other in sent if other.number == delta.base), None)
            if base is None:
                raise _IncompleteError(f"{new.folder}: its base, version {delta.base}, is missing")
            try:
                whole = put_together(whole, base, staged / "whole")  # verifies the files
            except ConfigError as error:
                raise _IncompleteError(f"{base}: {DAMAGED}") from error
            sums |= {name: Checksum(file.size, file.sha256) for name, file in delta.files.items()}
        token = f"sent-{new.number}"
        return weights.publish(
            run, whole, policy, move=True, keep=KEPT_VERSIONS, token=token, digest=new.sha256, checksums=sums
        )
    finally:
        remove_tree(staged, ignore_errors=True)


def _copy(new: Sent, to: Path) -> dict[str, Checksum]:
    """Copies a version's files to ``to`` and verifies the copies. Returns their checksums. Raises _IncompleteError."""
    try:
        listed = read_regular(new.folder / CHECKSUMS)
        if hashlib.sha256(listed).hexdigest() != new.sha256:
            raise _IncompleteError(f"{new.folder / CHECKSUMS}: is not complete")
        sums = msgspec.json.decode(listed, type=dict[str, Checksum])
        sums = {name: expected for name, expected in sums.items() if ABOUT not in name}
        for name, expected in sums.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ConfigError(f"{new.folder / CHECKSUMS}: {name!r} is not a file of the version")
            if (new.folder / name).stat().st_size != expected.size:
                raise _IncompleteError(f"{new.folder / name}: is not complete")
            (to / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)

        def copied(name: str) -> Checksum:
            shutil.copyfile(new.folder / name, to / name)
            return checksum(to / name)

        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
            for name, found in zip(sums, threads.map(copied, sums), strict=True):
                if found != sums[name]:
                    raise _IncompleteError(f"{new.folder / name}: {DAMAGED}")
    except FileNotFoundError as error:
        raise _IncompleteError(f"{error.filename}: is missing") from None
    return sums


def _remove_old(sent: list[Sent], number: int) -> None:
    """Removes versions older than the last one received. Keeps its base."""
    last = next((other for other in sent if other.number == number), None)
    if last is None:
        return
    delta = try_read_json(last.folder / DELTA, Delta)
    for other in sent:
        if other.number < number and (delta is None or other.number != delta.base):
            remove_tree(other.folder, ignore_errors=True)
