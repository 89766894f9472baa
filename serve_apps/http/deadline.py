"""When a request has to be done: what its client says, and what its app allows."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_apps.openai.errors import ApiError, bad_request, shortened, timed_out

HEADER = "x-request-timeout-s"
"""The header with which a client bounds its request, in seconds."""

_NUMBER = re.compile(r"\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


class Deadline:
    """The end of a request's time, counted from its arrival; the smallest bound holds.

    Args:
        began: when the request arrived (monotonic clock).
        given: the client's header, None without one.

    Raises:
        ApiError: 400, the header is no such number.
    """

    def __init__(self, began: float, given: str | None = None) -> None:
        self._began = began
        self._timeout_s = math.inf if given is None else _seconds(given)
        self._scope: asyncio.Timeout | None = None

    def tighten(self, timeout_s: float) -> None:
        """Bound it by so many seconds too."""
        self._timeout_s = min(self._timeout_s, timeout_s)
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time() + self.left_s())

    def left_s(self) -> float:
        """Seconds that are left; below 0 when it has passed."""
        return self._began + self._timeout_s - time.monotonic()

    def restated(self, error: ApiError) -> ApiError:
        """The error; where it says that the time is over, with the time that the request had."""
        return timed_out(self._timeout_s) if error.code == "timeout" else error

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Ends what is done in this context when the time is over.

        Raises:
            ApiError: 504.
        """
        left_s = self.left_s()
        self._scope = asyncio.timeout(None if math.isinf(left_s) else left_s)
        try:
            async with self._scope:
                yield
        except TimeoutError:
            if not self._scope.expired():
                raise
            raise timed_out(self._timeout_s) from None
        finally:
            self._scope = None


def _seconds(given: str) -> float:
    seconds = float(given) if _NUMBER.fullmatch(given) else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise bad_request(
            f"The header '{HEADER}' must be a number of seconds above 0 (given: {shortened(given)!r}).",
            param=HEADER,
            code="invalid_value",
        )
    return seconds
