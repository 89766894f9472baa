"""One client's connection: bounded in time and in memory, whatever the client does with it.

uvicorn reads HTTP and answers it; this adds what it leaves open. It rests on names inside uvicorn's own
protocol (`cycle`, `flow`, `parser`), all private;
tests/serve_apps/http/test_connections.py watches them.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_apps.http.lingering import LingeringTransport
from serve_apps.http.message_bounds import MessageBounds
from serve_apps.http.refusal import not_http, refusal, too_many_connections, too_many_pipelined
from serve_apps.openai.errors import ApiError

STALLED_S = 60.0
"""How long a client may take nothing of what waits for it."""
MOST_CONNECTIONS = 4096
"""Of one server; one more closes the one that has been idle for longest."""
MOST_PIPELINED = 16
"""Requests of one connection that are not answered yet."""

_GONE = select.POLLHUP | select.POLLERR


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds; `check` is to be called about every second."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        now = self.loop.time()
        self._cycles: list[Any] = []
        """Requests that are not answered yet, the first first; uvicorn itself forgets all but the last."""
        self._bounds = MessageBounds(now)
        self._deaf = False
        """Nothing that still comes is read as HTTP."""
        self._half_closed = False
        self._unwritten = 0
        self._took_at = now

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering = LingeringTransport(
            transport, self.loop, self._may_still_send, lambda: self.flow.resume_reading()
        )
        super().connection_made(lingering)  # type: ignore[arg-type]
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._bounds.before_reading()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The answer goes on in HTTP/1.1; what follows is in a protocol that was not agreed on.
            self._stop_listening()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else not_http())
        else:
            if (too_large := self._bounds.after_reading(len(data))) is not None:
                self._refuse(too_large)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether it still reads shows when something is written to it."""
        unanswered = self._unanswered()
        if self._deaf or not unanswered or (self._bounds.in_body and len(unanswered) == 1):
            return False
        self._half_closed = True
        self._stop_listening()
        if self._bounds.in_body:
            unanswered[-1].disconnected = True
            unanswered[-1].message_event.set()
        first = unanswered[0]
        if not first.response_started and first.scope["http_version"] != "1.0":
            # Every client must understand this; one that is gone answers it with a reset.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(0.1, self._look_whether_gone)
        return True

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self._unanswered()) >= MOST_PIPELINED:
            raise too_many_pipelined(MOST_PIPELINED)
        self._bounds.begin(self.loop.time())

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._bounds.end_head(size)
        super().on_headers_complete()
        self._cycles = [*self._unanswered(), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._bounds.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._bounds.end(self.loop.time())

    # What uvicorn calls

    def on_response_complete(self) -> None:
        self._bounds.answered(self.loop.time())
        super().on_response_complete()

    # Bounds

    def check(self, now: float) -> None:
        """End what has taken too long; `now` is the event loop's time."""
        waiting = self.transport.get_write_buffer_size()
        if waiting < self._unwritten or not waiting:
            self._took_at = now
        self._unwritten = waiting
        if now - self._took_at > STALLED_S:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._check_request(now)

    def _check_request(self, now: float) -> None:
        unanswered = self._unanswered()
        if self._half_closed or self.flow.read_paused:
            self._look_whether_gone()
        if self.flow.read_paused:
            self._bounds.not_slow(now)
        if (late := self._bounds.late_head(now)) is not None and not self._deaf:
            self._refuse(late)
        elif not unanswered and self._is_over(now):
            self.transport.close()

    def _is_over(self, now: float) -> bool:
        """Whether a connection whose requests are answered has no use any more."""
        return self._half_closed or self._deaf or self._bounds.is_useless(now)

    def idle_since(self) -> float | None:
        """Since when the connection has no use; None while it has one."""
        used = self._unanswered() or self._bounds.in_message or self.transport.is_closing()
        return None if used else self._bounds.since

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest, or, where none is, this one."""
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other.idle_since() is not None]
        if idle:
            min(idle, key=lambda other: other.idle_since() or 0.0).transport.close()
            return
        self._refuse(too_many_connections())

    def _may_still_send(self) -> bool:
        """Whether input that nobody reads may be on its way."""
        return (self._bounds.in_message or self._deaf) and not self._half_closed

    def _unanswered(self) -> list[Any]:
        return [cycle for cycle in self._cycles if not (cycle.response_complete or cycle.disconnected)]

    def _look_whether_gone(self) -> None:
        """After a reset of a connection that nothing is read from, only the socket knows of it."""
        if self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        if any(event & _GONE for _, event in poller.poll(0)):
            self.transport.abort()

    def _stop_listening(self) -> None:
        """Read no more requests; those that have come are answered, and then the connection ends."""
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request that can be served, unless the answer to one before is under way."""
        unanswered = self._unanswered()
        whole = unanswered[:-1] if self._bounds.in_body else unanswered
        self._stop_listening()
        if self._bounds.in_body and unanswered:
            # Its body will never be whole.
            if not whole and unanswered[-1].response_started:
                self.transport.close()
                return
            unanswered[-1].disconnected = True
            unanswered[-1].message_event.set()
        if whole:
            return
        task = self.loop.create_task(self._answer(error))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, error: ApiError) -> None:
        answer = await refusal(self.app, error, self.client, self.server)
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
