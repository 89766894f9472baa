"""Every request of the gateway gets an id, and is counted and logged when it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.wording import logs_of
from serve_apps.http.log import requests_logger
from serve_apps.http.request_record import (
    CLIENT_CLOSED,
    RECORD,
    Answering,
    RequestRecord,
    current_record,
    request_id,
)
from serve_apps.openai.errors import ApiError, internal
from serve_apps.spec import GATEWAY

logger = logging.getLogger(__name__)

_DOCUMENT = "/openapi.json"
_PROBES = frozenset({"/health", "/ready", "/metrics", "/ping", "/version", "/load"})
"""What other programs ask every few seconds; their successes are logged for debugging only."""


def gateway_failed() -> ApiError:
    """What a client is told of a mistake of the gateway's own; the traceback is logged."""
    request_id = current_record().request_id
    return internal(f"The gateway failed; {logs_of(GATEWAY, request=request_id)} says why.")


class InFlight:
    """How many POSTs, which ask a model, have come and have not ended."""

    def __init__(self) -> None:
        self.number = 0


class RequestAccounts:
    """The outermost part of the gateway's ASGI application.

    A failure of the gateway itself ends here, with its traceback in the log.

    Args:
        count: is told of each request that has ended, and of the seconds it took.
        in_flight: where those that run are counted.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[RequestRecord, float], None], in_flight: InFlight
    ) -> None:
        self._app = app
        self._count = count
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id(Headers(scope=scope).get("x-request-id", "")), scope["method"])
        scope[RECORD] = record
        header = (b"x-request-id", record.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)
            record.answered = message["type"] == "http.response.body" and not message.get("more_body")

        asks = record.method == "POST"
        self._in_flight.number += asks
        with Answering(record):
            try:
                await self._answer(record, scope, receive, send_with_id)
            except asyncio.CancelledError:
                record.status = CLIENT_CLOSED
                raise
            finally:
                self._in_flight.number -= asks
                self._end(record, scope)

    async def _answer(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            # The application has told the client what it may know, unless the answer had begun.
            logger.exception("the gateway failed")
            if not record.answered:
                raise  # the server breaks the connection off

    def _end(self, record: RequestRecord, scope: Scope) -> None:
        # The router notes in the scope where it led, but for the document.
        known = _DOCUMENT if scope.get("path") == _DOCUMENT else ""
        record.endpoint = getattr(scope.get("route"), "path", known)
        seconds = record.seconds()
        self._count(record, seconds)
        routine = record.endpoint in _PROBES and record.status == 200
        level = logging.DEBUG if routine else logging.INFO
        if requests_logger.isEnabledFor(level):
            requests_logger.log(level, "%s", record.line(seconds))
