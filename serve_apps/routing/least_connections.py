"""Least connections: the next request goes to the replica with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)


class LeastConnections(Generic[Replica]):
    """Orders replicas by their connections; among equals, the one chosen longest ago comes first.

    >>> policy = LeastConnections[str]()
    >>> policy.choose({"a": 1, "b": 0, "c": 0})
    'b'
    >>> policy.choose({"a": 1, "b": 0, "c": 0})
    'c'
    """

    def __init__(self) -> None:
        self._turn = 0
        self._chosen_at: dict[Replica, int] = {}

    def order(self, connections: Mapping[Replica, int]) -> list[Replica]:
        """All replicas, best first; the first counts as chosen. Replicas that are gone are forgotten."""
        self._chosen_at = {r: at for r, at in self._chosen_at.items() if r in connections}
        ordered = sorted(connections, key=lambda r: (connections[r], self._chosen_at.get(r, -1)))
        if ordered:
            self._chosen_at[ordered[0]] = self._turn
            self._turn += 1
        return ordered

    def choose(self, connections: Mapping[Replica, int]) -> Replica:
        """The replica for the next request.

        Raises:
            LookupError: there is none.
        """
        ordered = self.order(connections)
        if not ordered:
            raise LookupError("there is no replica to choose from")
        return ordered[0]
