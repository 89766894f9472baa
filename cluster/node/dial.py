"""How a forked process calls whoever has ordered it, from another node if need be: over TCP, by a key.

Both ends show that they have the key, and neither sends it. What follows is not encrypted, as Ray's own calls
are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

_NONCE = 32
_PURPOSE = 16
"""Bytes that say what a call is for, filled up with zeros."""
ANSWER_S = 10.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Who says nothing for 20 s is gone."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class DialAddress:
    """Where somebody is called, and the key (in hexadecimal digits) that lets in."""

    host: str
    port: int
    key: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DialAddress:
        return cls(**document)


def dial(address: DialAddress, purpose: str) -> socket.socket:
    """Call; the connection, once both ends have shown who they are.

    Raises:
        OSError: nobody answers there, or somebody else.
    """
    connection = socket.create_connection((address.host, address.port), timeout=ANSWER_S)
    try:
        _set_options(connection)
        key, mine, about = bytes.fromhex(address.key), secrets.token_bytes(_NONCE), _filled(purpose)
        theirs = receive(connection, _NONCE)
        connection.sendall(mine + about + _proof(key, b"caller", theirs, mine, about))
        if not hmac.compare_digest(receive(connection, 32), _proof(key, b"called", theirs, mine, about)):
            raise ConnectionError("somebody without the key answers there")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


class Switchboard:
    """Takes calls, each for what it is for.

    Args:
        take: called with the purpose of a call and its streams, once who calls has shown the key.
    """

    def __init__(self, take: Callable[[str, Streams], None]) -> None:
        self._take = take
        self._key = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> DialAddress:
        """Listen at a free port of this address.

        Raises:
            OSError: it is none of this node's.
        """
        self._server = await asyncio.start_server(self._answer, host, 0)
        return DialAddress(host, self._server.sockets[0].getsockname()[1], self._key.hex())

    def close(self) -> None:
        """Take no more calls; those that there are go on."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                mine = secrets.token_bytes(_NONCE)
                writer.write(mine)
                theirs, about = await reader.readexactly(_NONCE), await reader.readexactly(_PURPOSE)
                shown = await reader.readexactly(32)
                if not hmac.compare_digest(shown, _proof(self._key, b"caller", mine, theirs, about)):
                    raise ConnectionError("it has not the key")
                writer.write(_proof(self._key, b"called", mine, theirs, about))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.close()
            return
        with suppress(OSError):
            _set_options(writer.get_extra_info("socket"))
        self._take(about.rstrip(b"\0").decode(), (reader, writer))


def _set_options(connection: Any) -> None:
    """Send at once, and notice that the other end is gone with its node, which says nothing any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(key: bytes, side: bytes, *said: bytes) -> bytes:
    return hmac.new(key, b"".join((side, *said)), hashlib.sha256).digest()


def _filled(purpose: str) -> bytes:
    return purpose.encode().ljust(_PURPOSE, b"\0")


def receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes, and no fewer.

    Raises:
        ConnectionError: the other end has gone before.
    """
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            raise ConnectionError("the other end has gone")
        received += more
    return received
