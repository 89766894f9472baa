"""Which connections a server has, and whose room a new one may take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

MOST_CONNECTIONS = 4096
"""Of one server; one more closes the one that has been without a request to be served for longest."""
MOST_WAITING_OF_ADDRESS = 1024
"""Connections of one address that serve no request; one more closes the oldest of them."""

MOST_TURNED_AWAY = 256
"""Connections beside those, kept for a moment so that their clients can read that there is no room."""


class Waiting(Protocol):
    """A connection, as far as room is concerned."""

    def waiting_since(self) -> float | None:
        """Since when it has had no request to be served; None while it has one."""


class Crowd:
    """All connections of one server, by the address that they come from."""

    def __init__(self) -> None:
        self._by_address: dict[str, set[Waiting]] = {}
        self._count = 0
        self._turned_away: dict[Waiting, None] = {}
        """The first of them first."""

    def add(self, connection: Waiting, address: str) -> None:
        self._by_address.setdefault(address, set()).add(connection)
        self._count += 1

    def turn_away(self, connection: Waiting, address: str) -> Waiting | None:
        """Give a connection no place; whose answer, one of these too, has to be cut off for it, if any."""
        self.remove(connection, address)
        self._turned_away[connection] = None
        return next(iter(self._turned_away)) if len(self._turned_away) > MOST_TURNED_AWAY else None

    def remove(self, connection: Waiting, address: str) -> None:
        self._turned_away.pop(connection, None)
        there = self._by_address.get(address, set())
        if connection in there:
            there.remove(connection)
            self._count -= 1
        if not there:
            self._by_address.pop(address, None)

    @property
    def is_full(self) -> bool:
        return self._count > MOST_CONNECTIONS

    def to_close(self, new: Waiting, address: str) -> Waiting | None:
        """Whose connection ends so that the new one has room; None where nobody's has to, or nobody's can."""
        mine = self._by_address.get(address, set())
        if len(mine) > MOST_WAITING_OF_ADDRESS:
            waiting = _waiting(mine, new)
            if len(waiting) >= MOST_WAITING_OF_ADDRESS:
                return _oldest(waiting)
        if not self.is_full:
            return None
        return _oldest(_waiting((one for each in self._by_address.values() for one in each), new))


def _waiting(connections: Iterable[Waiting], new: Waiting) -> list[tuple[float, Waiting]]:
    found = ((one.waiting_since(), one) for one in connections if one is not new)
    return [(since, one) for since, one in found if since is not None]


def _oldest(waiting: list[tuple[float, Waiting]]) -> Waiting | None:
    return min(waiting, key=lambda pair: pair[0])[1] if waiting else None
