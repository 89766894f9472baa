"""The line between a rank's process and whoever answers for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import psutil
import pytest

from train_jobs.errors import RankError
from train_jobs.rank.link import LinkAddress, RankLink, reach_worker


class Answers:
    """Some of what a worker answers, and what must not disturb it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.over = threading.Event()

    def metric(self, line: dict[str, Any]) -> bool:
        self.threads.add(threading.get_ident())
        time.sleep(0.05)
        return line["step"] > 1

    def rendezvous(self, address: str | None) -> str:
        raise RankError(3, 7, "Hang", "it stood", "where")

    def event(self, kind: str, facts: dict[str, Any]) -> Any:
        return threading.Lock()  # cannot travel

    def stay(self) -> None:
        self.over.wait()


def sockets() -> int:
    return len(psutil.Process().net_connections("unix"))


def test_each_thread_is_answered_by_its_own() -> None:
    answers = Answers()
    worker = reach_worker(RankLink(answers).at)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda step: worker.metric({"step": step}), (1, 2, 1, 2)))
    assert found == [False, True, False, True]
    assert len(answers.threads) == 4


def test_what_is_raised_there_is_raised_here_and_the_line_goes_on() -> None:
    worker = reach_worker(RankLink(Answers()).at)  # type: ignore[arg-type]
    with pytest.raises(RankError) as caught:
        worker.rendezvous(None)
    assert (caught.value.rank, caught.value.step, caught.value.trace) == (3, 7, "where")
    with pytest.raises(RuntimeError, match="cannot travel"):
        worker.event("started", {})
    with pytest.raises(AttributeError, match="nothing"):
        worker.nothing()  # type: ignore[attr-defined]
    assert worker.metric({"step": 2})


def test_who_lacks_the_key_is_not_answered_and_disturbs_nobody() -> None:
    at = RankLink(Answers()).at  # type: ignore[arg-type]
    Client(at.address, "AF_UNIX").close()  # it says nothing, and goes
    with pytest.raises(AuthenticationError):
        reach_worker(LinkAddress(at.address, b"another one"))
    assert reach_worker(at).metric({"step": 2})


def test_nothing_of_a_link_that_is_closed_stays_behind() -> None:
    threads, lines = threading.active_count(), sockets()
    for _ in range(20):
        answers = Answers()
        link = RankLink(answers)  # type: ignore[arg-type]
        worker = reach_worker(link.at)
        staying = threading.Thread(target=worker.stay)
        staying.start()
        assert worker.metric({"step": 2})
        answers.over.set()
        link.close()
        staying.join(5)
        with pytest.raises((ConnectionRefusedError, ConnectionResetError, EOFError)):
            reach_worker(link.at)
        del worker, staying
    deadline = time.monotonic() + 10
    while (threading.active_count() > threads or sockets() > lines) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads
    assert sockets() <= lines
