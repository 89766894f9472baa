"""How far a connection's current message has come, and whether it takes too long or too much; no clock."""

from __future__ import annotations

from serve_apps.http.refusal import head_too_large
from serve_apps.openai.errors import ApiError, too_slow

KEEP_ALIVE_S = 75
"""How long a connection without a request stays open."""
HEAD_S = 30.0
"""How long a request's line and headers may take to arrive."""
REST_S = 30.0
"""How long a client may go on sending a body that was answered before its end."""
MOST_HEAD_BYTES = 64 * 1024
"""Largest request line with headers; what frames a body may be eight times the body more."""


class MessageBounds:
    """One connection's messages, one after the other. Times are the event loop's, in seconds."""

    def __init__(self, now: float) -> None:
        self.in_head = self.in_body = False
        self.since = now
        """When the message began; between messages, when the last one or its answer ended."""
        self._excused_at = now
        """Until when it was not the client's fault that nothing came."""
        self._boundaries = 0
        """Beginnings and ends of messages and of their heads, so far."""
        self._boundaries_before = 0
        self._received = 0
        """Bytes since the last boundary, without those that came together with it."""
        self._body_bytes = 0

    @property
    def in_message(self) -> bool:
        return self.in_head or self.in_body

    def begin(self, now: float) -> None:
        """A message begins."""
        self.in_head = True
        self._pass_boundary(now)

    def end_head(self, size: int) -> None:
        """The message's head of `size` bytes has come.

        Raises:
            ApiError: 431, it is too large.
        """
        if size > MOST_HEAD_BYTES:
            raise head_too_large(MOST_HEAD_BYTES)
        self.in_head, self.in_body = False, True
        self._received = 0
        self._boundaries += 1

    def add_body(self, size: int) -> None:
        """So many bytes of a body have come, without what frames them."""
        self._body_bytes += size

    def end(self, now: float) -> None:
        """The message has come whole."""
        self.in_head = self.in_body = False
        self._pass_boundary(now)

    def answered(self, now: float) -> None:
        """An answer has ended."""
        if not self.in_message:
            self.since = now

    def not_slow(self, now: float) -> None:
        """That nothing has come is not the client's fault."""
        self._excused_at = now

    def before_reading(self) -> None:
        """Bytes are parsed now, see `after_reading`."""
        self._boundaries_before = self._boundaries

    def after_reading(self, size: int) -> ApiError | None:
        """What to refuse a client with whose head, or body's frames, become too large with so many bytes."""
        if self._boundaries == self._boundaries_before:
            self._received += size
        too_large = self._received > MOST_HEAD_BYTES + 8 * self._body_bytes
        return head_too_large(MOST_HEAD_BYTES) if too_large else None

    def late_head(self, now: float) -> ApiError | None:
        """What to refuse the client with, where a head takes too long."""
        late = self.in_head and self._waited_s(now) > HEAD_S
        return too_slow("The request's head", HEAD_S) if late else None

    def is_useless(self, now: float) -> bool:
        """Whether a connection whose requests are answered has no use any more."""
        waited_s = self._waited_s(now)
        if self.in_body:
            return waited_s > REST_S
        # uvicorn closes idle connections too, but only after an answer.
        return not self.in_head and waited_s > KEEP_ALIVE_S + 5

    def _waited_s(self, now: float) -> float:
        return now - max(self.since, self._excused_at)

    def _pass_boundary(self, now: float) -> None:
        self._boundaries += 1
        self._received = self._body_bytes = 0
        self.since = now
