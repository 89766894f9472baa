"""Ending marked processes, with real processes that make it hard."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from cluster.hosts.processes import CLUSTER_ID, CLUSTER_STATE, cluster_ids, end_cluster, marked

READY = "print('ready', flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY
DAEMON = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
"""
CLEAN_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
print(child.pid, flush=True)
time.sleep(600)
"""


class Nursery:
    """Starts programs under a mark and ends what is left of them."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, source: str, **variables: str) -> tuple[subprocess.Popen[str], str]:
        """The program and the first line it printed."""
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    for process in nursery.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def mark() -> str:
    return str(uuid.uuid4())


def test_only_processes_with_the_mark_are_ended(nursery: Nursery, mark: str) -> None:
    ours, _ = nursery.start(READY, **{CLUSTER_ID: mark})
    others, _ = nursery.start(READY, **{CLUSTER_ID: str(uuid.uuid4())})
    mention, _ = nursery.start(READY, NOTE=f"{CLUSTER_ID}={mark}", **{"X" + CLUSTER_ID: mark})
    unmarked, _ = nursery.start(READY)
    assert end_cluster(mark) == 1
    assert ours.poll() is not None
    assert [process.poll() for process in (others, mention, unmarked)] == [None, None, None]


def test_a_process_that_ignores_sigterm_is_killed_soon(nursery: Nursery, mark: str) -> None:
    ours, _ = nursery.start(STUBBORN, **{CLUSTER_ID: mark})
    start = time.monotonic()
    end_cluster(mark)
    assert ours.wait(1) == -9
    assert time.monotonic() - start < 5


def test_a_daemon_whose_parent_is_gone_is_found(nursery: Nursery, mark: str) -> None:
    parent, _ = nursery.start(DAEMON, **{CLUSTER_ID: mark})
    parent.wait()
    (daemon,) = marked(CLUSTER_ID, mark)
    end_cluster(mark)
    assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_dropped_the_mark_is_found_by_its_parent(nursery: Nursery, mark: str) -> None:
    _, pid = nursery.start(CLEAN_CHILD, **{CLUSTER_ID: mark})
    child = psutil.Process(int(pid))
    assert end_cluster(mark) == 2
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_belongs_to_another_cluster_is_spared(nursery: Nursery, mark: str) -> None:
    source = CLEAN_CHILD.replace("env={}", f"env={{{CLUSTER_ID!r}: 'another'}}")
    _, pid = nursery.start(source, **{CLUSTER_ID: mark})
    child = psutil.Process(int(pid))
    try:
        assert end_cluster(mark) == 1
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()


def test_zombies_do_not_count_as_alive(nursery: Nursery, mark: str) -> None:
    ours, _ = nursery.start(READY, **{CLUSTER_ID: mark})
    ours.send_signal(9)
    os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert psutil.Process(ours.pid).status() == psutil.STATUS_ZOMBIE
    assert end_cluster(mark) == 0


def test_the_process_that_asks_is_never_ended(nursery: Nursery, mark: str) -> None:
    source = f"from cluster.hosts.processes import end_cluster; print(end_cluster({mark!r}))"
    process, line = nursery.start(source, **{CLUSTER_ID: mark})
    assert line == "0"
    assert process.wait(5) == 0


def test_processes_are_found_by_their_state_directory_when_it_is_lost(nursery: Nursery, mark: str) -> None:
    nursery.start(READY, **{CLUSTER_ID: mark, CLUSTER_STATE: "/tmp/lost/one"})
    nursery.start(READY, **{CLUSTER_ID: "another", CLUSTER_STATE: "/tmp/lost/two"})
    assert cluster_ids("/tmp/lost/one") == {mark}
