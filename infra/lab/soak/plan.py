"""What a soak does, and when: drawn from a seed, pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FAULTS = {
    "kill_rank": 4.0,
    "kill_worker": 2.0,
    "freeze_rank": 2.0,
    "terminate_rank": 2.0,
    "kill_fork_server": 1.0,
    "kill_controller": 1.0,
    "kill_replica": 3.0,
    "kill_broker": 1.0,
    "kill_driver": 1.0,
    "kill_node": 1.0,
}
"""What can be done, and how often it is drawn, relative to the others."""
PAUSE_S = (8.0, 30.0)
"""Between two faults: some come while what the one before broke is not mended yet."""
RISE_S = (15.0, 60.0)
FALL_S = (10.0, 40.0)
CLIENTS = (6, 12)
QUIET_CLIENTS = 1
"""Requests in flight while the load is low: somebody always asks."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: seconds from the start.
        kind: a key of FAULTS.
        choice: from 0 to 1, which of those it can hit.
    """

    at_s: float
    kind: str
    choice: float

    def of(self, those: Sequence[str]) -> str | None:
        """The one it hits; None where there is nobody."""
        return those[int(self.choice * len(those))] if those else None


@dataclass(frozen=True)
class Level:
    """So many requests in flight from this time on."""

    at_s: float
    clients: int


def faults(seed: int, seconds: float, kinds: Sequence[str] = tuple(FAULTS)) -> list[Fault]:
    """The faults of a soak, in order.

    The last minute has none: what is broken has time to mend.
    """
    draw = random.Random(f"faults {seed}")
    planned, at = [], draw.uniform(*PAUSE_S)
    while at < seconds - 60.0:
        (kind,) = draw.choices(kinds, [FAULTS[each] for each in kinds])
        planned.append(Fault(at, kind, draw.random()))
        at += draw.uniform(*PAUSE_S)
    return planned


def levels(seed: int, seconds: float) -> list[Level]:
    """Rises and falls of the load, in order, beginning and ending low."""
    draw = random.Random(f"loads {seed}")
    planned, at = [Level(0.0, QUIET_CLIENTS)], draw.uniform(*FALL_S)
    while at < seconds - RISE_S[1]:
        planned.append(Level(at, draw.randint(*CLIENTS)))
        at += draw.uniform(*RISE_S)
        planned.append(Level(at, QUIET_CLIENTS))
        at += draw.uniform(*FALL_S)
    return planned
