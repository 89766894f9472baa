"""How many requests a router has at each replica, so that one that is full is not asked whether it is.

A gateway that is alone knows. A replica may also be full of what is not counted here: of what other gateways
sent, or of requests that were called off, which end later there than here. It is looked at now and then.

Of several gateways, the one whose request has ended hears of the free place first. If it took it each time, a
gateway that has no request anywhere would never get one. So a gateway that has more than its share of all
places leaves one that was free for so long that all others have looked there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

LOOK_EVERY_S = 0.05
"""How often a router looks at a replica that is full of what it does not count."""
LEAVE_S = 2 * LOOK_EVERY_S
"""How long a router that has more than its share leaves a place to others."""
LEAVE_EVERY_S = 1.0
"""How often it does so where no other took the last one that it left."""
DOUBT_AFTER_S = 5.0
"""How long a router goes by its own count alone where a replica says nothing: then it looks there once."""


@dataclass
class _Known:
    """What is known of a replica."""

    ongoing: int = 0
    shared: bool = False
    """It was full when it last said something, of more than this router counts."""
    look_at: float = 0.0
    """When the router looks there again though it knows of no room."""
    most: float = math.inf
    """How many requests it takes."""
    left_until: float = -math.inf
    """Until when its free places are left to others."""
    left: bool = False
    """They were, and none was taken since by this router."""


class OngoingRequests(Generic[Replica]):
    """The requests that a router has at each replica; times are seconds of one clock.

    >>> ongoing = OngoingRequests()
    >>> ongoing.sent("a", now=0.0)
    >>> ongoing.may_have_room("a", most=1, now=0.0)
    False
    >>> ongoing.ended("a", now=0.1)
    >>> ongoing.may_have_room("a", most=1, now=0.1)
    True
    """

    def __init__(self) -> None:
        self._known: dict[Replica, _Known] = {}
        self.share = math.inf
        """How many requests this router has, at all replicas, before it leaves places to others."""
        self._unwanted_until = -math.inf
        """Until when no place is left, since nobody took the last one."""

    def sent(self, replica: Replica, now: float) -> None:
        """A replica was given a request."""
        self._of(replica).ongoing += 1
        self._go_by_this(replica, now)

    def ended(self, replica: Replica, now: float) -> None:
        """A replica has a request no more, however it ended."""
        known = self._of(replica)
        was_full = known.shared or known.ongoing >= known.most
        self.not_sent(replica, now)
        if was_full and sum(each.ongoing for each in self._known.values()) + 1 > self.share:
            if now >= max(self._unwanted_until, known.left_until):
                known.left_until, known.left = now + LEAVE_S, True
        elif known.shared and math.isfinite(self.share):
            known.look_at = now

    def not_sent(self, replica: Replica, now: float) -> None:
        """A replica was not given a request that was counted as sent."""
        known = self._of(replica)
        known.ongoing = max(0, known.ongoing - 1)
        if not known.shared:
            self._go_by_this(replica, now)

    def taken(self, replica: Replica, now: float) -> None:
        """A replica has taken a request, not refused it."""
        known = self._of(replica)
        if known.left and now >= known.left_until:
            known.left = False
            self._unwanted_until = now + LEAVE_EVERY_S

    def said(self, replica: Replica, number: int, most: int, now: float) -> None:
        """A replica has said how many requests it has, of at most so many."""
        known = self._of(replica)
        known.most = most
        known.shared = number >= most and number > known.ongoing
        self._go_by_this(replica, now)

    def may_have_room(self, replica: Replica, most: int, now: float) -> bool:
        """Whether a replica, which takes at most so many requests, is worth to be asked for room. Who is told
        so of one that seems full is the one that asks: others are not told so at the same time."""
        known = self._of(replica)
        if now < known.left_until:
            return False
        if known.ongoing < most and not known.shared:
            return True
        if now < known.look_at:
            return False
        self._go_by_this(replica, now)
        return True

    def keep_only(self, replicas: Collection[Replica]) -> None:
        """The others are gone."""
        for gone in self._known.keys() - set(replicas):
            del self._known[gone]

    def _go_by_this(self, replica: Replica, now: float) -> None:
        known = self._of(replica)
        known.look_at = now + (LOOK_EVERY_S if known.shared else DOUBT_AFTER_S)

    def _of(self, replica: Replica) -> _Known:
        return self._known.setdefault(replica, _Known())
