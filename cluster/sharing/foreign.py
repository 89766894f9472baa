"""What strangers use of the nodes: tasks, actors and placement groups that no lease speaks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cluster.sharing.room import STEPS

AFTER_S = 6.0
"""How long more must be in use than leases account for before it counts as a stranger's.

Longer than a holder takes to say what it started (a heartbeat of 2 s), and Ray to say what is free.
"""

Amounts = Mapping[str, Mapping[str, float]]
"""Amounts by node id and resource, in Ray's names."""


class ForeignUse:
    """Tells strangers from holders' units that start and stop between two heartbeats.

    A stranger's is what was in use beyond the leases all the while of the last `after_s`; less at once, more
    only after that time. What Ray's own and our own actors are made of (controllers, proxies, drivers, the
    gateway) takes neither CPUs nor GPUs.
    """

    def __init__(self, after_s: float = AFTER_S) -> None:
        self._after_s = after_s
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def update(self, used: Amounts, leased: Amounts, now: float) -> dict[str, dict[str, float]]:
        """What strangers use now, by node; nodes without any are left out.

        Args:
            used: what Ray says is in use.
            leased: what leases account for: units that run, are promised or leave.
        """
        found: dict[str, dict[str, float]] = {}
        known = set()
        for node, amounts in used.items():
            for name, amount in amounts.items():
                known.add((node, name))
                beyond = round((amount - leased.get(node, {}).get(name, 0.0)) * STEPS)
                lasting = self._least((node, name), max(0, beyond), now)
                if lasting:
                    found.setdefault(node, {})[name] = lasting / STEPS
        for gone in self._seen.keys() - known:
            del self._seen[gone]
        return found

    def _least(self, place: tuple[str, str], steps: int, now: float) -> int:
        """The least of the last `after_s`; 0 while less than that is known."""
        samples = self._seen.setdefault(place, deque())
        samples.append((now, steps))
        # One that is older than the window stays: it says how things were when the window began.
        while len(samples) > 1 and samples[1][0] <= now - self._after_s:
            samples.popleft()
        if now - samples[0][0] < self._after_s:
            return 0
        return min(steps for _, steps in samples)


def countable(resources: Mapping[str, float]) -> dict[str, float]:
    """What units and strangers ask for: not memory, and not what only names a node or a device."""
    return {
        name: amount
        for name, amount in resources.items()
        if "memory" not in name and not name.startswith(("node:", "accelerator_type:"))
    }
