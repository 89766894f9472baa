"""What the gateway says of itself, and to whom: nobody without a key learns the names of apps or tenants."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

import httpx
import pytest

from cluster.config.reading.api_keys import Key, KeyRing, digest_of
from serve_apps.gateway.access import Access
from serve_apps.gateway.options import GatewayOptions
from serve_apps.openai.errors import ApiError
from tests.serve_apps.stub_gateway import RawRequest, StubGateway, until

OF_CHAT, OF_OTHER, OF_ALL, SCRAPER = (f"sk-{name}" for name in ("chat", "other", "all", "scraper"))
SECRETS = ("chat", "warming", "tiny", "research", "web")
"""The names of apps, models and tenants in these tests."""


def ring() -> KeyRing:
    return KeyRing(
        [
            Key(sha256=digest_of(OF_CHAT), tenant="research", apps=("chat",)),
            Key(sha256=digest_of(OF_OTHER), tenant="web", apps=("other",)),
            Key(sha256=digest_of(OF_ALL), tenant="web"),
            Key(sha256=digest_of(SCRAPER), tenant="ops", apps=(), metrics=True),
        ]
    )


def get(
    gateway: StubGateway, path: str, key: str | None = None, *, address: str = "203.0.113.9", **headers: str
) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(gateway.api, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            given = {} if key is None else {"authorization": f"Bearer {key}"}
            return await http.get(path, headers={**given, **headers})

    return asyncio.run(go())


def names_in(answer: httpx.Response) -> set[str]:
    told = answer.text + str(answer.headers)
    return {name for name in SECRETS if name in told}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ping", "/ready", "/metrics", "/version", "/load", "/apps"]
)
@pytest.mark.parametrize("key", [None, "sk-wrong"])
@pytest.mark.parametrize("warming", [False, True])
def test_who_shows_no_known_key_learns_no_name(path: str, key: str | None, warming: bool) -> None:
    gateway = StubGateway(ring())
    if not warming:
        gateway.service.table = type(gateway.table)(gateway.table.versions)
    asyncio.run(_answered(gateway, OF_CHAT))
    answer = get(gateway, path, key)
    assert names_in(answer) == set()
    status = {"/": 404, "/ready": 503 if warming else 200, "/metrics": 401, "/load": 401, "/apps": 401}
    assert answer.status_code == status.get(path, 200)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/chat", "/openapi.json"])
def test_the_rest_names_nothing_either(path: str) -> None:
    assert names_in(get(StubGateway(ring()), path)) - {"chat"} == set()  # /v1/chat/completions


async def _answered(gateway: StubGateway, key: str) -> None:
    async with gateway.client() as http:
        body = {"model": "chat", "prompt": "a", "max_tokens": 1}
        answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


def test_readiness_is_of_the_apps_that_a_key_opens() -> None:
    gateway = StubGateway(ring())
    ready = get(gateway, "/ready", OF_CHAT)
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "apps": ["chat"]})
    assert get(gateway, "/ready", OF_OTHER).json() == {"status": "ready", "apps": []}
    waiting = get(gateway, "/ready", OF_ALL)
    assert (waiting.status_code, waiting.json()["waiting_for"]) == (503, ["warming"])
    nameless = get(gateway, "/ready")
    assert (nameless.status_code, nameless.headers["retry-after"]) == (503, "1")
    assert nameless.json().keys() == {"error"}


def test_without_keys_everything_is_told() -> None:
    gateway = StubGateway()
    gateway.service.table = type(gateway.table)(gateway.table.versions)
    assert get(gateway, "/ready").json() == {"status": "ready", "apps": ["chat"]}
    assert 'shoal_app_replicas{app="chat"' not in get(gateway, "/ready").text
    assert get(gateway, "/metrics").status_code == get(gateway, "/load").status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/load"])
def test_figures_are_for_marked_keys(path: str) -> None:
    gateway = StubGateway(ring())
    assert get(gateway, path, SCRAPER).status_code == 200
    missing = get(gateway, path)
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert "metrics_from" in missing.json()["error"]["message"]
    unmarked = get(gateway, path, OF_ALL)
    assert (unmarked.status_code, unmarked.json()["error"]["code"]) == (403, "key_without_metrics")
    # Such a key opens no app by that.
    assert get(gateway, "/v1/models", SCRAPER).json()["data"] == []


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("10.1.2.3", 200),
        ("::ffff:10.1.2.3", 200),
        ("fd00::7", 200),
        ("11.0.0.1", 401),
        ("127.0.0.1", 401),
        ("::1", 401),
        ("a-socket", 401),
    ],
)
def test_figures_may_be_read_from_addresses_that_the_config_names(address: str, status: int) -> None:
    options = GatewayOptions.from_json({"metrics_from": ["10.0.0.0/8", "fd00::7"]})
    assert options.metrics_from == (ip_network("10.0.0.0/8"), ip_network("fd00::7/128"))
    gateway = StubGateway(ring(), options)
    # What a client writes into its headers is no address.
    answer = get(
        gateway, "/metrics", address=address, **{"x-forwarded-for": "10.0.0.1", "forwarded": "for=10.0.0.1"}
    )
    assert answer.status_code == status


def test_the_clusters_own_token_opens_figures_and_names_every_app() -> None:
    access = Access(ring(), "token-of-cluster")
    access.observer("Bearer token-of-cluster", None)
    assert access.anyone("Bearer token-of-cluster").sees("warming")
    for wrong in ("Bearer None", "token-of-cluster", ""):
        assert not access.anyone(wrong).sees("warming")
        with pytest.raises(ApiError) as refused:
            access.observer(wrong, None)
        assert refused.value.status == 401
    with pytest.raises(ApiError):
        Access(ring(), None).observer("Bearer None", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_no_answer_tells_whether_there_is_an_app_that_a_key_does_not_open(
    path: str, body: Mapping[str, Any]
) -> None:
    """One that runs, one that starts, and none at all are refused in the same words."""
    gateway = StubGateway(ring())

    async def go() -> list[httpx.Response]:
        async with gateway.client() as http:
            headers = {"authorization": f"Bearer {OF_OTHER}"}
            posts = [
                await http.post(path, json={**body, "model": name}, headers=headers)
                for name in ("chat", "warming", "nobody")
            ]
            gets = [
                await http.get(f"/v1/models/{name}", headers=headers)
                for name in ("chat", "warming", "nobody")
            ]
        return [*posts, *gets]

    answers = asyncio.run(go())
    assert {answer.status_code for answer in answers} == {404}
    said = {
        json.dumps(answer.json()).replace(name, "NAME")
        for answer, name in zip(answers, ["chat", "warming", "nobody"] * 2, strict=True)
    }
    assert len(said) == 1, said


def test_the_version_and_a_ping() -> None:
    gateway = StubGateway()

    async def go() -> None:
        async with gateway.client() as http:
            assert (await http.get("/version")).json() == {"version": importlib.metadata.version("shoal")}
            for method in ("GET", "POST", "HEAD"):
                answer = await http.request(method, "/ping")
                assert (answer.status_code, answer.content) == (200, b"")
            assert (await http.post("/ping", content=b"{}")).status_code == 200

    asyncio.run(go())


def test_the_load_is_the_requests_in_flight_however_they_end() -> None:
    gateway = StubGateway()

    async def load() -> int:
        async with gateway.client() as http:
            answer: int = (await http.get("/load")).json()["server_load"]
            return answer

    async def go() -> None:
        assert await load() == 0
        gateway.backend.gate.clear()
        body = {"model": "chat", "prompt": "a", "max_tokens": 2}
        held = [
            RawRequest(gateway.api, "/v1/completions", {**body, "stream": stream}) for stream in (True, False)
        ]
        await until(lambda: gateway.backend.running == 2)
        assert await load() == 2
        held[0].go_away()
        await held[0].task
        assert await load() == 1
        gateway.backend.gate.set()
        await held[1].task
        assert await load() == 0
        async with gateway.client() as http:
            await http.post("/v1/completions", content=b"{")
        assert await load() == 0

    asyncio.run(go())
