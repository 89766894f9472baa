"""Prefix aware: to the replica that has read most of the prompt already, unless it has too much to do."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
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
NEW_IMBALANCE = 1
"""The same for a prompt that nobody is known to have read."""
COUNTED = 2048
"""Requests whose beginnings are counted: the last ones."""
FEW = 8
"""Requests that are too few to say that a beginning is one of many."""


class Prefix(Policy[Replica]):
    """The longest beginning that a replica was sent before; among equals, rendezvous hashing (Thaler and
    Ravishankar 1998) of the beginning.

    What a replica really has cached is its own affair: this remembers what it was sent, which is the same
    as long as its cache is large enough. What other gateways have sent is not known here: but each of them
    finds the same place for a beginning, and a replica that comes or goes moves only its own.

    How much of the prompt is hashed depends on what comes by: a beginning that more requests share than one
    replica should answer (a system prompt of all) is told apart by what follows.
    """

    decides_by = "connections"

    def __init__(self, chance: Random | None = None, imbalance: int = IMBALANCE) -> None:
        super().__init__(chance)
        self._imbalance = imbalance
        self._known: dict[Replica, OrderedDict[bytes, None]] = {}
        self._seen: deque[Sequence[bytes]] = deque()
        self._counts: Counter[bytes] = Counter()
        """How many of the requests that were seen last have a beginning."""

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        pieces = _pieces(prompt)
        ordered = self._by_connections(replicas)
        if not pieces:
            return ordered
        key = self._key(pieces, len(replicas))
        matched = {replica: self._matched(replica, pieces) for replica in replicas}
        imbalance = self._imbalance if any(matched.values()) else min(self._imbalance, NEW_IMBALANCE)
        most = self._connections[ordered[0]] + imbalance
        best = [r for r in ordered if self._connections[r] <= most]
        best.sort(key=lambda r: (-matched[r], -_weight(key, r)))
        return best + [r for r in ordered if self._connections[r] > most]

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
        self._count(_beginnings(pieces))
        return reason

    def _key(self, pieces: Sequence[bytes], replicas: int) -> bytes:
        """The beginning that is hashed: the shortest that is not one of many."""
        beginnings = _beginnings(pieces)
        for beginning in beginnings:
            count = self._counts[beginning]
            if count < FEW or count * replicas <= len(self._seen):
                return beginning
        return beginnings[-1]

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

    def _count(self, beginnings: Sequence[bytes]) -> None:
        self._seen.append(beginnings)
        self._counts.update(beginnings)
        while len(self._seen) > COUNTED:
            for beginning in self._seen.popleft():
                self._counts[beginning] -= 1
                if not self._counts[beginning]:
                    del self._counts[beginning]

    def _forget(self, replica: Replica) -> None:
        super()._forget(replica)
        self._known.pop(replica, None)


def _weight(key: bytes, replica: object) -> int:
    """A replica's weight for a beginning; every process finds the same."""
    return int.from_bytes(blake2b(repr(replica).encode(), key=key, digest_size=8).digest())


def _beginnings(pieces: Sequence[bytes]) -> list[bytes]:
    """Of a prompt's beginnings one piece, two, four and so on."""
    return [pieces[2**power - 1] for power in range(len(pieces).bit_length())]


def _pieces(prompt: Prompt) -> list[bytes]:
    """A digest for each whole piece of a prompt, of the prompt up to its end."""
    digest = blake2b(digest_size=8)
    pieces = []
    for at in range(0, min(len(prompt) - PIECE + 1, PIECE * MOST_PIECES), PIECE):
        digest.update(repr(prompt[at : at + PIECE]).encode())
        pieces.append(digest.digest())
    return pieces
