"""Directories of clusters: short enough for sockets, whatever the cluster is called."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.hosts.short_paths import short_directory

# What Ray really puts under a node's temp dir: the longest name of a socket it was seen to use.
RAY_SOCKET = "session_2026-11-21_12-04-48_336030_4194304/sockets/dash_MetricsHead"


@pytest.mark.parametrize("length", [1, 20, 63])
@pytest.mark.parametrize("uid", [0, 1000, 4294967294])
def test_a_socket_can_be_bound_under_any_name(length: int, uid: int) -> None:
    directory = short_directory(Path(f"/tmp/shoal-{uid}"), "n" * length)
    path = str(directory / "n244" / RAY_SOCKET)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(FileNotFoundError):
        listener.bind(path)  # an OSError "path too long" otherwise; the directory is not there


def test_long_names_that_begin_alike_have_directories_of_their_own() -> None:
    names = ["a" * 62 + last for last in "bcd"] + ["a" * 12]
    assert len({short_directory(Path("/tmp/shoal-0"), name) for name in names}) == 4


def test_a_root_that_leaves_no_room_is_a_sentence() -> None:
    with pytest.raises(ShoalError, match="107 bytes"):
        short_directory(Path("/tmp") / ("x" * 60), "demo")
