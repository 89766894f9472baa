"""The choice of loopback addresses: by example and by property."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import RequestError, ShoalError
from cluster.hosts.embedded.addresses import (
    FIRST_HOST,
    LAST_HOST,
    SUBNETS,
    choose_subnet,
    node_addresses,
    serve_proxy_address,
    subnet_of,
    subnets_of,
)

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,20}[a-z0-9])?", fullmatch=True)
ALL_SUBNETS = [f"127.{second}.{third}" for second in range(1, 255) for third in range(256)]


@given(NAMES)
@settings(deadline=None)
def test_every_address_is_loopback_and_none_is_in_127_0(name: str) -> None:
    for address in node_addresses(choose_subnet(name, ()), 245):
        assert ipaddress.ip_address(address).is_loopback
        assert ipaddress.ip_address(address) not in ipaddress.ip_network("127.0.0.0/16")


@given(NAMES, NAMES)
@settings(deadline=None)
def test_the_same_name_gets_the_same_subnet_and_a_second_cluster_another(one: str, two: str) -> None:
    first = choose_subnet(one, ())
    assert choose_subnet(one, ()) == first
    assert choose_subnet(two, {first}) != first


def test_the_last_free_subnet_is_found_from_anywhere() -> None:
    for free in (ALL_SUBNETS[0], ALL_SUBNETS[-1], "127.80.13"):
        assert choose_subnet("demo", set(ALL_SUBNETS) - {free}) == free


def test_no_free_subnet_is_a_sentence() -> None:
    assert len(ALL_SUBNETS) == SUBNETS
    with pytest.raises(ShoalError, match="no loopback subnet is free"):
        choose_subnet("demo", set(ALL_SUBNETS))


def test_the_head_is_10_and_the_others_follow() -> None:
    assert node_addresses("127.7.8", 3) == ["127.7.8.10", "127.7.8.11", "127.7.8.12"]


def test_more_nodes_than_a_subnet_holds_are_refused() -> None:
    assert node_addresses("127.7.8", 245)[-1] == "127.7.8.254"
    with pytest.raises(RequestError, match="at most 245"):
        node_addresses("127.7.8", 246)


def test_only_loopback_addresses_outside_127_0_count_as_a_subnet_in_use() -> None:
    assert subnet_of("127.3.4.10") == "127.3.4"
    assert subnet_of("::ffff:127.3.4.10") == "127.3.4"
    assert subnets_of(["127.0.0.1", "127.0.0.53", "10.1.2.3", "::1", "0.0.0.0", "127.3.4.10"]) == {"127.3.4"}


def test_serves_proxy_has_an_address_of_the_cluster_that_no_node_has() -> None:
    assert serve_proxy_address("127.7.8") not in node_addresses("127.7.8", LAST_HOST - FIRST_HOST + 1)
    assert serve_proxy_address("127.7.8") != serve_proxy_address("127.7.9")
