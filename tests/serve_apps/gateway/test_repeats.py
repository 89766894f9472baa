"""Which requests are looked for with the replicas, since they may have been sent before."""

from __future__ import annotations

from random import Random

import pytest

from serve_apps.gateway.repeats import LATE_S, WAIT_S, Once, Repeats
from serve_apps.openai.errors import ApiError

PATH, BODY = "/v1/completions", b"{}"


def once(repeats: Repeats, way_s: float, now: float = 1000.0, offset_s: float = 0.0) -> Once:
    """Of a request that the front sent so long ago, by a clock that is wrong by so much."""
    found = repeats.once({}, ("id", now - way_s + offset_s), "ann", PATH, BODY, now)
    assert found is not None
    return found


def test_a_request_without_a_key_and_a_front_may_be_generated_twice() -> None:
    assert Repeats().once({}, None, "ann", PATH, BODY, 0.0) is None


def test_of_a_stream_that_nobody_can_ask_for_again_nothing_is_kept() -> None:
    assert Repeats().once({}, ("id", 0.0), "ann", PATH, BODY, 0.0, streamed=True) is None
    assert Repeats().once({"idempotency-key": "k"}, None, "ann", PATH, BODY, 0.0, streamed=True) is not None


@pytest.mark.parametrize("offset_s", [0.0, 3600.0, -3600.0])
def test_what_the_front_sends_again_is_late_beside_others_whatever_the_clocks_say(offset_s: float) -> None:
    chance, repeats = Random(1), Repeats()
    for _ in range(300):
        assert once(repeats, chance.uniform(0.001, LATE_S / 2), offset_s=offset_s).wait_s is None
    assert once(repeats, 2.0, offset_s=offset_s).wait_s == WAIT_S
    assert once(repeats, 0.002, offset_s=offset_s).wait_s is None


def test_the_first_requests_of_a_gateway_beside_its_front_are_told_apart() -> None:
    assert once(Repeats(), 3.0).wait_s is None
    assert once(Repeats(beside_front=True), 3.0).wait_s == WAIT_S
    assert once(Repeats(beside_front=True), LATE_S / 2).wait_s is None


def test_a_clock_that_is_set_is_followed() -> None:
    repeats = Repeats()
    for _ in range(300):
        once(repeats, 0.002)
    looked_for = sum(once(repeats, 0.002, offset_s=-5.0).wait_s is not None for _ in range(300))
    assert looked_for <= 260
    assert once(repeats, 0.002, offset_s=-5.0).wait_s is None


def test_a_clients_key_is_looked_for_at_once_and_longer_where_it_says_that_it_tries_again() -> None:
    repeats, key = Repeats(), {"idempotency-key": "k"}
    first = repeats.once(key, None, "ann", PATH, BODY, 0.0)
    again = repeats.once({**key, "x-stainless-retry-count": "1"}, None, "ann", PATH, BODY, 0.0)
    assert first is not None
    assert again is not None
    assert (first.wait_s, again.wait_s) == (0.0, WAIT_S)
    assert first.key == again.key
    assert repeats.once({**key, "x-stainless-retry-count": "0"}, None, "ann", PATH, BODY, 0.0) == first


def test_nobody_gets_what_another_has_asked_for() -> None:
    def key_of(tenant: str, key: str, path: str = PATH, body: bytes = BODY) -> Once:
        found = Repeats().once({"idempotency-key": key}, None, tenant, path, body, 0.0)
        assert found is not None
        return found

    mine = key_of("ann", "k")
    assert key_of("bob", "k").key != mine.key
    assert key_of("ann", "l").key != mine.key
    front = Repeats().once({}, ("k", 0.0), "ann", PATH, BODY, 0.0)
    assert front is not None
    assert front.key != mine.key
    for other in (key_of("ann", "k", body=b"[]"), key_of("ann", "k", path="/v1/chat/completions")):
        assert other.key == mine.key
        assert other.body != mine.body


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_what_can_be_no_key_is_refused(key: str) -> None:
    with pytest.raises(ApiError) as caught:
        Repeats().once({"idempotency-key": key}, None, "ann", PATH, BODY, 0.0)
    assert caught.value.status == 400
