"""Shares one campaign's model servers with other campaigns, and possibly with other users, as an engine pool.

::

    POOL/pool/about.json             policies, and the number of servers of each
    POOL/pool/servers/<server>.json  an endpoint file without its key
    POOL/pool/cancelled              marks the pool as cancelled: clients should not wait for its servers
    POOL/pool/members/<digest>       a member: its name and content are the SHA-256 of the campaign's key

To join, a campaign generates a key, stores it in a file that only its user can read, and registers only its digest.
Other users never see the key. The file's owner identifies the member. Removing the file ends the membership. With
``share: group``, the pool owner's group can access the directories, and the members directory has the sticky bit.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_atomic, write_json
from megaflow_hpc.host.private import who_may_replace
from megaflow_hpc.host.process import user_name
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles, PoolMembership
from megaflow_hpc.rundir.layout import RunDir, read_json, try_read_json, write_record

DIGEST = re.compile(r"[0-9a-f]{64}")


class AboutPool(msgspec.Struct):
    """Public description of a pool."""

    policies: dict[str, int]
    """Number of servers by policy."""
    share: str = "user"
    """Users of the pool: ``user`` for only its owner, or ``group``."""


class EnginePool:
    """The part of a pool's run directory that is visible to other users."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.path = Path(run) / "pool"
        self.servers, self.members = self.path / "servers", self.path / "members"
        self._cancelled = self.path / "cancelled"

    def create(self, policies: Mapping[str, int], share: str) -> None:
        """Creates the pool's directories.

        Args:
            policies: Number of servers by policy.
            share: Who may use the pool: ``user`` for only its owner, or ``group``.
        """
        group = share == "group"
        # The setgid bit makes new files inherit the run directory's group instead of the writer's.
        if group:
            self.path.parent.chmod(self.path.parent.stat().st_mode & 0o7777 | 0o2710)
        for folder, mode in ((self.path, 0o2750), (self.servers, 0o2750), (self.members, 0o3770)):
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(mode if group else 0o700)
        write_record(self.path / "about.json", AboutPool(dict(policies), share), 0o640)

    def close(self) -> None:
        """Marks the pool as cancelled."""
        write_atomic(self._cancelled, "", 0o640)

    def reopen(self) -> None:
        """Removes the cancelled mark, so that clients use the pool again."""
        self._cancelled.unlink(missing_ok=True)

    @property
    def closed(self) -> str:
        """Reason why clients should not wait for the pool's servers. Empty while the pool is open."""
        run = self.path.parent
        if not self._cancelled.exists():
            return ""
        return f"the engine pool {run} was cancelled; its owner can continue it with: megaflow-hpc resume {run}"

    def policy(self, name: str) -> str:
        """Returns the pool's policy that serves a campaign's policy ``name``.

        This is the policy with the same name, or the only policy of a pool that has just one.

        Raises:
            ConfigError: The pool was cancelled, or it has several policies and none has that name.
        """
        record = self.about()
        if closed := self.closed:
            raise ConfigError(closed)
        if name not in record and len(record) != 1:
            raise ConfigError(f"{self.path.parent}: the pool has no policy {name!r}; there are: {', '.join(record)}")
        return name if name in record else next(iter(record))

    def about(self) -> dict[str, int]:
        """Returns the number of servers by policy.

        Raises:
            ConfigError: The directory is not a pool, this user may not use it, or another user could replace it and
                then read every prompt.
        """
        try:
            if why := who_may_replace(self.path, self.path.stat().st_uid, "this engine pool"):
                raise ConfigError(why)
            return read_json(self.path / "about.json", AboutPool).policies
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is damaged"
            raise ConfigError(
                f"{self.path.parent}: no engine pool that this user may use ({why}); a pool is the run directory of a "
                "campaign with a pool: section, and share: group opens it to its owner's group"
            ) from None

    def advertise(self, endpoint: Endpoint) -> None:
        """Publishes an endpoint to other campaigns, without its key."""
        shown = msgspec.to_builtins(endpoint)
        del shown["key"]
        write_json(self.servers / f"{endpoint.server}.json", shown, 0o640)

    def withdraw(self, server: str) -> None:
        """Stops advertising a server."""
        (self.servers / f"{server}.json").unlink(missing_ok=True)

    def serving(self, policy: str) -> list[Endpoint]:
        """Returns the pool's active servers for a policy, without their keys."""
        endpoints = [try_read_json(path, Endpoint) for path in sorted(self.servers.glob("*.json"))]
        return [endpoint for endpoint in endpoints if endpoint and endpoint.url and endpoint.policy == policy]

    def enrol(self, run: RunDir, policy: str, theirs: str) -> None:
        """Registers a campaign as a member of the pool, and stores its key in the campaign's run directory.

        Args:
            policy: The campaign's policy whose model the pool serves.
            theirs: The corresponding policy of the pool.

        Raises:
            ConfigError: This user may not write to the pool.
        """
        key = secrets.token_urlsafe(32)
        digest = digest_of(key)
        membership = PoolMembership(pool=str(self.path.parent), policy=policy, theirs=theirs, key=key)
        EndpointFiles(run).publish_membership(membership)
        try:
            write_atomic(self.members / digest, digest, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.members}: cannot enrol in this pool: {error.strerror}") from None

    def users(self) -> dict[str, str]:
        """Returns the login name of each member, by the digest of its key."""
        users = {}
        for path in self.members.iterdir():
            if DIGEST.fullmatch(path.name):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    continue
                try:
                    status = os.fstat(descriptor)
                    # Members may create any file here. A link to another user's file has a name that differs from the
                    # digest in it.
                    if stat.S_ISREG(status.st_mode) and os.read(descriptor, 65) == path.name.encode():
                        users[path.name] = user_name(status.st_uid)
                finally:
                    os.close(descriptor)
        return users


def digest_of(key: str) -> str:
    """Returns the hexadecimal SHA-256 of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def pool_servers(membership: PoolMembership) -> list[Endpoint]:
    """Returns the servers of a pool that serve a campaign's policy. They have the campaign's own names and key."""
    servers = EnginePool(membership.pool).serving(membership.theirs)
    for server in servers:
        server.server, server.policy = f"{membership.policy}@{server.server}", membership.policy
        server.key = membership.key
    return servers
