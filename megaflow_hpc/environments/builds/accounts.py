"""Resolves the users and groups of Dockerfile steps with the image's ``/etc/passwd`` and ``/etc/group``."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_END_OF_IDS = 1 << 32


@dataclass(frozen=True)
class Account:
    """The user that a step runs as: numeric ids, supplementary groups and home directory."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/root"


def account(view: LayerView, user: str | None) -> Account:
    """Resolves a ``USER`` value, ``user`` or ``user:group``, to an account. ``None`` means root.

    Without a group, the account has the user's groups from the image. Numeric ids need not be listed in the image.

    Raises:
        ConfigError: The image has no such user or group.
    """
    name, _, group = (user or "0").partition(":")
    users = _rows(view, "etc/passwd")
    row = _find(users, 0, name) or _find(users, 2, name)
    if row is not None:
        uid, gid, home = _number(row[2]), _number(row[3]), row[5] or "/"
    elif name.isdecimal():
        uid, gid, home = _number(name), 0, "/"
    else:
        raise ConfigError(f"USER {user}: the image has no such user")
    if group:
        return Account(uid, _group(view, group), (), home)
    groups: list[int] = []
    if row is not None:
        groups = [_number(each[2]) for each in _rows(view, "etc/group") if row[0] in each[3].split(",")]
    return Account(uid, gid, tuple(groups), home)


def owner(view: LayerView, text: str) -> tuple[int, int]:
    """Resolves a ``--chown`` value, ``user`` or ``user:group``, to a uid and a gid.

    Without a group, a user name implies the user's primary group. A numeric uid implies the same gid.

    Raises:
        ConfigError: The image has no such user or group.
    """
    name, _, group = text.partition(":")
    if not name:
        uid = gid = 0
    elif name.isdecimal():
        uid = gid = _number(name)
    else:
        row = _find(_rows(view, "etc/passwd"), 0, name)
        if row is None:
            raise ConfigError(f"--chown={text}: the image has no user {name!r}; write a number, or add the user before")
        uid, gid = _number(row[2]), _number(row[3])
    return uid, _group(view, group) if group else gid


def _group(view: LayerView, name: str) -> int:
    if name.isdecimal():
        return _number(name)
    row = _find(_rows(view, "etc/group"), 0, name)
    if row is None:
        raise ConfigError(f"group {name!r}: the image has no such group; write a number, or add the group before")
    return _number(row[2])


def _find(rows: list[list[str]], column: int, value: str) -> list[str] | None:
    return next((row for row in rows if row[column] == value), None)


def _rows(view: LayerView, path: str) -> list[list[str]]:
    columns = 7 if path == "etc/passwd" else 4
    text = view.read(path, _MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    rows = [line.split(":") for line in text.split("\n")]
    return [row for row in rows if len(row) == columns and row[2].isdecimal()]


def _number(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 11 else _END_OF_IDS
    if value >= _END_OF_IDS:
        raise ConfigError(f"{text[:40]}: no user or group has this number")
    return value
