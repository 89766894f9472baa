"""The places of apps, shared out among gateways; no clock, no Ray.

Each gateway lets in as many as its share says. What it wants is what it has and what waits there, with
something to spare; while all wants fit, each is met. Where they do not, the places are shared out evenly
among those that want them, and who has more than that lets nobody in until it is down to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass
class _Holding:
    in_use: int = 0
    want: int = 0
    share: int = 0

    @property
    def held(self) -> int:
        """What others cannot have: it may fill its share, and what is in use beyond it has to end first."""
        return max(self.in_use, self.share)


class PlaceShares:
    """The shares of all gateways, by app.

    >>> shares = PlaceShares()
    >>> shares.share("chat", "a", in_use=6, want=10, capacity=12)
    10
    >>> shares.share("chat", "b", in_use=0, want=6, capacity=12)
    2
    >>> shares.share("chat", "a", in_use=6, want=10, capacity=12)
    6
    >>> shares.share("chat", "b", in_use=0, want=6, capacity=12)
    6
    """

    def __init__(self) -> None:
        self._holdings: dict[str, dict[str, _Holding]] = {}

    def share(self, app: str, gateway: str, *, in_use: int, want: int, capacity: int) -> int:
        """How many places a gateway may fill from now on.

        Args:
            in_use: those that it has filled.
            want: those that it would fill, `in_use` included.
            capacity: of the app, over all gateways.
        """
        holdings = self._holdings.setdefault(app, {})
        mine = holdings.setdefault(gateway, _Holding())
        mine.in_use, mine.want = in_use, max(in_use, want)
        others = sum(each.held for name, each in holdings.items() if name != gateway)
        fair = even({name: each.want for name, each in holdings.items()}, capacity)[gateway]
        mine.share = max(0, min(fair, capacity - others))
        return mine.share

    def keep_only(self, apps: Collection[str], gateways: Collection[str]) -> None:
        """Forget all other apps and gateways."""
        self._holdings = {
            app: {name: each for name, each in holdings.items() if name in gateways}
            for app, holdings in self._holdings.items()
            if app in apps
        }


def even(wants: Mapping[str, int], capacity: int) -> dict[str, int]:
    """As much of what each wants as there is when nobody gets more than the others beyond what they want.

    >>> even({"a": 2, "b": 9, "c": 9}, 12)
    {'a': 2, 'b': 5, 'c': 5}
    >>> even({"a": 2, "b": 3}, 12)
    {'a': 2, 'b': 3}
    """
    given: dict[str, int] = {}
    left = capacity
    for place, (name, want) in enumerate(sorted(wants.items(), key=lambda each: (each[1], each[0]))):
        # The last of them get what does not divide.
        given[name] = min(want, left // (len(wants) - place))
        left -= given[name]
    return {name: given[name] for name in wants}
