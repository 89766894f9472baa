"""An error that its client cannot mend says where whoever runs the cluster finds out why."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from cluster.wording import logs_of
from infra.cli.logs import logs as command
from serve_apps.tokens.inbox import Item
from tests.serve_apps.stub_gateway import StubBackend, StubGateway

BODY = {"model": "chat", "prompt": "a", "max_tokens": 3}


class Broken(StubBackend):
    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        raise RuntimeError("a mistake of ours")
        yield {}


def told(gateway: StubGateway, request_id: str, **more: Any) -> str:
    """The message of the error."""

    async def go() -> str:
        async with gateway.client() as http:
            answer = await http.post(
                "/v1/completions", json={**BODY, **more}, headers={"x-request-id": request_id}
            )
            assert answer.headers["x-request-id"] == request_id
            message: str = answer.json()["error"]["message"]
            return message

    return asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_a_mistake_of_the_gateways_names_the_command_and_the_request(stream: bool) -> None:
    gateway = StubGateway()
    gateway.service.backend = Broken()
    assert told(gateway, "r-1", stream=stream) == (
        "The gateway failed; `shoal logs gateway --request r-1` says why."
    )


def test_engines_that_broke_name_the_app_and_the_request_as_its_client_knows_it() -> None:
    gateway = StubGateway()
    gateway.backend.script, gateway.backend.breaks = [0, 0], True
    assert "`shoal logs chat --request 'my request'` says what broke" in told(gateway, "my request")


def test_the_command_can_be_pasted_into_a_shell() -> None:
    line = logs_of("chat", request="a'b; rm -rf $HOME", replica="x")
    assert shlex.split(line.strip("`")) == [
        *("shoal", "logs", "chat", "--request", "a'b; rm -rf $HOME", "--replica", "x"),
    ]
    assert {"replica", "request"} <= command.__annotations__.keys(), "options that there are"
