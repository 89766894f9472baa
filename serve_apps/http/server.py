"""An HTTP server inside the gateway's own process: a request and its tokens cross no proxy."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

import uvicorn
from starlette.types import ASGIApp

from serve_apps.http.connection import Connection
from serve_apps.http.log import log_as_json

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long a connection without a request stays open: longer than whoever stands in front keeps it."""
MOST_FILES = 32 * 1024
"""Files and sockets that the process may have open, as far as the system lets it."""
BACKLOG = 2048


class HttpServer:
    """Serves an ASGI application in the running event loop.

    It trusts who connects to be quick and few, as the front is, or a load balancer.

    Several processes of one machine may serve the same address: the kernel spreads new connections over them,
    so that one can take over from another without a pause. What the process logs is JSON from then on.

    Args:
        host, port: where it listens; 0: at any port that is free.
        grace_s: how long requests that run may take after `stop`.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, grace_s: float = 5.0) -> None:
        self._address = host, port
        self._grace_s = grace_s
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Who asks is the other end of the connection, whatever a client writes into its headers.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(grace_s),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen from now on; returns the port.

        Raises:
            OSError: another program has the port.
        """
        log_as_json()
        _allow_open_files(MOST_FILES)
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
        return int(listener.getsockname()[1])

    def check(self) -> None:
        """Raise when it does not serve any more."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server has ended")

    async def stop(self) -> None:
        """Take no more connections, finish what runs, and close."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._grace_s + 1)


def _allow_open_files(number: int) -> None:
    """Let this process open so many files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
