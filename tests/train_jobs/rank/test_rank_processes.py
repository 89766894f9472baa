"""Ranks' processes on their own: forked, called for, ended, and gone with whoever answers for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.node.forked_processes import ProcessEnd
from tests.train_jobs.fork_server import Server
from tests.train_jobs.ranks import tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data
from train_jobs.driver.failures import FailureClass, classify
from train_jobs.errors import RankError
from train_jobs.group.outcome import RankFailure
from train_jobs.rank.link import LinkAddress, RankLink, RankOrder
from train_jobs.rank.script import RankPlace
from train_jobs.spec import DATA, group_spec
from train_jobs.watch.progress import Activity, HangWatch
from train_jobs.watch.rank_stacks import RankStacks, waits_for_others
from train_jobs.watch.rank_watch import RankWatch


class LocalWorker:
    """Answers for one rank as its Ray Train worker would; all of them in one process."""

    def __init__(self, order: RankOrder, met: threading.Event, addresses: list[str]) -> None:
        self._order, self._met, self._addresses = order, met, addresses
        self.lines: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.status: str | None = None
        self.error: RankError | None = None
        self.leaving = threading.Event()
        self.called = threading.Event()
        self.on_metric: Callable[[], bool] = lambda: False
        self.activity: Activity | None = None
        self.hangs = HangWatch(order.spec.config.recovery.hang_timeout_s, time.monotonic(), 300.0)

    def order(self) -> RankOrder:
        self.called.set()
        return self._order

    def rendezvous(self, address: str | None) -> str:
        if address is not None:
            self._addresses.append(address)
            self._met.set()
        assert self._met.wait(60)
        return self._addresses[0]

    def metric(self, line: dict[str, Any]) -> bool:
        self.lines.append(line)
        return self.on_metric()

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self.events.append(kind)

    def is_stopping(self) -> bool:
        return False

    def leave(self) -> None:
        self.leaving.set()

    def watch(self, pid: int, stacks: int) -> None:
        self.stacks = RankStacks(pid, stacks)

    def progress(self, activity: Activity) -> None:
        self.activity = activity
        self.hangs.heard(activity, time.monotonic())

    def finish(self, status: str) -> None:
        self.status = status

    def fail(self, error: RankError) -> None:
        self.error = error

    def stay(self) -> None:
        threading.Event().wait()


def workers(directory: Path, **changes: Any) -> list[LocalWorker]:
    """Those of a job of two ranks, whose data is prepared."""
    corpus = write_corpus(directory / "corpus.parquet")
    config = tiny_job(corpus, workers={"min": 2, "max": 2}, **changes)
    prepare_data(config, directory / DATA)
    spec = group_spec("job", config, str(directory), 1, 0, ["n1", "n1"])
    met, addresses = threading.Event(), list[str]()
    return [
        LocalWorker(
            RankOrder(spec, RankPlace(rank, 2, rank, 2, 0, 1), "127.0.0.1", "n1", None, {"FROM_WORKER": "1"}),
            met,
            addresses,
        )
        for rank in range(2)
    ]


def start(server: Server, ranks: list[LocalWorker]) -> list[int]:
    """Fork the ranks; returns their pids."""
    return [server.fork(index, RankLink(rank).at) for index, rank in enumerate(ranks)]


@pytest.mark.slow
def test_forked_ranks_train_to_the_end_and_say_so(server: Server, tmp_path: Path) -> None:
    ranks = workers(tmp_path)
    start(server, ranks)
    ended = {answer["id"]: answer["code"] for answer in (server.answer(), server.answer())}
    assert ended == {0: 0, 1: 0}, [rank.error for rank in ranks]
    assert [rank.status for rank in ranks] == ["finished", "finished"]
    assert [line["step"] for line in ranks[0].lines] == [*range(1, 9)]
    assert {"entered", "started", "measured"} <= set(ranks[0].events)
    assert (ranks[1].lines, ranks[1].events) == ([], []), "rank 0 speaks for all"
    host, _, port = ranks[0].rendezvous(None).rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_a_rank_that_fails_says_why_and_one_that_is_killed_leaves_its_signal(
    server: Server, tmp_path: Path
) -> None:
    ranks = workers(tmp_path, steps=100_000)
    pids = start(server, ranks)
    stepped = threading.Event()
    ranks[0].on_metric = lambda: bool(stepped.set())
    assert stepped.wait(60)
    os.kill(pids[1], signal.SIGKILL)
    ended = {answer["id"]: answer["code"] for answer in (server.answer(), server.answer())}
    assert ended == {0: 0, 1: -signal.SIGKILL}
    error = ranks[0].error
    assert error is not None
    assert (error.rank, error.collective, error.died) == (0, True, False)
    assert error.step is not None
    assert "Traceback" in error.trace
    assert (ranks[1].error, ranks[1].status) == (None, None), "it had no time to say anything"


def test_sigterm_asks_the_group_to_leave_and_the_rank_goes_on(server: Server, tmp_path: Path) -> None:
    ranks = workers(tmp_path, steps=100_000)
    pids = start(server, ranks)
    ranks[0].on_metric = ranks[1].leaving.is_set  # as the job's control would say: stop after this step
    while not ranks[0].lines:
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGTERM)
    assert {server.answer()["code"], server.answer()["code"]} == {0}
    assert [rank.status for rank in ranks] == ["stopped", "stopped"]
    assert not ranks[0].leaving.is_set()


def test_a_rank_that_is_stopped_is_silent_and_the_one_that_waits_for_it_gets_nothing_done(
    server: Server, tmp_path: Path
) -> None:
    ranks = workers(tmp_path, steps=100_000, recovery={"hang_timeout_s": 1.0})
    pids = start(server, ranks)
    stepped = threading.Event()
    ranks[0].on_metric = lambda: bool(stepped.set())
    assert stepped.wait(60)
    os.kill(pids[1], signal.SIGSTOP)
    stopped_at = time.monotonic()
    found: dict[int, str] = {}
    while len(found) < 2:
        assert time.monotonic() - stopped_at < 3.0, found
        for rank, worker in enumerate(ranks):
            if (wrong := worker.hangs.hang(time.monotonic())) is not None:
                found.setdefault(rank, wrong)
        time.sleep(0.02)
    assert found[0].startswith("has done nothing")
    assert found[1].startswith("has said nothing")
    assert ranks[1].stacks.state() == "stopped by a signal"
    assert [rank.stacks.is_stopped() for rank in ranks] == [False, True]
    waiting = ranks[0].stacks.dump()
    assert waiting is not None
    assert "in _step" in waiting
    assert waits_for_others(waiting), waiting
    where = ranks[1].stacks.dump()
    assert where is not None
    assert "loop.py" in where  # wherever it stood in that moment
    for rank in ranks:
        rank.stacks.kill()
    # One whose other threads ran while they were looked at may have died of that.
    assert {server.answer()["code"], server.answer()["code"]} <= {-signal.SIGKILL, -signal.SIGSEGV}


def test_of_ranks_that_stand_alike_the_one_is_named_that_has_begun_fewer_collectives(
    server: Server, tmp_path: Path
) -> None:
    hanging = {"task": "tests.train_jobs.rank.hanging_task:Task", "evaluate": {"every_steps": None}}
    once = {"parallel": {"strategy": "ddp"}, "recovery": {"hang_timeout_s": 1.0}}
    ranks = workers(tmp_path, steps=100, **once, **hanging)
    start(server, ranks)
    until = time.monotonic() + 60
    while any(rank.hangs.phase is not None or rank.hangs.hang(time.monotonic()) is None for rank in ranks):
        assert time.monotonic() < until, [rank.error for rank in ranks]
        time.sleep(0.02)
    stacks = [rank.stacks.dump() or "" for rank in ranks]
    assert all(waits_for_others(each) for each in stacks), "where they stand does not tell"
    begun = [rank.hangs.collectives for rank in ranks]
    told = [
        RankFailure(rank, None, "Hang", "", stacks[rank], hung=True, collective=True, collectives=begun[rank])
        for rank in range(2)
    ]
    failure = classify(told, ["n1", "n1"], {"n1"}, {})
    assert (failure.failure_class, failure.rank) == (FailureClass.HANG, 1), begun
    for rank in ranks:
        rank.stacks.kill()
    assert {server.answer()["id"], server.answer()["id"]} == {0, 1}


def test_a_rank_that_reads_its_weights_slowly_hangs_only_when_the_time_of_the_start_is_over(
    server: Server, tmp_path: Path
) -> None:
    task = {"task": "tests.train_jobs.rank.slow_task:Task", "evaluate": {"every_steps": None}, "steps": 3}
    limits = {"hang_timeout_s": 30.0, "start_timeout_s": 600.0}
    ranks = workers(tmp_path, **task, parallel={"strategy": "ddp"}, recovery=limits)
    start(server, ranks)
    built = tmp_path / "builds"
    while not built.exists() or any(rank.hangs.phase != "starting" for rank in ranks):
        time.sleep(0.02)
    kept: list[str] = []
    watches = [RankWatch(number, limits["hang_timeout_s"], kept.append, 0.0) for number in range(2)]
    for watch, rank in zip(watches, ranks, strict=True):
        watch.watch(rank.stacks)
        assert rank.activity is not None
        for now in range(0, 601, 10):  # on a clock of its own, so that nobody has to wait
            watch.heard(rank.activity, float(now))
            watch.end_if_it_hangs(float(now))
    with pytest.raises(RankError, match=r"has been starting for 601\.0 s") as caught:
        watches[0].end_if_it_hangs(601.0)
    assert (caught.value.hung, caught.value.collective) == (True, False)
    assert "in build" in kept[0]
    ranks[1].stacks.kill()
    assert {server.answer()["id"], server.answer()["id"]} == {0, 1}


@pytest.mark.slow
def test_ranks_are_gone_with_the_server_even_those_that_are_stopped(tmp_path: Path) -> None:
    server = Server()
    ranks = workers(tmp_path, steps=100_000)
    processes = [psutil.Process(pid) for pid in start(server, ranks)]
    assert all(rank.called.wait(60) for rank in ranks)
    processes[1].send_signal(signal.SIGSTOP)
    server.process.kill()
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    server.close()


def test_a_rank_ends_when_its_worker_is_gone(server: Server, tmp_path: Path) -> None:
    answering = subprocess.Popen(
        [sys.executable, "-c", _WORKER_OF_ITS_OWN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert answering.stdout is not None
    address, authkey = json.loads(answering.stdout.readline())
    server.fork(7, LinkAddress(address, bytes.fromhex(authkey)))
    assert answering.stdout.readline() == "called\n"
    answering.kill()
    assert server.answer() == {"id": 7, "code": 1, "memory": False, "left": 0}
    answering.wait()


_WORKER_OF_ITS_OWN = """
import json, sys
from pathlib import Path
from tests.train_jobs.rank.test_rank_processes import RankLink, workers
worker = workers(Path(sys.argv[1]))[1]
at = RankLink(worker).at
print(json.dumps([at.address, at.authkey.hex()]), flush=True)
worker.called.wait()
print("called", flush=True)
worker.status = input()
"""


def test_nobody_without_the_key_is_answered(server: Server, tmp_path: Path) -> None:
    (rank, _) = workers(tmp_path)
    server.fork(0, LinkAddress(RankLink(rank).at.address, b"another one"))
    assert server.answer() == {"id": 0, "code": 1, "memory": False, "left": 0}
    assert not rank.called.is_set()


def test_an_end_is_told_in_words() -> None:
    assert str(ProcessEnd(3, False)) == "exit code 3"
    assert str(ProcessEnd(-9, False)) == "killed by SIGKILL"
    assert str(ProcessEnd(-15, True)) == "killed by SIGTERM"
    words = str(ProcessEnd(-9, True))
    died = RankFailure(0, None, "RankDied", words, "", died=True)
    assert classify([died], ["n1"], ["n1"], {}).failure_class is FailureClass.MEMORY
