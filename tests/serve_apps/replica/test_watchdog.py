"""A process that hangs is ended by its watchdog, and no other is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.clusters import REPOSITORY

TIMEOUT_S = 2.0
BEATING = f"""
import time
from serve_apps.replica.watchdog import Watchdog
watchdog = Watchdog({TIMEOUT_S})
print("beating", flush=True)
while True:
    watchdog.beat()
    time.sleep(0.1)
"""


@contextmanager
def beating(source: str = BEATING) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A process that beats, and its watchdog."""
    process = subprocess.Popen([sys.executable, "-c", source], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (watchdog,) = psutil.Process(process.pid).children()
        yield process, watchdog
    finally:
        process.kill()
        process.wait()
    watchdog.wait(5)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_killed_in_time_and_not_before() -> None:
    with beating() as (process, _):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * TIMEOUT_S)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(4 * TIMEOUT_S) == -signal.SIGKILL
        assert time.monotonic() - began > TIMEOUT_S / 2


@pytest.mark.slow
def test_a_pause_of_both_is_no_reason() -> None:
    with beating() as (process, watchdog):
        psutil.Process(process.pid).suspend()
        watchdog.suspend()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * TIMEOUT_S)
        watchdog.resume()
        psutil.Process(process.pid).resume()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * TIMEOUT_S)


def test_a_watchdog_that_is_killed_is_replaced() -> None:
    with beating() as (process, watchdog):
        watchdog.kill()
        watchdog.wait(5)
        deadline = time.monotonic() + 5
        while not (others := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [other.pid for other in others] != [watchdog.pid]
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(4 * TIMEOUT_S) == -signal.SIGKILL
        others[0].wait(5)


def test_it_ends_with_the_process_and_when_the_watch_ends() -> None:
    with beating(BEATING.replace("while True", "for _ in range(3)") + "watchdog.stop()\ninput()") as (_, dog):
        dog.wait(5)
    with beating() as (process, watchdog):
        process.kill()
        process.wait()
        watchdog.wait(5)
