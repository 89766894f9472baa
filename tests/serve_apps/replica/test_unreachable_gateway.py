"""A replica that has no way to the gateway says so before it generates anything."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from types import SimpleNamespace

import pytest

from serve_apps.openai.errors import ApiError
from serve_apps.replica.engine_host import EngineHost
from serve_apps.replica.gateway_calls import GatewayCalls
from serve_apps.tokens import stream
from serve_apps.tokens.stream import StreamAddress, TokenReceiver

HOST = "127.0.0.1"


async def refused(address: StreamAddress) -> ApiError:
    replica = EngineHost("chat#1", "10.0.0.7")  # without an engine: it must not come so far
    replica.revision = 1
    replica.spec = SimpleNamespace(name="chat", model_version="tiny@1")  # type: ignore[assignment]
    replica._gateways = GatewayCalls(lambda keys: None)
    try:
        request = {"request_id": "r-0a1b2c3d-0", "prompt": "a", "streamed": True}
        answer = await replica.generate(request, address.as_json())
    finally:
        replica._gateways.stop()
    assert answer["start"]["replica"] == "chat#1"
    return ApiError.from_item(answer)


def test_both_ends_are_named_and_another_replica_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CONNECT_S", 0.3)

    async def go() -> tuple[ApiError, str]:
        receiver = TokenReceiver(HOST)
        try:
            # Connections are taken by the system, and nobody answers them: as behind a firewall that drops.
            with socket.create_server((HOST, 0)) as silent:
                endpoint = f"tcp://{HOST}:{silent.getsockname()[1]}"
                return await refused(dataclasses.replace(receiver.address, endpoint=endpoint)), endpoint
        finally:
            receiver.stop()

    error, endpoint = asyncio.run(go())
    assert (error.status, error.code, error.retry_elsewhere) == (503, "gateway_unreachable", True)
    assert "10.0.0.7" in error.message
    assert endpoint in error.message
    assert "cluster.gateway.token_ports" in error.message
