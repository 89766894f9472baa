"""The time that a broker counts against whoever is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sharing.listening_clock import MOST_S, ListeningClock


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=30))
def test_it_never_goes_faster_than_the_real_one_nor_backwards(history: list[tuple[bool, float]]) -> None:
    hand = Hand()
    clock, began, last = ListeningClock(hand), hand.time, 0.0
    for in_call, seconds in history:
        if in_call:
            with clock.call() as now:
                assert now >= last
                hand.time += seconds
                assert clock.now() == now, "a call sees one time"
        else:
            hand.time += seconds
        now = clock.now()
        assert last <= now <= hand.time - began + 1e-6
        assert now - last <= min(seconds, MOST_S) + 1e-6 or in_call
        assert now - last <= 2 * MOST_S + 1e-6
        last = now


def test_what_is_looked_at_often_enough_passes_as_it_is() -> None:
    hand = Hand()
    clock = ListeningClock(hand)
    for _ in range(100):
        hand.time += 0.25
        clock.now()
    assert clock.now() == pytest.approx(25.0)


STOPPED = """
import sys, time
from cluster.sharing.listening_clock import ListeningClock
clock = ListeningClock()
clock.start()
print("there", flush=True)
for line in sys.stdin:
    print(clock.now(), time.monotonic(), flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_does_not_count_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def times() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            return [float(word) for word in process.stdout.readline().split()]

        assert process.stdout.readline() == "there\n"
        first = times()
        time.sleep(1.5)
        awake = times()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        after = times()
        process.stdin.close()
    assert awake[0] - first[0] == pytest.approx(awake[1] - first[1], abs=0.2), "nobody asked meanwhile"
    assert after[1] - awake[1] > 4
    assert after[0] - awake[0] < 4 / 2
