"""Keys: who gets in, to what, how often; and that nothing tells a key."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import tracemalloc
from functools import partial
from typing import Any

import httpx
import pytest

from cluster.config.reading.api_keys import PREFIX, Key, KeyRing, digest_of, new_key, parse_keys
from cluster.errors import RequestError
from serve_apps.gateway import reckoning
from serve_apps.gateway.access import Access
from serve_apps.quotas import limits_private, token_budget
from serve_apps.quotas.token_budget import TokenBudgets
from tests.pace import loops
from tests.serve_apps.stub_gateway import StubGateway, until

KEY = new_key()
BODY = {"model": "chat", "prompt": "a b", "max_tokens": 3}


def ring(**options: Any) -> KeyRing:
    return KeyRing(
        [
            Key(sha256=digest_of("sk-other"), tenant="other"),
            Key(sha256=digest_of(KEY), tenant="ours", **options),
        ]
    )


def ask(
    gateway: StubGateway, *requests: tuple[str, dict[str, Any] | None, str | None]
) -> list[httpx.Response]:
    """The answers to (path, body, Authorization) one after the other; without a body it is a GET."""

    async def go() -> list[httpx.Response]:
        answers = []
        async with gateway.client() as http:
            for path, body, authorization in requests:
                headers = {} if authorization is None else {"authorization": authorization}
                if body is None:
                    answers.append(await http.get(path, headers=headers))
                else:
                    answers.append(await http.post(path, json=body, headers=headers))
        return answers

    return asyncio.run(go())


def test_keys_are_long_new_each_time_and_known_by_their_digest() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) > 40 for key in keys)
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        pytest.param(f"Basic {KEY}", id="another scheme"),
        pytest.param(KEY, id="no scheme"),
        pytest.param(f"Bearer {KEY}x", id="too long"),
        pytest.param(f"Bearer {KEY[:-1]}", id="too short"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize"])
def test_who_has_no_key_gets_nothing(path: str, authorization: str | None) -> None:
    gateway = StubGateway(ring())
    (answer,) = ask(gateway, (path, None if path == "/v1/models" else BODY, authorization))
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.text
    assert not gateway.backend.requests


def test_a_key_opens_the_apps_it_names() -> None:
    for apps, status, shown in (((), 404, []), (("chat", "x"), 200, ["chat"]), (None, 200, ["chat"])):
        gateway = StubGateway(ring(apps=apps))
        bearer = f"Bearer {KEY}"
        answer, models, model, unknown = ask(
            gateway,
            ("/v1/completions", BODY, bearer),
            ("/v1/models", None, bearer),
            ("/v1/models/chat", None, bearer),
            ("/v1/completions", {**BODY, "model": "nobody"}, bearer),
        )
        assert answer.status_code == status
        assert [card["id"] for card in models.json()["data"]] == shown
        assert model.status_code == (200 if shown else 404)
        assert unknown.status_code == 404
        assert ("chat" in unknown.text) == bool(shown)


def test_more_requests_than_a_minute_holds_are_refused_until_it_is_over() -> None:
    gateway = StubGateway(ring(requests_per_minute=2))
    answers = ask(
        gateway,
        *[("/v1/completions", BODY, f"Bearer {KEY}")] * 3,
        ("/v1/completions", BODY, "Bearer sk-other"),
    )
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    refused = answers[2]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert len(gateway.backend.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompts_and_answers_use_up_the_minute(stream: bool) -> None:
    # Two tokens of the prompt and three of the answer.
    gateway = StubGateway(ring(tokens_per_minute=8))
    request = ("/v1/completions", {**BODY, "stream": stream}, f"Bearer {KEY}")
    assert [answer.status_code for answer in ask(gateway, *[request] * 3)] == [200, 200, 429]


def test_the_wall_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = StubGateway(ring(requests_per_minute=2))
    request = ("/v1/completions", BODY, f"Bearer {KEY}")
    assert [answer.status_code for answer in ask(gateway, request, request)] == [200, 200]
    for jump in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda jump=jump, now=time.time: now() + jump)
        (answer,) = ask(gateway, request)
        assert (answer.status_code, 1 <= int(answer.headers["retry-after"]) <= 60) == (429, True)


def test_a_minute_passes_by_the_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, passed = StubGateway(ring(requests_per_minute=2)), 0.0
    steady = time.monotonic
    monkeypatch.setattr(limits_private._STEADY, "time", lambda: steady() + passed)
    request = ("/v1/completions", BODY, f"Bearer {KEY}")
    assert [answer.status_code for answer in ask(gateway, *[request] * 3)] == [200, 200, 429]
    passed = 121.0
    assert [answer.status_code for answer in ask(gateway, request)] == [200]


def test_what_is_counted_costs_the_same_however_much_it_is() -> None:
    def spent(tokens: int) -> tuple[float, int]:
        """The loops that two hundred requests cost, and the bytes that are kept of twenty."""
        access = Access(ring(tokens_per_minute=10**9, requests_per_minute=10**9))
        caller = access.caller(f"Bearer {KEY}")

        async def ask(times: int) -> None:
            for _ in range(times):
                (await access.admit(caller, lambda: tokens)).settle(tokens)

        with asyncio.Runner() as runner:
            tracemalloc.start()
            runner.run(ask(20))
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            return loops(lambda: runner.run(ask(200))), kept

    few, many = spent(1), spent(1_000_000)
    assert many[1] < few[1] + 10_000
    assert many[0] < 3 * few[0] + 1
    assert many[0] < 7  # 1 ms each


def test_many_at_once_cannot_take_much_more_than_the_limit() -> None:
    """Each of ten may take 100 tokens of 250: those of requests that run count as spent."""
    assert 2 <= statuses_at_once(10, 250, {"max_tokens": 32, "n": 3}).count(200) <= 3


def test_what_many_took_beyond_the_limit_is_paid_off_before_anybody_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that name no length are expected to take one token here, and take 3 and 20 of the prompt."""
    monkeypatch.setattr(reckoning, "USUAL_ANSWER_TOKENS", 1)
    passed = 0.0
    gateway = StubGateway(ring(tokens_per_minute=60), queue=100)
    gateway.service.access._limits._budgets = TokenBudgets(lambda: passed)
    prompt: dict[str, Any] = {"model": "chat", "prompt": [1] * 20}
    assert statuses_at_once(10, 60, prompt, gateway) == [200] * 3 + [429] * 7
    # 69 are taken: 9 are owed, one a second.
    (early,) = ask(gateway, ("/v1/completions", prompt, f"Bearer {KEY}"))
    assert (early.status_code, 9 <= int(early.headers["retry-after"]) <= 10) == (429, True)
    passed = 8.9
    assert ask(gateway, ("/v1/completions", prompt, f"Bearer {KEY}"))[0].status_code == 429
    passed = 9.1
    assert ask(gateway, ("/v1/completions", prompt, f"Bearer {KEY}"))[0].status_code == 200


