"""Response-time aware: where the answer is expected first, judged by how long the last ones took."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from serve_apps.routing.policy import Policy, Prompt, Replica

WEIGHT = 0.2
"""What the newest answer counts in the moving average."""
STALE_S = 30.0
"""What was measured before is forgotten then, and the replica counts as the best: it may be slow no more."""


class ResponseTime(Policy[Replica]):
    """The better of two replicas picked at random, by moving average × requests in flight there.

    That only two are compared is the guard against herding: a replica that looks best does not get
    everything that comes until its next answer (Mitzenmacher 2001; the estimate is linkerd's peak EWMA
    without the peak).
    """

    decides_by = "response_time"

    def __init__(self, chance: Random | None = None) -> None:
        super().__init__(chance)
        self._mean_s: dict[Replica, float] = {}
        self._measured_at: dict[Replica, float] = {}
        self._now = 0.0

    def expected_s(self, replica: Replica) -> float:
        """How long an answer takes there, as far as is known."""
        if self._is_fresh(replica, self._now):
            return self._mean_s[replica]
        return min(self._mean_s.values(), default=1.0)

    def _is_fresh(self, replica: Replica, now: float) -> bool:
        return replica in self._mean_s and now - self._measured_at[replica] < STALE_S

    def routed(self, replica: Replica, request_id: str, now: float, prompt: Prompt = "") -> str:
        self._now = now
        return super().routed(replica, request_id, now, prompt)

    def _took(self, replica: Replica, seconds: float, now: float) -> None:
        self._now = now
        if self._is_fresh(replica, now):
            seconds = (1 - WEIGHT) * self._mean_s[replica] + WEIGHT * seconds
        self._mean_s[replica] = seconds
        self._measured_at[replica] = now

    def _rank(self, replicas: Sequence[Replica], prompt: Prompt) -> list[Replica]:
        def score(replica: Replica) -> tuple[float, int]:
            wait = self.expected_s(replica) * (self._connections[replica] + 1)
            return wait, self._chosen_at.get(replica, -1)

        picked = self._chance.sample(list(replicas), min(2, len(replicas)))
        others = [replica for replica in replicas if replica not in picked]
        return [*sorted(picked, key=score), *sorted(others, key=score)]

    def _forget(self, replica: Replica) -> None:
        super()._forget(replica)
        self._mean_s.pop(replica, None)
        self._measured_at.pop(replica, None)
