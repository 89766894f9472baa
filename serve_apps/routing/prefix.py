"""Prefix aware: to the replica that has read most of the prompt already, unless it has too much to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from serve_apps.routing.policy import LOOKED_AT, Policy, Prompt, Replica

PIECE = 64
"""Characters, or tokens, of one piece of a prompt."""
MOST_PIECES = LOOKED_AT // PIECE
"""Pieces of a prompt that are looked at."""
REMEMBERED = 20_000
"""Pieces that are remembered of each replica; the ones used longest ago go first."""
IMBALANCE = 4
"""How many more requests than the least busy replica one may have and still be preferred."""


class Prefix(Policy[Replica]):
    """The longest beginning that a replica was sent before; where there is none, the fewest connections.

    What a replica really has cached is its own affair: this remembers what it was sent, which is the same
    as long as its cache is large enough.
    """

    decides_by = "connections"

    def __init__(self, chance: Random | None = None, imbalance: int = IMBALANCE) -> None:
        super().__init__(chance)
        self._imbalance = imbalance
        self._known: dict[Replica, OrderedDict[bytes, None]] = {}

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        pieces = _pieces(prompt)
        ordered = self._by_connections(replicas)
        most = self._connections[ordered[0]] + self._imbalance
        # Sorting keeps the order by connections among those that know equally much.
        ordered.sort(key=lambda r: -self._matched(r, pieces) if self._connections[r] <= most else 0)
        return ordered

    def routed(self, replica: Replica, request_id: str, now: float, prompt: Prompt = "") -> str:
        """The replica has taken the request: because it knows how the prompt begins (`affinity`), because
        those that do have too much to do (`overload`), or because nobody does (`connections`)."""
        by_load, pieces = super().routed(replica, request_id, now, prompt), _pieces(prompt)
        if self._matched(replica, pieces):
            reason = "affinity"
        elif any(self._matched(other, pieces[:1]) for other in self._known):
            reason = "overload"
        else:
            reason = by_load
        self._remember(replica, pieces)
        return reason

    def _matched(self, replica: Replica, pieces: Sequence[bytes]) -> int:
        known = self._known.get(replica)
        if known is None:
            return 0
        return next((n for n, piece in enumerate(pieces) if piece not in known), len(pieces))

    def _remember(self, replica: Replica, pieces: Sequence[bytes]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for piece in reversed(pieces):
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > REMEMBERED:
            known.popitem(last=False)

    def _forget(self, replica: Replica) -> None:
        super()._forget(replica)
        self._known.pop(replica, None)


def _pieces(prompt: Prompt) -> list[bytes]:
    """A digest for each whole piece of a prompt, of the prompt up to its end."""
    digest = blake2b(digest_size=8)
    pieces = []
    for at in range(0, min(len(prompt) - PIECE + 1, PIECE * MOST_PIECES), PIECE):
        digest.update(repr(prompt[at : at + PIECE]).encode())
        pieces.append(digest.digest())
    return pieces
