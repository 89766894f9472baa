"""Ports for heads that start side by side on one host, held by real processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cluster.errors import RequestError
from cluster.hosts.endpoints import free_port
from cluster.hosts.on_host.host_ports import HeadPlaces, HostPorts, choose_places

HOST = "127.9.9.7"


def ports_of(places: HeadPlaces) -> list[int]:
    servers = [port for _, port in places.servers.values()]
    return [places.gcs_port, places.client_port, *places.metrics, *servers]


def test_heads_that_choose_before_any_listens_get_other_ports() -> None:
    holders = [HostPorts() for _ in range(30)]
    try:
        chosen = [port for each in holders for port in ports_of(choose_places(each, HOST, {}, ()))]
        assert len(chosen) == len(set(chosen)) == 30 * 8
    finally:
        for each in holders:
            each.release()


def test_what_is_held_goes_with_its_process_and_no_sooner() -> None:
    port = free_port(HOST)
    program = (
        "from cluster.hosts.on_host.host_ports import HostPorts\n"
        f"ports = HostPorts(); print(ports.hold({HOST!r}, {port}), flush=True); input()"
    )
    ours = HostPorts()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as theirs:
        assert theirs.stdout is not None
        assert theirs.stdout.readline() == "True\n"
        assert not ours.hold(HOST, port)
        assert ours.hold("127.9.9.8", port), "another address is another place"
        theirs.kill()
    assert ours.hold(HOST, port)
    assert ours.hold(HOST, port), "one's own can be asked for again"
    ours.release()


def test_whoever_has_all_addresses_has_the_port_of_each() -> None:
    port, ours, theirs = free_port("0.0.0.0"), HostPorts(), HostPorts()
    assert ours.hold("0.0.0.0", port)
    assert not theirs.hold(HOST, port)
    ours.release()
    assert theirs.hold(HOST, port)
    assert not ours.hold("0.0.0.0", port)
    theirs.release()


def test_a_port_that_the_config_names_is_taken_or_refused_by_name() -> None:
    port, ports, others = free_port(HOST), HostPorts(), HostPorts()
    try:
        wanted = {"gateway": (HOST, port)}
        assert choose_places(ports, HOST, wanted, ()).servers["gateway"] == (HOST, port)
        with pytest.raises(RequestError, match=rf"cluster\.gateway\.port: {port} .*another cluster"):
            choose_places(others, HOST, wanted, ())
    finally:
        ports.release()
        others.release()


def test_servers_for_the_network_listen_at_the_host_and_all_others_on_loopback() -> None:
    ports = HostPorts()
    try:
        places = choose_places(ports, HOST, {"api": ("127.9.9.6", None)}, ("api", "dashboard"))
    finally:
        ports.release()
    hosts = {key: host for key, (host, _) in places.servers.items()}
    assert hosts == {
        "serve_proxy": "127.0.0.1",
        "gateway": "127.0.0.1",
        "api": "127.9.9.6",
        "dashboard": HOST,
    }
    with socket.socket() as listener:
        listener.bind(places.servers["api"])
