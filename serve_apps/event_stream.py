"""A streamed answer, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_apps.openai_errors import ApiError

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""The status under which a request counts whose client went away; nobody receives it."""

Result = TypeVar("Result")


class EventStream(Response):
    """Sends server-sent events until their end or the client's; then frees what the request held."""

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        headers: dict[str, str],
        held: AsyncExitStack,
        count: Callable[..., None],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._held = held
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            status, error = CLIENT_CLOSED, None
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                error = await unless_gone(receive, self._send_parts(send))
                status = 200
            except ClientDisconnect:
                logger.info("a client went away in the middle of a stream")
            finally:
                self._count(status, error)

    async def _send_parts(self, send: Send) -> ApiError | None:
        failed = None
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ApiError as error:
            failed = error
            await send({"type": "http.response.body", "body": sse_event(error.body()), "more_body": True})
        except OSError as error:
            raise ClientDisconnect from error
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return failed


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away first.

    Raises:
        ClientDisconnect: the client went away.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def sse_event(document: dict[str, Any]) -> bytes:
    """A document as one server-sent event."""
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
