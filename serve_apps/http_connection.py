"""One client's connection: bounded in time and in memory, whatever the client does with it.

uvicorn reads HTTP and answers it; this adds what it leaves open. It rests on names inside uvicorn's own
protocol (`cycle`, `flow`, `parser`), which tests/serve_apps/test_gateway_connections.py watches.
"""

from __future__ import annotations

import asyncio
import select
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_apps.openai_errors import ApiError, bad_request, too_slow
from serve_apps.request_accounts import REFUSAL

KEEP_ALIVE_S = 75
"""How long a connection without a request stays open."""
HEAD_S = 30.0
"""How long a request's line and headers may take to arrive."""
REST_S = 30.0
"""How long a client may go on sending a body that was answered before its end."""
STALLED_S = 60.0
"""How long a client may take nothing of what waits for it."""
LINGER_S = 2.0
"""How long what a client still sends is thrown away after the last answer, so that it can read that."""
MOST_HEAD_BYTES = 64 * 1024
"""Largest request line with headers; what frames a body may be eight times the body more."""
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
        self._boundaries = 0
        """Beginnings and ends of messages and of their heads, so far."""
        self._in_head = self._in_body = False
        self._received = 0
        """Bytes since the last boundary, without those that came together with it."""
        self._body_bytes = 0
        self._since = now
        """When the message began; between messages, when the last one or its answer ended."""
        self._deaf = False
        """Nothing that still comes is read as HTTP."""
        self._half_closed = False
        self._unwritten = 0
        self._took_at = now

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
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
        boundaries = self._boundaries
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The answer goes on in HTTP/1.1; what follows is in a protocol that was not agreed on.
            self._stop_listening()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _not_http())
        else:
            if boundaries == self._boundaries:
                self._received += len(data)
            if self._received > MOST_HEAD_BYTES + 8 * self._body_bytes:
                self._refuse(_head_too_large())

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether it still reads shows when something is written to it."""
        unanswered = self._unanswered()
        if self._deaf or not unanswered or (self._in_body and len(unanswered) == 1):
            return False
        self._half_closed = True
        self._stop_listening()
        if self._in_body:
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
            raise bad_request(
                f"At most {MOST_PIPELINED} requests of one connection may wait for their answers.",
                code="too_many_pipelined",
            )
        self._in_head = True
        self._pass_boundary()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            raise _head_too_large()
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._received = 0
        self._boundaries += 1
        self._cycles = [*self._unanswered(), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = self._in_body = False
        self._pass_boundary()

    # What uvicorn calls

    def on_response_complete(self) -> None:
        if not (self._in_head or self._in_body):
            self._since = self.loop.time()
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
            self._since = now  # it is not the client that is slow
        waited_s = now - self._since
        if self._in_head and waited_s > HEAD_S and not self._deaf:
            self._refuse(too_slow("The request's head", HEAD_S))
        elif not unanswered and self._is_over(waited_s):
            self.transport.close()

    def _is_over(self, waited_s: float) -> bool:
        """Whether a connection whose requests are answered has no use any more."""
        if self._half_closed or self._deaf:
            return True
        if self._in_body:
            return waited_s > REST_S
        # uvicorn closes idle connections too, but only after an answer.
        return not self._in_head and waited_s > KEEP_ALIVE_S + 5

    def idle_since(self) -> float | None:
        """Since when the connection has no use; None while it has one."""
        used = self._unanswered() or self._in_head or self._in_body or self.transport.is_closing()
        return None if used else self._since

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest, or, where none is, this one."""
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other.idle_since() is not None]
        if idle:
            min(idle, key=lambda other: other.idle_since() or 0.0).transport.close()
            return
        self._refuse(
            ApiError(
                503,
                "The gateway has as many connections as it can have; try again in a moment.",
                kind="server_error",
                code="too_many_connections",
                headers={"Retry-After": "1"},
            )
        )

    def may_still_send(self) -> bool:
        """Whether input that nobody reads may be on its way."""
        return (self._in_head or self._in_body or self._deaf) and not self._half_closed

    def _pass_boundary(self) -> None:
        self._boundaries += 1
        self._received = self._body_bytes = 0
        self._since = self.loop.time()

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
        whole = unanswered[:-1] if self._in_body else unanswered
        self._stop_listening()
        if self._in_body and unanswered:
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
        """Let the application answer with an error, so that it has an id, is counted and logged."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "",
            "path": "",
            "query_string": b"",
            "headers": [],
            "client": self.client,
            "server": self.server,
            "scheme": "http",
            "extensions": {REFUSAL: error},
        }
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(n, v) for n, v in message["headers"] if n != b"connection"]
                status = HTTPStatus(message["status"])
                lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
                lines += [name + b": " + value for name, value in [*headers, (b"connection", b"close")]]
                parts.append(b"\r\n".join(lines) + b"\r\n\r\n")
            else:
                parts.append(message.get("body", b""))

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await self.app(scope, receive, send)
        if not self.transport.is_closing():
            self.transport.write(b"".join(parts))
            self.transport.close()


class _Lingering:
    """A transport that does not close on a client that still sends.

    Closing with unread input resets the connection, and the client may never see the answer that says why.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def close(self) -> None:
        if self.is_closing():
            return
        self._closing = True
        connection = self._connection
        if not connection.may_still_send() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        connection.flow.resume_reading()
        connection.loop.call_later(LINGER_S, self._transport.close)


def _not_http() -> ApiError:
    return bad_request("This is not HTTP/1.1 that the gateway can read.", code="invalid_http")


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"The request's line and headers are larger than {MOST_HEAD_BYTES} bytes, the most that is taken.",
        code="headers_too_large",
    )
