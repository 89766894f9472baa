"""An HTTP server inside the gateway's own process: a request and its tokens cross no proxy."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
"""How long a connection without a request stays open."""
GRACE_S = 5.0
"""How long running requests may take after `stop`."""
BACKLOG = 2048


class HttpServer:
    """Serves an ASGI application in the running event loop.

    Several processes of one machine may serve the same address: the kernel spreads new connections over them,
    so that one can take over from another without a pause.

    Args:
        host, port: where it listens.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._address = host, port
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen from now on.

        Raises:
            OSError: another program has the port.
        """
        host, port = self._address
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    def check(self) -> None:
        """Raise when it does not serve any more."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server has ended")

    async def stop(self) -> None:
        """Take no more connections, finish what runs, and close."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=GRACE_S + 1)
