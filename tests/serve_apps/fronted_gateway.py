"""A real gateway behind the real HAProxy with our configuration, as clients meet it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from cluster.hosts.endpoints import free_port
from serve_apps.front.haproxy import Haproxy
from serve_apps.front.haproxy_config import FrontSettings, haproxy_config
from serve_apps.front.slots import Slots
from tests.serve_apps.gateway_process import HOST, RunningGateway, running_gateway

SECRET = "0123abcd"


@dataclass(frozen=True)
class FrontedGateway(RunningGateway):
    """Its port is that of the front; `haproxy` is the process that has the connections."""

    haproxy: psutil.Process


@contextmanager
def front(gateway: RunningGateway, **changes: object) -> Iterator[str]:
    """The front of a gateway; its URL.

    Args:
        changes: what is other than usual in its `FrontSettings`.
    """
    with _front(gateway, changes) as (url, _):
        yield url


@contextmanager
def fronted_gateway(
    folder: Path, front_settings: Mapping[str, object] | None = None, **options: Any
) -> Iterator[FrontedGateway]:
    """A gateway whose clients come through a front; see `running_gateway` for the options."""
    of_gateway = {**options.pop("gateway", {}), "front_secret": SECRET}
    with (
        running_gateway(folder, gateway=of_gateway, **options) as gateway,
        _front(gateway, front_settings or {}) as (url, haproxy),
    ):
        (worker,) = psutil.Process(haproxy.pid).children()
        yield FrontedGateway(gateway.process, int(url.rpartition(":")[2]), gateway.log_path, worker)


@contextmanager
def _front(gateway: RunningGateway, changes: Mapping[str, object]) -> Iterator[tuple[str, Haproxy]]:
    chosen = FrontSettings(HOST, free_port(HOST), SECRET, connections=1000)
    chosen = replace(chosen, **changes)  # type: ignore[arg-type]
    haproxy, slots = Haproxy(), Slots(4)
    slots.change([gateway.url])
    try:
        haproxy.go_by(haproxy_config(chosen, slots.servers(), str(haproxy.directory)))
        yield f"{'http' if chosen.certificate is None else 'https'}://{HOST}:{chosen.port}", haproxy
        assert haproxy.runs(), haproxy.said()
    finally:
        haproxy.end()
