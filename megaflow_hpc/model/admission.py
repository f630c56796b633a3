"""Who may keep a connection open, so that nobody can take all of a server's descriptors.

A connection *waits* until a request on it has shown a key; then it belongs to the *owner* of that key::

    accepted ──► waits, at most FIRST_REQUEST_S ──► admitted for its owner ──► closed by either side
                     │                                     ▲      │
                     │ too many wait: the peer with        │      │ too many of one owner: the longest idle one goes;
                     ▼ the most loses its oldest           │      ▼ with none idle the new one is refused
                   closed                                  └─ released: the owner is gone, it waits again

A *peer* is a user of this node, or another node's address. So whoever opens thousands of connections crowds out
those, and a peer that opens few is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_REQUEST_S = 10.0
"""Seconds from a connection to the end of the head of a request with a key, a TLS handshake included."""
WAITING = 256
"""Connections that may wait at once, fewer where the process may have few descriptors."""
FEWEST = 4
"""Connections that an owner may have in any case."""


@dataclass(eq=False, slots=True)
class Connection:
    """One accepted connection; ``close`` ends it at once."""

    peer: str
    arrived: float
    close: Callable[[], object]
    owner: str = ""
    """Whose key it has shown; empty while it waits."""
    busy: bool = False
    """A request of it is being answered."""
    used: float = 0.0
    """When its last request was answered."""


class Admission:
    """Keeps count of the connections of one process's server. All times are seconds of one clock.

    Args:
        descriptors: Files that the process may have open; an eighth of them is left to other things.
        of_one: Connections that one owner may have.
        refused: Told what was closed or refused, and whose it was.
    """

    def __init__(self, descriptors: int, of_one: int, refused: Callable[[str, str], None]) -> None:
        self.most_waiting = min(WAITING, max(descriptors // 8, FEWEST))
        self.of_one = of_one
        self._refused = refused
        # A call takes two descriptors, one to the agent and one to the engine.
        self._room = max(descriptors * 3 // 8, FEWEST)
        self._waiting: dict[Connection, None] = {}
        """In the order in which they arrived."""
        self._peers: dict[str, dict[Connection, None]] = {}
        """The same by peer."""
        self._owners: dict[str, dict[Connection, None]] = {}

    @property
    def waiting(self) -> int:
        """Connections that have not shown a key."""
        return len(self._waiting)

    def arrive(self, connection: Connection) -> None:
        """Takes a new connection; another one, or this one, is closed if too many wait."""
        self._waiting[connection] = None
        self._peers.setdefault(connection.peer, {})[connection] = None
        if len(self._waiting) > self.most_waiting:
            self.crowd_out()

    def crowd_out(self) -> None:
        """Closes the oldest waiting connection of the peer that has the most; nothing if none waits."""
        if self._peers:
            peer, most = max(self._peers.items(), key=lambda item: len(item[1]))
            self._close(next(iter(most)), "connections without a key, too many at once", peer)

    def expire(self, before: float) -> float | None:
        """Closes what has waited since ``before`` or longer; returns when the oldest that is left arrived."""
        while self._waiting:
            oldest = next(iter(self._waiting))
            if oldest.arrived > before:
                return oldest.arrived
            self._close(oldest, "connections without a whole request and a key in time", oldest.peer)
        return None

    def admit(self, connection: Connection, owner: str) -> bool:
        """Notes whose key a connection has shown; ``False`` if this owner has too many and none of them is idle."""
        if connection.owner == owner:
            return True
        self.leave(connection)
        theirs = self._owners.setdefault(owner, {})
        if len(theirs) >= max(min(self.of_one, self._room // len(self._owners)), FEWEST):
            idle = min((c for c in theirs if not c.busy), key=lambda c: c.used, default=None)
            if idle is None:
                self.arrive(connection)
                self._refused("connections of one key, too many at once", owner)
                return False
            self._close(idle, "idle connections of one key, too many at once", owner)
            theirs = self._owners.setdefault(owner, {})
        theirs[connection] = None
        connection.owner = owner
        return True

    def release(self, owner: str, now: float) -> None:
        """Makes an owner's connections wait again: its key is no longer valid."""
        for connection in list(self._owners.get(owner, ())):
            self.leave(connection)
            connection.owner, connection.arrived = "", now
            self.arrive(connection)

    def leave(self, connection: Connection) -> None:
        """Forgets a connection that is closed; one that is not known is ignored."""
        if connection in self._waiting:
            del self._waiting[connection]
            _remove(self._peers, connection.peer, connection)
        else:
            _remove(self._owners, connection.owner, connection)

    def close_waiting(self) -> None:
        """Closes everything that waits."""
        for connection in list(self._waiting):
            self.leave(connection)
            connection.close()

    def _close(self, connection: Connection, why: str, whose: str) -> None:
        self.leave(connection)
        self._refused(why, whose)
        connection.close()


def _remove(groups: dict[str, dict[Connection, None]], name: str, connection: Connection) -> None:
    group = groups.get(name)
    if group is not None:
        group.pop(connection, None)
        if not group:
            del groups[name]
