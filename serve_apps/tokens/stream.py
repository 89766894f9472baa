"""Tokens from replicas to gateways, beside Ray: one ZeroMQ message an engine step, with all that it gained.

A message through Ray costs more than a token. A gateway binds a socket, whose address goes with each request
to the replica; the replica connects and pushes what the requests of that gateway gain. The connection is
encrypted and both sides prove who they are (CURVE, with keys that a gateway makes when it starts and that
only travel inside Ray's own calls).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from serve_apps.tokens.inbox import Inbox, Item

logger = logging.getLogger(__name__)

MOST_QUEUED = 10_000
"""Messages (engine steps) that may wait for a gateway before it counts as gone."""
HEARTBEAT_MS = 5_000
SILENCE_MS = 15_000
"""A gateway that does not answer heartbeats for so long is gone."""
LINGER_MS = 1_000
CONNECT_S = 3.0
"""How long the way to a gateway may take to open; what is in the way is not waited for."""


class UnreachableError(Exception):
    """A gateway cannot be reached where it receives tokens."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"the gateway cannot be reached at {endpoint}")
        self.endpoint = endpoint


@dataclass(frozen=True)
class StreamAddress:
    """Where a gateway receives tokens, and what one needs to be let in."""

    endpoint: str
    server_key: str
    client_public: str
    client_secret: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class TokenReceiver:
    """The gateway's end: gives each item to the inbox of its request.

    Args:
        host: the address to bind, which replicas on other nodes can reach.
        ports: the first and the last that it may take. Default: any that is free.

    Raises:
        OSError: another program has each of the ports.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None = None) -> None:
        self._context = zmq.asyncio.Context()
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._door = AsyncioAuthenticator(self._context)
        self._door.start()
        self._door.configure_curve_callback(credentials_provider=_OneKey(client_public))
        self._socket = self._context.socket(zmq.PULL)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = server_public, server_secret
        # What replicas push is always taken at once, see `run`.
        self._socket.rcvhwm = 0
        try:
            port = _bind(self._socket, host, ports)
        except (OSError, zmq.ZMQError):
            self.stop()  # what is left open would keep the process from ending
            raise
        self.address = StreamAddress(
            f"tcp://{host}:{port}", *(key.decode() for key in (server_public, client_public, client_secret))
        )
        self._inboxes: dict[str, Inbox] = {}

    def open(self, key: str, inbox: Inbox) -> None:
        """Give the items under this key to the inbox."""
        self._inboxes[key] = inbox

    def close(self, key: str) -> None:
        """Drop what still comes under this key."""
        self._inboxes.pop(key, None)

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            try:
                message = await self._socket.recv()
            except zmq.Again:
                # What announced a message may be gone when it is fetched: a peer that came or went.
                await asyncio.sleep(0)
                continue
            for key, item in msgpack.unpackb(message):
                inbox = self._inboxes.get(key)
                if inbox is not None:
                    inbox.put(item)

    def stop(self) -> None:
        self._door.stop()
        self._context.destroy(linger=0)


def _bind(socket: zmq.asyncio.Socket, host: str, ports: tuple[int, int] | None) -> int:
    if ports is None:
        return int(socket.bind_to_random_port(f"tcp://{host}"))
    for port in range(ports[0], ports[1] + 1):
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(
        f"each of the ports {ports[0]}-{ports[1]} of {host} is in use (cluster.gateway.token_ports)"
    )


class _OneKey:
    """Lets in who proves to have the key that this gateway gave out."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


@dataclass(frozen=True)
class _Peer:
    """A connection to one gateway, and who watches it."""

    socket: zmq.Socket[bytes]
    monitor: zmq.asyncio.Socket
    watch: asyncio.Task[None]
    ready: asyncio.Future[None]
    """Done once both sides have shown who they are."""


class TokenSender:
    """A replica's end: collects what its requests gain until the event loop has gone round once.

    Args:
        on_lost: called with the endpoint of a gateway that is gone.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._context = zmq.Context()
        self._async_context = zmq.asyncio.Context(self._context)
        self._peers: dict[str, _Peer] = {}
        self._pending: dict[str, list[tuple[str, Item]]] = {}

    async def connect(self, address: Mapping[str, str]) -> None:
        """Make sure that there is a connection to a gateway (its StreamAddress as JSON).

        Raises:
            UnreachableError: there is none after CONNECT_S, or the gateway does not let this replica in.
        """
        endpoint = address["endpoint"]
        peer = self._peers.get(endpoint) or self._open(address)
        if peer.ready.done() and peer.ready.exception() is None:
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.shield(peer.ready)
        except TimeoutError:
            if self._peers.get(endpoint) is peer:
                self._drop(endpoint, 0)
            raise UnreachableError(endpoint) from None

    def _open(self, address: Mapping[str, str]) -> _Peer:
        endpoint = address["endpoint"]
        socket = self._context.socket(zmq.PUSH)
        socket.curve_serverkey = address["server_key"].encode()
        socket.curve_publickey = address["client_public"].encode()
        socket.curve_secretkey = address["client_secret"].encode()
        socket.sndhwm = MOST_QUEUED
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, SILENCE_MS
        events = f"inproc://{endpoint}"
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        socket.monitor(events, ends | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor = self._async_context.socket(zmq.PAIR)
        monitor.connect(events)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        watch = loop.create_task(self._watch(endpoint, monitor, ready))
        peer = self._peers[endpoint] = _Peer(socket, monitor, watch, ready)
        socket.connect(endpoint)
        return peer

    def send(self, endpoint: str, key: str, item: Item) -> None:
        """Send an item; it goes with all others of this turn of the event loop."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(endpoint, []).append((key, item))

    def stop(self) -> None:
        """Send what is left and close."""
        self._flush()
        for endpoint in list(self._peers):
            self._drop(endpoint, LINGER_MS)
        self._context.term()

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for endpoint, items in pending.items():
            peer = self._peers.get(endpoint)
            if peer is None:
                continue  # its gateway is gone, and so are the requests
            try:
                peer.socket.send(msgpack.packb(items), zmq.NOBLOCK)
            except zmq.Again:
                self._lose(endpoint, "it takes nothing any more")

    async def _watch(self, endpoint: str, monitor: zmq.asyncio.Socket, ready: asyncio.Future[None]) -> None:
        event: Any = await recv_monitor_message(monitor)
        while event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if not ready.done():
                ready.set_result(None)
            event = await recv_monitor_message(monitor)
        self._lose(endpoint, f"event {event['event']!r} of its connection")

    def _lose(self, endpoint: str, why: str) -> None:
        if endpoint in self._peers:
            logger.warning("the gateway at %s is gone: %s", endpoint, why)
            self._drop(endpoint, 0)
            self._on_lost(endpoint)

    def _drop(self, endpoint: str, linger_ms: int) -> None:
        peer = self._peers.pop(endpoint)
        if not peer.ready.done():
            peer.ready.set_exception(UnreachableError(endpoint))
            peer.ready.exception()  # nobody need wait for it
        if peer.watch is not asyncio.current_task():
            peer.watch.cancel()
        peer.monitor.close(linger=0)
        with contextlib.suppress(zmq.ZMQError):
            peer.socket.disable_monitor()
        peer.socket.close(linger=linger_ms)
