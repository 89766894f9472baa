"""Hosts joined by cables, for real: what a cable lets through is what it was told to."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.lab.hosts import network
from infra.lab.hosts.network import CabledNetwork, Way

pytestmark = pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(65536):
    connection.sendall(data)
"""


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[CabledNetwork]:
    with CabledNetwork(2, tmp_path) as network:
        yield network


def on(network: CabledNetwork, host: int) -> list[str]:
    """What comes before a command that is to have a host's network."""
    return ["ip", "netns", "exec", network.namespace(host)]


def echo(network: CabledNetwork, host: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A connection of this machine to a program on a host that sends back what it gets."""
    address = network.address(host)
    command = [*on(network, host), sys.executable, "-c", ECHO, address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    connection = socket.create_connection((address, 7), timeout=5)
    return process, connection


def back(connection: socket.socket, data: bytes, timeout_s: float = 5.0) -> bytes:
    connection.settimeout(timeout_s)
    connection.sendall(data)
    received = bytearray()
    while len(received) < len(data):
        received += connection.recv(65536)
    return bytes(received)


def test_frames_get_through_whole_in_both_directions(joined: CabledNetwork) -> None:
    for host in (1, 2):
        process, connection = echo(joined, host)
        data = bytes(range(256)) * 4000  # more than a frame, and more than a segment of the offloads
        with connection:
            assert back(connection, data) == data
        process.wait(5)


@pytest.mark.parametrize("ways", [(), (Way.IN,), (Way.OUT,)], ids=["both", "in", "out"])
def test_a_cut_cable_lets_nothing_through_until_it_is_mended(
    ways: tuple[Way, ...], joined: CabledNetwork
) -> None:
    process, connection = echo(joined, 1)
    other, whole = echo(joined, 2)
    with connection, whole:
        assert back(connection, b"before") == b"before"
        joined.cut(1, *ways)
        with pytest.raises(TimeoutError):
            back(connection, b"during", 1.0)
        assert back(whole, b"the other cable") == b"the other cable"
        joined.mend()
        connection.settimeout(30.0)  # TCP sends it again by itself, later and later
        assert connection.recv(64) == b"during"
    process.wait(5)
    other.wait(5)


def test_what_is_cut_is_one_direction(joined: CabledNetwork) -> None:
    address = joined.address(1)
    listens = [
        *on(joined, 1),
        *(sys.executable, "-c"),
        "import socket, sys\n"
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind((sys.argv[1], 9)); print('ready', flush=True)\n"
        "while True: print(s.recv(64).decode(), flush=True)",
        address,
    ]
    with (
        subprocess.Popen(listens, stdout=subprocess.PIPE, text=True) as process,
        socket.socket(type=socket.SOCK_DGRAM) as sender,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sender.sendto(b"whole", (address, 9))  # and each knows the other's hardware address now
        assert process.stdout.readline() == "whole\n"
        joined.cut(1, Way.IN)
        sender.sendto(b"lost", (address, 9))
        threading.Event().wait(0.3)
        joined.mend()
        joined.cut(1, Way.OUT)
        sender.sendto(b"arrived", (address, 9))
        assert process.stdout.readline() == "arrived\n"
        process.kill()


@pytest.mark.slow
def test_a_worse_cable_takes_longer_and_loses_frames(joined: CabledNetwork) -> None:
    process, connection = echo(joined, 1)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        joined.worsen(loss=0.0, delay_s=0.1)
        began = time.monotonic()
        assert back(connection, b"far") == b"far"
        assert time.monotonic() - began >= 0.2  # there and back
        joined.worsen(loss=0.2, delay_s=0.0)
        for number in range(50):  # each a frame of its own: it is as good as certain that some are lost
            message = b"%06d" % number
            assert back(connection, message, 60.0) == message  # TCP sends again what was lost
        retransmitted = connection.getsockopt(socket.IPPROTO_TCP, 11, 104)[100:104]  # TCP_INFO
        assert int.from_bytes(retransmitted, sys.byteorder) > 0
    process.wait(5)


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    def interfaces() -> str:
        return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout

    before = interfaces()
    with CabledNetwork(1, tmp_path) as network:
        assert network._tag in interfaces()
    assert interfaces() == before
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network._tag not in spaces
