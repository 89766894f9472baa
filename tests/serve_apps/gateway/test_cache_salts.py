"""Tenants share no prefix cache: what replicas are told sets their requests apart, and they are routed so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.reading.api_keys import Key, KeyRing, digest_of
from serve_apps.engine.torch_engine.block_pool import Digests, digest, start_of
from serve_apps.routing import serve_router
from serve_apps.routing.policy import LOOKED_AT
from serve_apps.routing.prefix import PIECE, Prefix
from tests.serve_apps.stub_gateway import StubGateway

COMPLETION = ("/v1/completions", {"prompt": "a b", "n": 2})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]})


def ring() -> KeyRing:
    keys = {"sk-a1": "a", "sk-a2": "a", "sk-b": "b"}
    return KeyRing([Key(sha256=digest_of(key), tenant=tenant) for key, tenant in keys.items()])


def salt(gateway: StubGateway, key: str | None = None, to: Any = COMPLETION, **more: Any) -> str | None:
    """What all requests to replicas have that answer one of a client's."""

    async def go() -> int:
        async with gateway.client() as http:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            path, body = to
            body = {**body, **more, "model": "chat", "max_tokens": 2}
            return (await http.post(path, json=body, headers=headers)).status_code

    gateway.backend.requests.clear()
    assert asyncio.run(go()) == 200
    (one,) = {request.get("cache_salt") for request in gateway.backend.requests}
    return one


def test_each_tenant_has_a_salt_of_its_own_and_its_keys_share_it() -> None:
    gateway = StubGateway(ring())
    a, same, chat, b = (
        salt(gateway, "sk-a1"),
        salt(gateway, "sk-a2"),
        salt(gateway, "sk-a1", CHAT),
        salt(gateway, "sk-b"),
    )
    assert a is not None
    assert a == same == chat
    assert b not in (None, a)


def test_a_client_sets_its_own_requests_apart_and_gets_into_no_other_tenants() -> None:
    gateway = StubGateway(ring())
    plain = salt(gateway, "sk-b")
    assert plain is not None
    own = salt(gateway, "sk-a1", cache_salt="x")
    assert own == salt(gateway, "sk-a2", CHAT, cache_salt="x")
    others = [
        salt(gateway, "sk-a1", cache_salt=given) for given in (plain, "b", "y", '["b", null]', "x" * 200)
    ]
    known = [plain, own, salt(gateway, "sk-a1"), salt(gateway, "sk-b", cache_salt="x"), *others]
    assert len(set(known)) == len(known)
    # vLLM takes at most 128 characters, and not all of them.
    assert all(each is not None and each.isalnum() and len(each) == 32 for each in known)


def test_without_keys_there_is_a_salt_only_where_a_client_names_one() -> None:
    gateway = StubGateway()
    assert salt(gateway) is None
    assert salt(gateway, to=CHAT, cache_salt=None) is None
    assert salt(gateway, cache_salt="x") == salt(gateway, to=CHAT, cache_salt="x") is not None


@pytest.mark.parametrize("given", ["", 5, ["x"]])
def test_a_salt_is_text(given: object) -> None:
    async def go() -> Any:
        async with StubGateway().client() as http:
            return await http.post(
                "/v1/completions", json={"model": "chat", "prompt": "a", "cache_salt": given}
            )

    answer = asyncio.run(go())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


def test_no_salt_leads_to_the_blocks_of_another() -> None:
    tokens = list(range(32))
    known = Digests(16).upto(tokens, 32)
    # A digest as a salt would go on where another's block ends.
    for given in ("a", "b", known[0].decode("latin-1"), "\ud800"):
        assert not set(Digests(16, start_of(given)).upto(tokens, 32)) & set(known)
    assert Digests(16, start_of("")).upto(tokens, 32) == known
    assert digest(start_of("a"), tokens[:16]) == Digests(16, start_of("a")).upto(tokens, 16)[0]


@pytest.mark.parametrize(
    "prompt", ["x" * 200, list(range(200)), "x" * (2 * LOOKED_AT)], ids=["text", "ids", "long"]
)
def test_a_tenants_prompts_go_where_its_own_cache_is(prompt: Any) -> None:
    policy = Prefix[str]()

    def route(cache_salt: str | None) -> str:
        request = {"prompt": prompt, **({"cache_salt": cache_salt} if cache_salt else {})}
        looked_at = serve_router._prompt_of(SimpleNamespace(args=[request]))  # type: ignore[arg-type]
        assert len(looked_at) <= max(len(prompt), LOOKED_AT + PIECE)
        chosen = policy.order(["one", "two"], looked_at)[0]
        policy.sent(chosen)
        policy.routed(chosen, "id", 0.0, looked_at)
        policy.completed(chosen, "id", 1.0)
        return chosen

    salts = [None, *(f"{tenant:032x}" for tenant in range(20))]
    homes = {salt: route(salt) for salt in salts}
    assert set(homes.values()) == {"one", "two"}, "tenants who ask alike are told apart"
    assert {salt: route(salt) for salt in reversed(salts)} == homes
