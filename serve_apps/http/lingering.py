"""A transport that does not close on a client that still sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 2.0
"""How long what a client still sends is thrown away after the last answer, so that it can read that."""


class LingeringTransport:
    """Closes once the client has had time to read the last answer.

    Closing with unread input resets the connection, and the client may never see the answer that says why.

    Args:
        may_still_send: whether input that nobody reads may be on its way.
        resume_reading: lets what still comes be read, to be thrown away.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_still_send: Callable[[], bool],
        resume_reading: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._may_still_send = may_still_send
        self._resume_reading = resume_reading
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
        if not self._may_still_send() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._resume_reading()
        self._loop.call_later(LINGER_S, self._transport.close)
