"""The gateway as a Ray Serve deployment: what runs in its process, from its start to its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cluster.config.reading.api_keys import cluster_token, load_keys
from serve_apps.gateway.access import Access
from serve_apps.gateway.api import build_api
from serve_apps.gateway.app_table import AppTable
from serve_apps.gateway.key_file import follow_keys
from serve_apps.gateway.options import GatewayOptions
from serve_apps.gateway.replica_backend import ReplicaBackend
from serve_apps.gateway.service import GatewayService
from serve_apps.gateway.table_follower import TableFollower
from serve_apps.http.server import HttpServer
from serve_apps.replica.watchdog import show_life

HANG_TIMEOUT_S = 10.0
"""A gateway whose event loop stands still for so long is killed, and comes back."""


class Gateway:
    """The Serve deployment's class. One replica serves all apps.

    It listens itself: through Serve's proxy a request costs twice as much, and a token a message of Ray's.

    Args:
        host, port: where it listens.
        keys: where its API keys are, see `load_keys`; None lets everyone in.
        options: see `GatewayOptions.from_json`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        host: str,
        port: int,
        keys: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        chosen = GatewayOptions.from_json(options)
        self._backend = ReplicaBackend(chosen.token_ports)
        ring = None if keys is None else load_keys(keys)
        access = Access(ring, cluster_token(), chosen.metrics_from)
        service = GatewayService(self._backend, self._look, access, chosen)
        self._table = TableFollower(uuid.uuid4().hex, service, self._backend)
        self._running = [asyncio.create_task(self._table.run())]
        if keys is not None:
            self._running.append(asyncio.create_task(follow_keys(keys, access)))
        self._server = HttpServer(build_api(service), host, port)
        await self._table.first_table()
        await self._server.start()
        self._running.append(asyncio.create_task(show_life(HANG_TIMEOUT_S)))

    async def _look(self) -> AppTable:
        return await self._table.look()

    async def check_health(self) -> None:
        """Raise when the gateway no longer follows what Serve runs, or receives no tokens."""
        self._backend.check()
        self._server.check()
        for task in self._running:
            if task.done():
                task.result()
                raise RuntimeError("the gateway does not follow the apps any more")

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            await server.stop()
