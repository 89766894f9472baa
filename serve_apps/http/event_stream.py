"""A streamed answer, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_apps.http.accounts import gateway_failed
from serve_apps.http.request_record import CLIENT_CLOSED, current_record
from serve_apps.openai.errors import ApiError

logger = logging.getLogger(__name__)

MOST_UNSENT_BYTES = 4 * 1024 * 1024
"""What is kept of one stream for a client that reads more slowly than the model writes."""
PIECE_BYTES = 64 * 1024

SILENCE = b": waiting\n\n"
"""A comment, which readers of events pass over: the connection is in use."""

Result = TypeVar("Result")
_json = json.JSONEncoder(separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder for each call that has its own separators."""


class Unsent:
    """Events that wait until a client takes them; the one who writes them never waits."""

    def __init__(self, most_bytes: int = MOST_UNSENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._events: list[bytes] = []
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._put_at = time.monotonic()

    def silent_s(self) -> float:
        """For how long nothing has come; 0 while something waits, or after the end."""
        return 0.0 if self._events or self._ended else time.monotonic() - self._put_at

    def put(self, event: bytes) -> None:
        """Add one event, or nothing: what a model gained need not be anything to show.

        Raises:
            ApiError: the client is too far behind; what waited is dropped.
        """
        if not event:
            return
        if self._events and self._bytes + len(event) > self._most_bytes:
            self._events, self._bytes = [], 0
            raise ApiError(
                408,
                f"The client takes this stream too slowly: it is {self._most_bytes} bytes behind.",
                code="client_too_slow",
            )
        self._events.append(event)
        self._bytes += len(event)
        self._put_at = time.monotonic()
        self._changed.set()

    def end(self, last: bytes = b"") -> None:
        """No more comes but this event, if it is one; it is taken however much waits before it."""
        if last:
            self._events.append(last)
            self._bytes += len(last)
        self._ended = True
        self._changed.set()

    async def get(self) -> bytes | None:
        """What waits, at most about PIECE_BYTES, whole events and at least one; None at the end."""
        while not self._events:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        size = number = 0
        while number < len(self._events) and (number == 0 or size < PIECE_BYTES):
            size += len(self._events[number])
            number += 1
        piece = b"".join(self._events[:number])
        del self._events[:number]
        self._bytes -= size
        return piece


class EventStream(Response):
    """Sends server-sent events until their end or the client's.

    What the request held is freed when its last event is made, or the client has gone; a client that reads
    slowly holds nobody up.

    Args:
        failure: the event that tells of an error, which is the last one then.
        keepalive_s: seconds of silence after which a comment is sent; 0: none is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        headers: dict[str, str],
        held: AsyncExitStack,
        failure: Callable[[ApiError], bytes],
        keepalive_s: float = 0.0,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._held = held
        self._failure = failure
        self._unsent = Unsent()
        self._keepalive_s = keepalive_s
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record()
        async with self._held:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                error = await unless_gone(receive, self._run(send))
                record.error = None if error is None else error.code or str(error.status)
            except ClientDisconnect:
                record.status = CLIENT_CLOSED

    async def _run(self, send: Send) -> ApiError | None:
        """Make and send the events; the error with which they end, if they do."""
        making = asyncio.create_task(self._make())
        if self._keepalive_s:
            self._break_silence()
        try:
            while (piece := await self._unsent.get()) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return await making
        except OSError as error:
            raise ClientDisconnect from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if not making.done():
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)

    def _break_silence(self) -> None:
        """Put a comment where nothing else has come for a while, and look again in time."""
        left = self._keepalive_s - self._unsent.silent_s()
        if left <= 0:
            self._unsent.put(SILENCE)
            left = self._keepalive_s
        self._timer = asyncio.get_running_loop().call_later(left, self._break_silence)

    async def _make(self) -> ApiError | None:
        # The client must learn that its answer is not whole, whatever ends this.
        failed: ApiError | None = gateway_failed()
        try:
            try:
                async for part in self._parts:
                    self._unsent.put(part)
                failed = None
            except ApiError as error:
                failed = error
            except Exception:
                logger.exception("a stream failed")
            await self._held.aclose()
        finally:
            self._unsent.end(b"" if failed is None else self._failure(failed))
        return failed


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away first.

    Raises:
        ClientDisconnect: the client went away.
    """
    task = asyncio.ensure_future(work)
    try:
        await wait_unless_gone(receive, task)
        return task.result()
    finally:
        await ended(task)


async def ended(task: asyncio.Future[Any]) -> None:
    """End a task, if it has not ended."""
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif not task.cancelled():
        task.exception()  # nobody need have looked at it


async def wait_unless_gone(
    receive: Receive, task: asyncio.Future[Any], timeout_s: float | None = None
) -> None:
    """Return when the task has ended, or the time is over; the task goes on.

    Raises:
        ClientDisconnect: the client went away first.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not task.done():
            raise ClientDisconnect
    finally:
        await ended(gone)


def sse_event(document: Mapping[str, Any], name: str | None = None) -> bytes:
    """A document as one server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_json(document)}\n\n".encode()
