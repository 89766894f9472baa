"""What the gateways say of themselves: which table they go by, what they have in flight; no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

SILENT_S = 10.0
"""A gateway that was not heard of for so long is gone; its requests are, too."""


@dataclass
class _Heard:
    heard: float
    seen: int
    node: str | None = None
    url: str | None = None
    """Where it is reached; None: not yet, or not any more."""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    number: int = 0
    """Of its last report whose counts were taken over."""


class Gateways:
    """The gateways that follow the table, by what they reported last. Times are of any steady clock."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Heard] = {}
        self._closed: dict[str, int] = {}
        """By Serve application without requests: the number of the table since which it has none."""
        self._opened: dict[str, int] = {}
        """By Serve application with requests: the number of the table since which it has them."""
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """Requests, and those that failed, by `application version`."""
        self._asked: Counter[str] = Counter()
        """Answers that were asked for since `take_asked`, by app."""

    def report(self, gateway: str, report: Mapping[str, Any], now: float) -> bool:
        """Take over what a gateway says, see `Traffic.report`; whether its counts were not known yet."""
        before = self._gateways.get(gateway)
        new = before is None or report["number"] != before.number
        self._gateways[gateway] = _Heard(
            now,
            report["seen"],
            report.get("node"),
            report.get("url"),
            report["in_flight"],
            report["waiting"],
            report["number"],
        )
        if new:
            self.requests.update(report["requests"])
            self.errors.update(report["errors"])
            self._asked.update(report["asked"])
        return new

    def take_asked(self, app: str) -> int:
        """How many answers of an app were asked for since this was called for it before."""
        return self._asked.pop(app, 0)

    def route(self, opened: Collection[str], closed: Collection[str], number: int) -> None:
        """From the table of this number on, some applications get requests and others none."""
        for application in opened:
            self._closed.pop(application, None)
            self._opened.setdefault(application, number)
        for application in closed:
            self._opened.pop(application, None)
            self._closed.setdefault(application, number)

    def drained(self, application: str, now: float) -> bool:
        """Whether no gateway sends it requests any more, and all that it had are answered."""
        number = self._closed.get(application)
        if number is None:
            return False
        alive = self._alive(now)
        return all(each.seen >= number and not each.in_flight.get(application) for each in alive)

    def excuse(self, now: float) -> None:
        """Take nobody's silence until now for an end."""
        for each in self._gateways.values():
            each.heard = now

    def number_alive(self, now: float) -> int:
        """How many gateways there are."""
        return len(self._alive(now))

    def ids(self, now: float) -> Set[str]:
        """Of the gateways that there are."""
        self._alive(now)
        return self._gateways.keys()

    def is_first(self, gateway: str, now: float) -> bool:
        """Whether it is the one, of those that there are, that was heard of first."""
        self._alive(now)
        return next(iter(self._gateways), None) == gateway

    def places(self, now: float) -> list[tuple[str | None, str]]:
        """The node and the URL of each that is reached."""
        return sorted((each.node, each.url) for each in self._alive(now) if each.url is not None)

    def taken(self, application: str, now: float) -> bool:
        """Whether every gateway knows that it gets requests."""
        number = self._opened.get(application)
        return number is not None and all(each.seen >= number for each in self._alive(now))

    def in_flight(self, application: str, now: float) -> int:
        return sum(each.in_flight.get(application, 0) for each in self._alive(now))

    def waiting(self, app: str, now: float) -> int:
        """Requests that wait for a version that takes them."""
        return sum(each.waiting.get(app, 0) for each in self._alive(now))

    def all_know(self, number: int, now: float) -> bool:
        """Whether there is a gateway, and each goes by the table of this number."""
        alive = self._alive(now)
        return bool(alive) and all(each.seen >= number for each in alive)

    def forget_but(self, applications: Collection[str]) -> None:
        """Forget all applications but these."""
        for known in (self._closed, self._opened):
            for application in known.keys() - applications:
                del known[application]
        for counter in (self.requests, self.errors):
            for key in [key for key in counter if key.rpartition(" ")[0] not in applications]:
                del counter[key]

    def _alive(self, now: float) -> list[_Heard]:
        gone = [name for name, each in self._gateways.items() if now - each.heard > SILENT_S]
        for name in gone:
            del self._gateways[name]
        return list(self._gateways.values())
