"""The gateway as a Ray Serve deployment: what runs in its process, from its start to its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray

from cluster.config.reading.api_keys import KeyRing, cluster_token
from cluster.config.sections.cluster import EndpointConfig
from cluster.hosts.endpoints import choose_endpoint
from cluster.state.record import http_url
from serve_apps.gateway.access import Access
from serve_apps.gateway.api import build_api
from serve_apps.gateway.app_table import AppTable
from serve_apps.gateway.options import GatewayOptions
from serve_apps.gateway.quota_line import QuotaLine
from serve_apps.gateway.replica_backend import ReplicaBackend
from serve_apps.gateway.service import GatewayService
from serve_apps.gateway.table_follower import TableFollower
from serve_apps.http.server import HttpServer
from serve_apps.openai.errors import ApiError
from serve_apps.quotas.shared_limits import SharedLimits
from serve_apps.replica.watchdog import show_life

HANG_TIMEOUT_S = 10.0
"""A gateway whose event loop stands still for so long is killed, and comes back."""
LEAVE_S = 0.5
"""How long a gateway that is to end still takes what the front sends, until that knows of it."""
DRAIN_S = 600.0
"""How long a gateway that is to end may take to finish the requests that it has."""


@dataclass(frozen=True)
class GatewayPlace:
    """Where a gateway listens.

    Attributes:
        host: None: at the address of its node.
        port: 0: any that is free.
        or_next: another program on that node may have the port; then the next one is taken that is free.
    """

    host: str | None
    port: int
    or_next: bool = False

    def chosen(self) -> tuple[str, int]:
        """Host and port, on this node."""
        host = self.host or ray.util.get_node_ip_address()
        if not self.or_next:
            return host, self.port
        return choose_endpoint("gateway", EndpointConfig(), host, self.port, ())


class Gateway:
    """The Serve deployment's class. One replica serves all apps.

    It listens itself: through Serve's proxy a request costs twice as much, and a token a message of Ray's.

    Args:
        place: where it listens.
        needs_keys: whether who asks needs an API key; the controller says which there are.
        options: see `GatewayOptions.from_json`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        place: GatewayPlace,
        needs_keys: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        chosen = GatewayOptions.from_json(options)
        gateway_id = uuid.uuid4().hex
        line = QuotaLine(gateway_id)
        limits = None if chosen.alone else SharedLimits(line.draw)
        self._backend = ReplicaBackend(chosen.token_ports)
        # Nobody is let in before it is known whose keys there are.
        ring = KeyRing(()) if needs_keys else None
        access = Access(ring, cluster_token(), chosen.metrics_from, limits)
        access.waits_for_keys = needs_keys
        ask_share = None if chosen.alone else line.share
        service = GatewayService(self._backend, self._look, access, chosen, ask_share)
        facts = {"node": ray.get_runtime_context().get_node_id()}
        self._table = TableFollower(gateway_id, service, self._backend, limits, facts)
        self._running = [asyncio.create_task(self._table.run())]
        host, port = place.chosen()
        self._server = HttpServer(build_api(service), host, port, DRAIN_S)
        await self._table.first_table()
        port = await self._server.start()
        self._table.facts["url"] = http_url(host, port, ray.util.get_node_ip_address())
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
            # Whoever sends requests here looks for another gateway, before connections are refused.
            self._table.facts["url"] = None
            with suppress(ApiError):
                await self._table.look()
            await asyncio.sleep(LEAVE_S)
            await server.stop()
