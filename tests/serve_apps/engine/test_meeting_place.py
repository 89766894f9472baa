"""The port of a replica's ranks is theirs from the moment it is chosen, however long they take."""

from __future__ import annotations

import socket

import pytest

from serve_apps.engine.meeting_place import MeetingPlace
from serve_apps.engine.torch_engine.ranks import Ranks
from serve_apps.engine.torch_engine.torch_options import TorchOptions


def test_nobody_else_is_given_the_port_and_rank_0_can_listen_there() -> None:
    place = MeetingPlace()
    taken = []
    try:
        for _ in range(2000):
            other = socket.socket()
            other.bind((place.host, 0))
            taken.append(other)
            assert other.getsockname()[1] != place.port
        stranger = socket.socket()
        with pytest.raises(OSError, match="in use"):
            stranger.bind((place.host, place.port))
        stranger.close()
        store = Ranks(0, 1, 4, TorchOptions())._open_store(place.host, place.port)
        store.set("a", "b")
        assert store.get("a") == b"b"
    finally:
        for each in taken:
            each.close()
        place.close()


def test_a_port_that_was_given_back_is_free() -> None:
    place = MeetingPlace()
    place.close()
    with socket.create_server((place.host, place.port)):
        pass
