"""How many tokens a tenant may take: a minute's worth at once, and from then on as they come back; no clock.

What a request will take is known only when it has ended. While it runs, room is kept for what it is expected
to take, or for what it has taken where that is more. What is taken beyond the limit is a debt: it comes back
like all else, and nobody of the tenant is let in before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

MINUTE_S = 60.0
RECOUNT_S = 0.25
"""Those that run are asked what they took no more often: else each that comes would pay for them all."""


class Budget(Protocol):
    """What tokens are taken from."""

    def end(self, admission: Admission, tokens: int) -> None:
        """A request has ended; see `Admission.settle`."""


class Admission:
    """A request while it runs, and the room that is kept for it; leaving the context without `settle` gives
    all of that back."""

    def __init__(self, budget: Budget | None = None, expected: int = 0) -> None:
        self._budget = budget
        self.expected = expected
        self.held = expected
        """Tokens that room is kept for: what is expected, or what it had taken when that was counted last."""
        self.taken: Callable[[], int] = lambda: 0
        """Tokens that it has taken so far. Only who wants to be let in asks for it: a token costs nothing."""

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle(0)

    def settle(self, tokens: int) -> None:
        """The request has ended, and has taken so many tokens; what is said after that counts no more."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.end(self, tokens)


class TokenBudget:
    """The tokens of one tenant. Times are of a clock that only goes forward, in seconds.

    Let every request take at most B tokens, and the limit be L a minute. In any T minutes the tenant takes at
    most L × (T + 1) + B tokens, plus what those that run when the last one is let in then take beyond what is
    held for them. That is nothing where no request takes more than was expected of it; where some do, it
    comes once in however many minutes: it is a debt, and nobody is let in before it is paid.

    Why: who is let in finds more left than is held. What is left is at most L, and L for each minute since
    the T minutes began, less all that has ended since. So what has ended in them, and what is held for those
    that run, is less than L × (T + 1) at that time. After the last that was let in only those take more that
    ran already, what is held for them and what is beyond that; B is for the last one.

    Args:
        per_minute: the limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        """At the time `_at`; below 0: a debt."""
        self._at = clock()
        self._running: set[Admission] = set()
        self._held = 0
        """Of all that run, as of `_counted_at`."""
        self._counted_at = self._at

    @property
    def is_unused(self) -> bool:
        """Whether a new one would be the same."""
        return not self._running and self._left_now() >= self._per_minute

    def admit(self, expected: int) -> Admission | None:
        """Keep room for a request that is expected to take so many tokens; None: nothing is left."""
        return self.hold(max(1, expected)) if self.has_room() else None

    def has_room(self, beside: int = 0) -> bool:
        """Whether a request is let in now, with so much held beside what is held already."""
        return self._free() - beside > 0

    def hold(self, tokens: int) -> Admission:
        """Keep room for so many tokens, whether there is any or not."""
        admission = Admission(self, tokens)
        self._running.add(admission)
        self._held += admission.held
        return admission

    def end(self, admission: Admission, tokens: int) -> None:
        self._running.discard(admission)
        self._held -= admission.held
        self._left = self._left_now() - tokens

    def wait_s(self) -> int:
        """After how many seconds it is worth to try again: a minute after the debt is paid at the latest,
        since those that run may give much back."""
        a_second = self._per_minute / MINUTE_S
        debt_s = max(0.0, -self._left_now()) / a_second
        held_s = -self._free() / a_second - debt_s
        return max(1, math.ceil(debt_s + min(MINUTE_S, held_s)))

    def _free(self) -> float:
        if self._clock() - self._counted_at >= RECOUNT_S:
            self._counted_at = self._clock()
            for admission in self._running:
                held = max(admission.expected, admission.taken())
                self._held += held - admission.held
                admission.held = held
        return self._left_now() - self._held

    def _left_now(self) -> float:
        now = self._clock()
        back = (now - self._at) * self._per_minute / MINUTE_S
        self._left, self._at = min(float(self._per_minute), self._left + back), now
        return self._left


class TokenBudgets:
    """Those of all tenants; one that is not used takes no memory for long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._budgets: dict[tuple[str, int], TokenBudget] = {}
        self._sweep_at = 64

    def find(self, tenant: str, per_minute: int) -> TokenBudget:
        """The budget of a tenant's keys that have this limit."""
        key = tenant, per_minute
        if key not in self._budgets:
            if len(self._budgets) >= self._sweep_at:
                self.forget_unused()
                self._sweep_at = max(64, 2 * len(self._budgets))
            self._budgets[key] = TokenBudget(per_minute, self._clock)
        return self._budgets[key]

    def forget_unused(self) -> None:
        """Drop those that new ones would be the same as."""
        self._budgets = {key: one for key, one in self._budgets.items() if not one.is_unused}

    def __len__(self) -> int:
        return len(self._budgets)
