"""Users and groups of an image in the making, as its own ``/etc/passwd`` and ``/etc/group`` name them."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_END_OF_IDS = 1 << 32


@dataclass(frozen=True)
class Account:
    """Who a step runs as: numeric ids, further groups and home directory."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/root"


def account(view: LayerView, user: str | None) -> Account:
    """Returns whom ``USER`` names: a user with its groups, or a user and one group; unknown numbers stand for
    themselves.

    Raises:
        ConfigError: the image has no such user or group.
    """
    name, colon, group = (user or "0").partition(":")
    users = _rows(view, "etc/passwd", 7)
    row = next((row for row in users if row[0] == name), None) or next((row for row in users if row[2] == name), None)
    if row is None and not name.isdecimal():
        raise ConfigError(f"USER {user}: the image has no such user")
    uid, gid, home = (_number(row[2]), _number(row[3]), row[5] or "/") if row else (_number(name), 0, "/")
    if colon and group:
        return Account(uid, _group(view, group), (), home)
    known = row[0] if row else ""
    rows = _rows(view, "etc/group", 4)
    further = tuple(_number(row[2]) for row in rows if known and known in row[3].split(","))
    return Account(uid, gid, further, home)


def owner(view: LayerView, text: str) -> tuple[int, int]:
    """Returns uid and gid of a ``--chown``: of a name its own group, of a number alone the group of that number.

    Raises:
        ConfigError: the image has no such user or group.
    """
    name, _, group = text.partition(":")
    if not name:
        uid = gid = 0
    elif name.isdecimal():
        uid = gid = _number(name)
    else:
        row = next((row for row in _rows(view, "etc/passwd", 7) if row[0] == name), None)
        if row is None:
            raise ConfigError(f"--chown={text}: the image has no user {name!r}; write a number, or add the user before")
        uid, gid = _number(row[2]), _number(row[3])
    return uid, _group(view, group) if group else gid


def _group(view: LayerView, name: str) -> int:
    if name.isdecimal():
        return _number(name)
    row = next((row for row in _rows(view, "etc/group", 4) if row[0] == name), None)
    if row is None:
        raise ConfigError(f"group {name!r}: the image has no such group; write a number, or add the group before")
    return _number(row[2])


def _rows(view: LayerView, path: str, columns: int) -> list[list[str]]:
    text = view.read(path, _MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    rows = [line.split(":") for line in text.split("\n")]
    return [row for row in rows if len(row) == columns and row[2].isdecimal()]


def _number(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 11 else _END_OF_IDS
    if value >= _END_OF_IDS:
        raise ConfigError(f"{text[:40]}: no user or group has this number")
    return value
