"""Weighted round robin by capacity: a replica that answers twice as much gets twice as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from serve_apps.routing.policy import Policy, Prompt, Replica

HALF_LIFE_S = 30.0
"""What was measured so long ago counts half."""
LEAST_MEASURED = 5.0
"""Answers after which a replica's measure is believed; before, it counts as the mean of the others."""


class Weighted(Policy[Replica]):
    """Smooth weighted round robin, as nginx does it: turns in proportion to weights, spread evenly.

    The weight is a replica's capacity: the answers that it has given in a second while it had work. Counted
    that way it does not depend on how much it was sent.

    Args:
        weights: capacities that are known beforehand, in place of measured ones.
    """

    decides_by = "weight"

    def __init__(self, chance: Random | None = None, weights: Mapping[Replica, float] | None = None) -> None:
        super().__init__(chance)
        self._given = dict(weights or {})
        self._credit: dict[Replica, float] = {}
        self._work: dict[Replica, _Work] = {}

    def weight(self, replica: Replica) -> float:
        """A replica's weight, relative to the others'."""
        if replica in self._given:
            return self._given[replica]
        work = self._work.get(replica)
        if work is not None and work.answers >= LEAST_MEASURED and work.busy_s > 0:
            return work.answers / work.busy_s
        known = [
            w.answers / w.busy_s for w in self._work.values() if w.answers >= LEAST_MEASURED and w.busy_s
        ]
        return sum(known) / len(known) if known else 1.0

    def sent(self, replica: Replica) -> None:
        super().sent(replica)
        weights = {known: self.weight(known) for known in self._connections}
        for known, weight in weights.items():
            self._credit[known] = self._credit.get(known, 0.0) + weight
        self._credit[replica] -= sum(weights.values())

    def routed(self, replica: Replica, request_id: str, now: float, prompt: Prompt = "") -> str:
        self._work.setdefault(replica, _Work()).began(now)
        return super().routed(replica, request_id, now, prompt)

    def _took(self, replica: Replica, seconds: float, now: float) -> None:
        self._work.setdefault(replica, _Work()).ended(now)

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        return sorted(replicas, key=lambda r: -(self._credit.get(r, 0.0) + self.weight(r)))

    def _forget(self, replica: Replica) -> None:
        super()._forget(replica)
        self._credit.pop(replica, None)
        self._work.pop(replica, None)


class _Work:
    """How much one replica has answered lately, and how long it took."""

    def __init__(self) -> None:
        self.answers = 0.0
        self.busy_s = 0.0
        self._running = 0
        self._at: float | None = None

    def began(self, now: float) -> None:
        self._pass(now)
        self._running += 1

    def ended(self, now: float) -> None:
        self._pass(now)
        self._running = max(0, self._running - 1)
        self.answers += 1

    def _pass(self, now: float) -> None:
        if self._at is not None:
            seconds = max(0.0, now - self._at)
            fading = 0.5 ** (seconds / HALF_LIFE_S)
            self.answers *= fading
            self.busy_s = self.busy_s * fading + (seconds if self._running else 0.0)
        self._at = now
