"""The choice of ports, against real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.sections.cluster import EndpointConfig
from cluster.errors import RequestError
from cluster.hosts.embedded.sockets import addresses_in_use
from cluster.hosts.endpoints import choose_endpoint, free_port, free_ports

HOST = "127.9.9.9"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_usual_port_is_taken_when_it_is_free() -> None:
    port = free_port(HOST)
    assert choose_endpoint("dashboard", EndpointConfig(), HOST, port, ()) == (HOST, port)


def test_another_port_is_found_when_the_usual_one_is_in_use(taken_port: int) -> None:
    host, port = choose_endpoint("dashboard", EndpointConfig(), HOST, taken_port, ())
    assert (host, port) != (HOST, taken_port)
    with socket.socket() as listener:
        listener.bind((host, port))


def test_a_configured_port_that_is_in_use_is_refused_by_name(taken_port: int) -> None:
    with pytest.raises(RequestError, match=rf"cluster\.gateway\.port: {taken_port} on {HOST} is taken"):
        choose_endpoint("gateway", EndpointConfig(port=taken_port), HOST, 8000, ())


def test_a_server_on_all_interfaces_takes_the_port_of_every_address() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert choose_endpoint("dashboard", EndpointConfig(), HOST, port, ())[1] != port


def test_what_another_cluster_has_reserved_counts_as_taken() -> None:
    port = free_port("0.0.0.0")
    assert choose_endpoint("gateway", EndpointConfig(), HOST, port, {("0.0.0.0", port)})[1] != port
    assert choose_endpoint("gateway", EndpointConfig(), HOST, port, {("127.9.9.8", port)})[1] == port
    with pytest.raises(RequestError, match="belongs to another cluster"):
        choose_endpoint("gateway", EndpointConfig(host="0.0.0.0", port=port), HOST, 1, {("127.9.9.8", port)})


def test_a_free_port_is_none_that_is_reserved() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    reserved = {("0.0.0.0", port) for port in range(first, last + 1) if port // 100 % 10}
    assert {free_port(HOST, reserved) // 100 % 10 for _ in range(10)} == {0}


def test_no_two_free_ports_are_the_same() -> None:
    ports = free_ports(["0.0.0.0", HOST] * 400)  # drawn one by one, some two of so many would be
    assert len(set(ports)) == 800


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(RequestError, match=r"cluster\.dashboard\.host: .* is not an address"):
        choose_endpoint("dashboard", EndpointConfig(host=host), HOST, 8265, ())


def test_listening_addresses_are_seen_whoever_listens(taken_port: int) -> None:
    assert taken_port
    assert HOST in addresses_in_use()
