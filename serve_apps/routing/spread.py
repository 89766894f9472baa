"""At how many replicas the parts of one request are at a time: few, as each of them may break its engine.

The choices of a request, its prompts, its inputs are alike: what one of them does to an engine all may do, at
their first step or at a later one, at the same moment wherever they are; that one of them was answered says
nothing of the rest. So a request can break as many engines as have a part of it, and that number is bounded
here, where replicas are chosen. Nothing has to be ended when the first one breaks: what is still to be done
stays at the other.

To have one part go ahead alone would bound less, as the others may break what it did not, and would cost each
request of several parts the time to a first token. This costs it the places that a third replica would have.

Serve makes the routers, and hands nothing in: so this is the process's, as `decisions` are.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

AT = "at"
"""Of a request to a replica: the id of the one that it goes to as long as that is there."""
FIELD = "spread"
"""Of a request to a replica that is a part of another: the key of its `Spread`, and which part."""

_spreads: dict[str, Spread] = {}


class Spread:
    """The replicas that have parts of one request, which `close` ends.

    >>> spread = Spread(most=2)
    >>> parts = [spread.part(number) for number in range(3)]
    >>> taken(parts[0], "a"), taken(parts[1], "b")
    (None, None)
    >>> [may_take(parts[2], replica) for replica in ("a", "b", "c")]
    [True, True, False]
    >>> spread.left(0)
    >>> may_take(parts[2], "c")
    True

    Args:
        most: replicas at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: dict[int, Hashable] = {}
        """By part, the replica that was given it last."""
        self._parts: Counter[Hashable] = Counter()
        """By replica."""
        self._lock = threading.Lock()  # replicas are chosen in a thread of Serve's
        self._key = uuid.uuid4().hex
        _spreads[self._key] = self

    def part(self, number: int) -> dict[str, Any]:
        """What says of a request to a replica that it is this part."""
        return {FIELD: (self._key, number)}

    def left(self, number: int, *, broke: bool = False) -> None:
        """A part is at no replica now; one that broke under it counts for as long as the request lasts."""
        with self._lock:
            replica = self._at.pop(number, None)
            if replica is not None and not broke:
                self._parts -= Counter([replica])

    def close(self) -> None:
        """The request has ended: no replica takes what may still be on its way to one."""
        _spreads.pop(self._key, None)

    def may_take(self, number: int, replica: Hashable) -> bool:
        """See the function of this name."""
        with self._lock:
            if len(self._parts) < self._most or replica in self._parts:
                return True
            before = self._at.get(number)  # where it was refused, so that it is to go elsewhere
            return before is not None and self._parts[before] == 1

    def taken(self, number: int, replica: Hashable) -> None:
        """See the function of this name."""
        self.left(number)
        with self._lock:
            self._at[number] = replica
            self._parts[replica] += 1


def may_take(request: Any, replica: Hashable) -> bool:
    """Whether a replica may be given a request now; one that is no part of another goes anywhere."""
    key, number = _part_of(request)
    if key is None:
        return True
    spread = _spreads.get(key)
    return spread is not None and spread.may_take(number, replica)


def taken(request: Any, replica: Hashable) -> None:
    """A replica is given a request."""
    key, number = _part_of(request)
    spread = None if key is None else _spreads.get(key)
    if spread is not None:
        spread.taken(number, replica)


def _part_of(request: Any) -> tuple[str | None, int]:
    field = request.get(FIELD) if isinstance(request, Mapping) else None
    return (None, 0) if field is None else (field[0], field[1])