def statuses_at_once(
    number: int, limit: int, body: dict[str, Any], gateway: StubGateway | None = None
) -> list[int]:
    """The statuses of requests that are sent while none of them can end, in their order."""

    async def go(gateway: StubGateway) -> list[int]:
        gateway.backend.gate.clear()
        headers = {"authorization": f"Bearer {KEY}"}
        async with gateway.client() as http:
            asks = [
                asyncio.create_task(http.post("/v1/completions", json={**BODY, **body}, headers=headers))
                for _ in range(number)
            ]
            await until(lambda: sum(task.done() for task in asks) >= number - 3)
            gateway.backend.gate.set()
            return [(await task).status_code for task in asks]

    return asyncio.run(go(gateway or StubGateway(ring(tokens_per_minute=limit), max_tokens=200, queue=100)))


def test_what_a_request_takes_beyond_what_was_expected_counts_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reckoning, "USUAL_ANSWER_TOKENS", 1)

    async def go() -> list[int]:
        gateway = StubGateway(ring(tokens_per_minute=30), queue=100)
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 30
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"model": "chat", "prompt": "a", "min_tokens": 31, "stream": True}
        monkeypatch.setattr(gateway.backend, "generate", partial(long_answer, gateway.backend.generate))
        async with gateway.client() as http:
            first = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
            budget = gateway.service.access._limits._budgets.find("ours", 30)
            await until(lambda: [one.taken() for one in budget._running] == [31])
            monkeypatch.setattr(token_budget, "RECOUNT_S", 0.0)
            second = await http.post("/v1/completions", json=BODY, headers=headers)
            gateway.backend.gate.set()
            return [(await first).status_code, second.status_code]

    assert asyncio.run(go()) == [200, 429]


