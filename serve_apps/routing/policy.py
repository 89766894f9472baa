"""What every routing policy is: an order of the replicas for one request, from what is known of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from random import Random
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

Prompt = str | Sequence[int]
"""What a request asks about: text, or token ids."""

LOOKED_AT = 8192
"""Characters, or tokens, at the beginning of a prompt that a policy may look at."""


class Policy(ABC, Generic[Replica]):
    """Orders replicas; knows of each only what this router itself has sent there and got back.

    An order teaches nothing: a request that waits for a place is ordered again and again, and may go to
    another replica in the end. What counts is where it was sent.

    >>> policy = LeastConnections()
    >>> policy.order(["a", "b"])
    ['a', 'b']
    >>> policy.sent("a")
    >>> policy.order(["a", "b"])
    ['b', 'a']

    Args:
        chance: decides where a policy leaves a choice to it.
    """

    def __init__(self, chance: Random | None = None) -> None:
        self._chance = chance or Random()
        self._connections: dict[Replica, int] = {}
        self._began: dict[str, tuple[Replica, float]] = {}
        self._turn = 0
        self._chosen_at: dict[Replica, int] = {}

    decides_by: str
    """What it goes by, in a word."""

    @abstractmethod
    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        """The replicas, best first."""

    def order(self, replicas: Collection[Replica], prompt: Prompt = "") -> list[Replica]:
        """All replicas, best first. Those that are gone are forgotten."""
        for gone in self._connections.keys() - set(replicas):
            self._forget(gone)
        for replica in replicas:
            self._connections.setdefault(replica, 0)
        return self._rank(list(replicas), prompt) if replicas else []

    def sent(self, replica: Replica) -> None:
        """A request was sent to a replica."""
        self._connections[replica] = self._connections.get(replica, 0) + 1
        self._chosen_at[replica] = self._turn
        self._turn += 1

    def routed(self, replica: Replica, request_id: str, now: float, prompt: Prompt = "") -> str:
        """The replica has taken the request at `now` (seconds); returns why it did, in a word."""
        self._began[request_id] = (replica, now)
        return self.decides_by

    def completed(self, replica: Replica, request_id: str, now: float) -> None:
        """A request that was sent has ended, however it did."""
        self._connections[replica] = max(0, self._connections.get(replica, 0) - 1)
        began = self._began.pop(request_id, None)
        if began is not None and began[0] == replica:
            self._took(replica, now - began[1], now)

    def _took(self, replica: Replica, seconds: float, now: float) -> None:
        """A replica has answered a request in so many seconds."""

    def _forget(self, replica: Replica) -> None:
        del self._connections[replica]
        self._chosen_at.pop(replica, None)

    def _by_connections(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Fewest connections first; among equals, the one chosen longest ago."""
        return sorted(replicas, key=lambda r: (self._connections[r], self._chosen_at.get(r, -1)))


class LeastConnections(Policy[Replica]):
    """The replica with the fewest requests in flight."""

    decides_by = "connections"

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        return self._by_connections(replicas)


class RoundRobin(Policy[Replica]):
    """Each in its turn, whatever it has to do."""

    decides_by = "turn"

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        return sorted(replicas, key=lambda r: self._chosen_at.get(r, -1))
