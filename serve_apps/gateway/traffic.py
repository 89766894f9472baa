"""Which version takes a request, and how many each has: the gateway's half of what the controller decides."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from serve_apps.gateway.app_table import AppTable, AppVersion
from serve_apps.gateway.broken_engines import BrokenEngines, Suspect

MOST_FIRST_TOKENS = 1000
"""Times to first token that are kept for the next report, of each app."""
TRIAL_WAIT_S = 10.0
"""How long what a version on trial has failed waits for another one; to find out and go back takes less."""


class Traffic:
    """Requests in flight, by Serve application; requests wait here while no version of their app takes any.

    Not for several threads: between choosing a version and counting the request there must be nothing, since
    a version whose count is 0 may be ended.
    """

    def __init__(self) -> None:
        self.table = AppTable()
        self.on_first_wait: Callable[[], None] = lambda: None
        """Called when a request waits for a version of an app, and none did before."""
        self._changed = asyncio.Event()
        self.in_flight: Counter[str] = Counter()
        """By Serve application."""
        self._waiting: Counter[str] = Counter()
        """By app."""
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._first_token_s: defaultdict[str, list[float]] = defaultdict(list)
        self._asked: Counter[str] = Counter()
        """Answers that were asked for, by app."""
        self._counted: dict[str, Any] | None = None
        """What was told last, until the controller is known to have it."""
        self._tellings = 0
        self._proven: set[str] = set()
        """Versions that have answered a request."""
        self.broken = BrokenEngines(self._count)

    def take_over(self, table: AppTable) -> None:
        """Go by this table from now on."""
        self.table = table
        self._proven &= {_key(version) for versions in table.versions.values() for version in versions}
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, app: str, choices: int, avoid: Collection[int] = ()) -> AppVersion:
        """The version for a request of so many choices, which are counted as being with it: see `leave`.

        Waits while there is none, and for a while where the only one is on trial and has failed the request.
        See `AppTable.choose`.
        """
        self._asked[app] += choices
        loop = asyncio.get_running_loop()
        until = loop.time() + TRIAL_WAIT_S
        while True:
            version = self.table.choose(app, self.in_flight, avoid)
            waits = version is not None and version.on_trial and version.revision in avoid
            if version is not None and not (waits and loop.time() < until):
                self.in_flight[version.application] += choices
                return version
            changed = self._changed
            if not self._waiting[app]:
                self.on_first_wait()
            self._waiting[app] += choices
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until if waits else None):
                        await changed.wait()
            finally:
                self._waiting[app] -= choices

    def leave(self, version: AppVersion, choices: int) -> None:
        """A request's choices are not with a version any more."""
        self.in_flight[version.application] -= choices
        if not self.in_flight[version.application]:
            del self.in_flight[version.application]

    def other(self, app: str, version: AppVersion) -> bool:
        """Whether a request that a version has failed could go to another."""
        better = self.table.choose(app, self.in_flight, {version.revision})
        return better is not None and better.revision != version.revision

    def on_trial(self, app: str, version: AppVersion) -> bool:
        """Whether a version may be taken back for what it fails."""
        return any(v.on_trial and v.revision == version.revision for v in self.table.versions.get(app, ()))

    def answered(self, version: AppVersion) -> None:
        """A version has answered a request."""
        self._requests[_key(version)] += 1
        self._proven.add(_key(version))

    def refused(self, version: AppVersion, *, failed: bool) -> None:
        """A version has refused a request, or failed to answer it while its engine was whole."""
        self._requests[_key(version)] += 1
        self._errors[_key(version)] += failed

    def broke(self, version: AppVersion, engine: str, suspect: Suspect) -> None:
        """An engine of a version broke while it answered a request: see `broken_engines`."""
        suspect.saw(engine, _key(version), at_once=not self.proven(version))

    def proven(self, version: AppVersion) -> bool:
        """Whether a version has answered any request, so that one which breaks it may be the odd one."""
        return _key(version) in self._proven

    def _count(self, key: str, failures: int) -> None:
        self._requests[key] += failures
        self._errors[key] += failures

    def first_token(self, app: str, seconds: float) -> None:
        """A request had its first token after so long."""
        kept = self._first_token_s[app]
        if len(kept) < MOST_FIRST_TOKENS:
            kept.append(seconds)

    def report(self) -> dict[str, Any]:
        """What the controller is told; counts are those since the report before, below 0 where more is taken
        back than came.

        A report that may not have arrived is told again with the same counts and number: see `told`.
        """
        self.broken.settle()
        if self._counted is None:
            self._tellings += 1
            self._counted = {
                "number": self._tellings,
                "requests": dict(self._requests),
                "errors": dict(self._errors),
                "asked": dict(self._asked),
                "first_token_s": dict(self._first_token_s),
            }
            for counts in (self._requests, self._errors, self._asked, self._first_token_s):
                counts.clear()
        return {
            "seen": self.table.number,
            "in_flight": dict(self.in_flight),
            "waiting": {app: count for app, count in self._waiting.items() if count},
            **self._counted,
        }

    def told(self) -> None:
        """The controller has the last report."""
        self._counted = None


def _key(version: AppVersion) -> str:
    return f"{version.application} {version.revision}"