def long_answer(generate: Any, application: str, request: dict[str, Any]) -> Any:
    return generate(application, {**request, "max_tokens": 31})


def test_room_that_was_kept_is_given_back_however_a_request_ends() -> None:
    gateway = StubGateway(ring(tokens_per_minute=10**6), queue=1)
    bearer = f"Bearer {KEY}"
    ask(
        gateway,
        ("/v1/completions", BODY, bearer),
        ("/v1/completions", {**BODY, "stream": True}, bearer),
        ("/v1/completions", {**BODY, "n": 100}, bearer),
        ("/v1/completions", {**BODY, "prompt": "a " * 100}, bearer),
        ("/v1/embeddings", {"model": "chat", "input": "a b"}, bearer),
        ("/v1/embeddings", {"model": "chat", "input": [list(range(100))]}, bearer),
        ("/tokenize", {"model": "chat"}, bearer),
    )
    budgets = gateway.service.access._limits._budgets
    assert len(budgets) == 1
    assert not budgets.find("ours", 10**6)._running


def test_nobody_is_told_that_a_key_is_wrong_before_the_keys_are_known() -> None:
    gateway = StubGateway(KeyRing(()))
    request = ("/v1/completions", BODY, f"Bearer {KEY}")
    gateway.service.access.waits_for_keys = True
    (early,) = ask(gateway, request)
    assert early.status_code == 503
    assert "retry-after" in early.headers
    gateway.service.access.keys, gateway.service.access.waits_for_keys = ring(), False
    assert ask(gateway, request)[0].status_code == 200


def test_wrong_requests_use_up_nothing() -> None:
    gateway = StubGateway(ring(requests_per_minute=1))
    wrong = ("/v1/completions", {**BODY, "max_tokens": -1}, f"Bearer {KEY}")
    right = ("/v1/completions", BODY, f"Bearer {KEY}")
    assert [answer.status_code for answer in ask(gateway, wrong, wrong, right)] == [400, 400, 200]


def test_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(
        StubGateway(ring()),
        ("/v1/completions", BODY, f"Bearer {KEY}"),
        ("/v1/models", None, "Bearer wrong-key"),
    )
    assert KEY not in caplog.text
    assert "wrong-key" not in caplog.text


def test_a_key_file_is_a_list_of_entries() -> None:
    text = f"- {{sha256: {digest_of('a')}, tenant: one, apps: [chat], requests_per_minute: 5}}\n"
    keys = parse_keys(text, "keys.yaml")
    found = keys.find("Bearer a")
    assert found is not None
    assert (found.tenant, found.apps, found.requests_per_minute) == ("one", ("chat",), 5)
    entry = [{"sha256": digest_of("b"), "tenant": "two"}]
    assert len(parse_keys(json.dumps(entry), "env:KEYS")) == 1
    assert len(parse_keys("", "keys.yaml")) == 0


@pytest.mark.parametrize(
    "text",
    [
        "- [",
        "tenant: one",
        "- {tenant: one}",
        "- {sha256: sk-shoal-a-key-in-plain-text, tenant: one}",
        "- {sha256: SHA, tenant: ''}",
        "- {sha256: SHA, tenant: one, requests_per_minute: 0}",
        "- {sha256: SHA, tenant: one, request_per_minute: 5}",
        "- {sha256: SHA, tenant: one, apps: chat}",
    ],
)
def test_a_wrong_key_file_is_refused_without_its_content(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_keys(text.replace("SHA", digest_of("a")), "keys.yaml")
    assert str(refused.value).startswith("keys.yaml")
    assert "sk-shoal" not in str(refused.value)
    assert digest_of("a") not in str(refused.value)
