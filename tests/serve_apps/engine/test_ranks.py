"""Ranks that wait for one another hear of it when one dies: nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import EngineError
from serve_apps.engine.torch_engine.ranks import Ranks
from serve_apps.engine.torch_engine.torch_options import TorchOptions

CPU = torch.device("cpu")
SOON_S = 10.0
"""Far below the time for which a rank that lives is waited for."""


def join(rank: int, size: int, port: int) -> Ranks:
    ranks = Ranks(rank, size, 1, TorchOptions(start_timeout_s=600.0, step_timeout_s=30.0))
    ranks.join("127.0.0.1", port, CPU)
    return ranks


def play(rank: int, size: int, port: int, part: str, said: Any) -> None:
    """What one rank does, and what it heard."""
    ranks = join(rank, size, port)
    try:
        if part == "dies":
            time.sleep(0.3)  # the others wait by now
            os.kill(os.getpid(), 9)
        if part == "has no room":
            ranks.loaded(0)
            heard: Any = "left"
        elif part == "disagrees":
            heard = ranks.agree(False)
        elif part == "loads":
            heard = ranks.loaded(10 + rank)
        else:
            heard = ranks.agree(True)
    except EngineError as error:
        heard = str(error)
    finally:
        ranks.leave()
    said.put((rank, heard))


Together = Callable[[str, list[str]], dict[int, Any]]


@pytest.fixture
def together() -> Together:
    """Rank 0 in a process too: a process has one group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def go(first: str, others: list[str]) -> dict[int, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        said = context.Queue()
        parts = [first, *others]
        started = [
            context.Process(target=play, args=(rank, len(parts), port, part, said), daemon=True)
            for rank, part in enumerate(parts)
        ]
        for each in started:
            each.start()
        heard = dict(said.get(timeout=60.0) for part in parts if part != "dies")
        for each in started:
            each.join(SOON_S)
            assert each.exitcode is not None
        return heard

    return go


@pytest.mark.parametrize("part", ["loads", "agrees"])
def test_who_waits_hears_of_a_death_at_once(part: str, together: Together) -> None:
    began = time.monotonic()
    heard = together(part, [part, "dies"])
    assert time.monotonic() - began < 3 * SOON_S
    assert set(heard) == {0, 1}
    assert "rank 2 of the replica died or hangs" in heard[0]
    assert "of the replica died" in heard[1]  # of rank 2, or of rank 0, which has ended because of it


def test_who_waits_hears_of_the_death_of_rank_0(together: Together) -> None:
    heard = together("dies", ["agrees", "agrees"])
    assert all("rank 0 of the replica died" in heard[rank] for rank in (1, 2)), heard


def test_a_rank_without_room_is_named(together: Together) -> None:
    heard = together("loads", ["has no room", "loads"])
    assert heard[1] == "left"
    assert "rank 1 could not load the model" in heard[0]


def test_all_hear_the_least_room_and_any_disagreement(together: Together) -> None:
    assert together("loads", ["loads", "loads"]) == {0: 10, 1: 10, 2: 10}
    assert together("agrees", ["agrees", "disagrees"]) == {0: False, 1: False, 2: False}
    assert together("agrees", ["agrees"]) == {0: True, 1: True}
