"""The host of a gateway loses its power: nobody tells the front, and its connections stay as they are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from cluster.hosts.endpoints import free_port
from infra.lab.hosts import network
from infra.lab.hosts.network import Network
from serve_apps.front.haproxy import Haproxy
from serve_apps.front.haproxy_config import FrontSettings, haproxy_config
from serve_apps.front.slots import Slots
from tests.serve_apps.front.small_gateway import GATEWAY, until_it_answers

pytestmark = pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))


@contextmanager
def gateway(lan: Network, host: int, after_s: float) -> Iterator[subprocess.Popen[bytes]]:
    address = lan.address(host)
    command = ["ip", "netns", "exec", lan.namespace(host), sys.executable, "-c", GATEWAY]
    process = subprocess.Popen(
        [*command, address, "8000", address, str(after_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        until_it_answers(f"http://{address}:8000")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "cut", ["before it is asked", pytest.param("while it answers", marks=pytest.mark.slow)]
)
def test_a_request_at_a_host_that_is_gone_is_answered_by_another(cut: str) -> None:
    with Network(2) as lan, gateway(lan, 1, 60.0) as lost, gateway(lan, 2, 0.0):
        port, haproxy, slots = free_port("127.0.0.1"), Haproxy(), Slots(2)
        urls = [f"http://{lan.address(host)}:8000" for host in (1, 2)]
        slots.change(urls[:1])
        settings = FrontSettings("127.0.0.1", port, "secret", connections=100)
        answers = list[httpx.Response]()

        def ask() -> None:
            url = f"http://127.0.0.1:{port}/v1/completions"
            answers.append(httpx.post(url, json={}, timeout=30, trust_env=False))

        try:
            haproxy.go_by(haproxy_config(settings, slots.servers(), str(haproxy.directory)))
            asking = threading.Thread(target=ask)
            if cut == "before it is asked":
                lan.unplug(1)
            asking.start()
            if cut == "while it answers":
                assert lost.stdout is not None
                assert lost.stdout.readline() == b"asked\n"
                lan.unplug(1)
            began = time.monotonic()
            haproxy.tell(slots.change(urls))
            asking.join()
            took_s = time.monotonic() - began
        finally:
            haproxy.end()
        assert (answers[0].status_code, answers[0].text) == (200, lan.address(2))
        print(f"answered after {took_s:.1f} s")
        assert took_s < 12
