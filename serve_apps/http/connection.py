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

from serve_apps.http.crowd import Crowd
from serve_apps.http.lingering import LingeringTransport
from serve_apps.http.message_bounds import MessageBounds
from serve_apps.http.refusal import not_http, refusal, too_many_connections, too_many_pipelined
from serve_apps.http.request_record import lets_in
from serve_apps.openai.errors import ApiError

STALLED_S = 60.0
"""How long a client may take nothing of what waits for it."""
MOST_PIPELINED = 16
"""Requests of one connection that are not answered yet."""

_GONE = select.POLLHUP | select.POLLERR


_UPGRADING = (b"upgrade", b"http2-settings")


class _AnyLength(int):
    """Stands for the length of a body in uvicorn's bookkeeping where any is right."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds; `check` is to be called about every second.

    Args:
        crowd: of the server's connections.
    """

    def __init__(self, *args: Any, crowd: Crowd, **options: Any) -> None:
        super().__init__(*args, **options)
        self._crowd = crowd
        now = self.loop.time()
        self._cycles: list[Any] = []
        """Requests that are not answered yet, the first first; uvicorn itself forgets all but the last."""
        self._bounds = MessageBounds(now)
        self._deaf = False
        """Nothing that still comes is read as HTTP."""
        self._refusing = False
        """What is told of a refusal is not written yet."""
        self._upgrade_asked = False
        """The head that has just come asks for another protocol, and will be read again without that."""
        self._half_closed = False
        self._unwritten = 0
        self._took_at = now

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering = LingeringTransport(
            transport, self.loop, self._may_still_send, lambda: self.flow.resume_reading()
        )
        super().connection_made(lingering)  # type: ignore[arg-type]
        self._address = self.client[0] if self.client else ""
        self._crowd.add(self, self._address)
        other = self._crowd.to_close(self, self._address)
        if isinstance(other, Connection):
            other.make_room()
        elif self._crowd.is_full:
            first = self._crowd.turn_away(self, self._address)
            if isinstance(first, Connection):
                first.make_room()
            self._refuse(too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._crowd.remove(self, self._address)
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
            self._parse(data)
        except httptools.HttpParserUpgrade:
            self._stop_listening()  # CONNECT: what follows is not for us
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else not_http())
        else:
            if (too_large := self._bounds.after_reading(len(data))) is not None:
                self._refuse(too_large)

    def _parse(self, data: bytes) -> None:
        """Have the parser read on; a client that would like another protocol is answered in this one."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrade_asked:
                    raise
                # The parser takes what follows for the other protocol; it is the request's body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._upgrade_asked = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [one for one in value.split(b",") if one.strip().lower() not in _UPGRADING]
                value = b",".join(kept)
            if name not in _UPGRADING and value:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

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
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade_asked = True
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._bounds.end_head(size)
        super().on_headers_complete()
        self._cycles = [*self._unanswered(), self.cycle]
        if self.scope["http_version"] == "1.0":
            # Without a length its answer ends where the connection does: it knows no chunks.
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._bounds.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade_asked:
            return
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
        if self._refusing:
            return False
        return self._half_closed or self._deaf or self._bounds.is_useless(now)

    def waiting_since(self) -> float | None:
        """See `crowd.Waiting`.

        A request is served whose caller was let in, while its body comes and until the client has taken the
        answer. All else that a connection can be at takes no key: nothing, a head, a body that nobody waits
        for, an answer to anybody that is taken slowly, what still comes after the last one.
        """
        sending = self.transport.get_write_buffer_size() > 0
        for cycle in self._cycles:
            if (sending or not (cycle.response_complete or cycle.disconnected)) and lets_in(cycle.scope):
                return None
        return self._bounds.since

    def make_room(self) -> None:
        """End a connection that serves no request, now: one that lingers would take its room still."""
        self._crowd.remove(self, self._address)
        self.transport.abort()

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
        self._refusing = True
        task = self.loop.create_task(self._answer(error))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, error: ApiError) -> None:
        try:
            answer = await refusal(self.app, error, self.client, self.server)
        finally:
            self._refusing = False
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
