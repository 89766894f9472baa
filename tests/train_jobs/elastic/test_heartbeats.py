"""The heartbeats of a node's ranks: together where there is time, at once where there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from train_jobs.elastic.heartbeats import Hearts, NodeHeartbeats
from train_jobs.elastic.membership import Beat, Word

NEVER_S = 3600.0
"""A period that no test lives to see the end of."""
LONG_S = 2.0
"""A period in which a machine that stalls still does what a test does at once."""


class Calls:
    """Notes what the lighthouse is sent."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Beat]] = []
        self.ended: list[str] = []
        self.away = False

    def heartbeats(self, beats: Sequence[Beat]) -> Sequence[Word]:
        if self.away:
            raise TimeoutError("no answer")
        self.batches.append(beats)
        return [Word(change=beat.rank == 3) for beat in beats]

    def say_ended(self, group: str) -> None:
        self.ended.append(group)


def test_ranks_that_come_before_the_next_turn_are_sent_together_and_each_has_its_answer() -> None:
    calls = Calls()
    node = NodeHeartbeats(calls, LONG_S)
    node.heartbeat(Beat("a", 0, 1), at_once=True)
    with ThreadPoolExecutor(8) as ranks:
        words = list(ranks.map(lambda rank: node.heartbeat(Beat("a", rank, 1), False), range(8)))
    assert [word.change for word in words] == [rank == 3 for rank in range(8)]
    assert [len(batch) for batch in calls.batches] == [1, 8]


def test_a_node_sends_no_more_often_than_it_has_to_however_many_ranks_it_has() -> None:
    calls, period_s, seconds = Calls(), 0.1, 1.0
    node = NodeHeartbeats(calls, period_s)

    def rank(number: int) -> int:
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            node.heartbeat(Beat("a", number, 1), False)
            time.sleep(period_s / 2)  # as ranks do
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(16) as ranks:
        counts = list(ranks.map(rank, range(16)))
    assert len(calls.batches) <= (time.monotonic() - began) / period_s + 1
    assert sum(len(batch) for batch in calls.batches) == sum(counts)


def test_one_that_cannot_wait_takes_the_others_with_it() -> None:
    calls = Calls()
    node = NodeHeartbeats(calls, NEVER_S)
    node.heartbeat(Beat("a", 0, 1), at_once=True)
    began = threading.Event()

    def wait() -> Word:
        began.set()
        return node.heartbeat(Beat("a", 1, 1), False)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(wait)
        began.wait(10)
        while not waiting.done():
            node.heartbeat(Beat("a", 2, 1), at_once=True)
        assert waiting.result(10) == Word()
    assert [beat.rank for batch in calls.batches for beat in batch].count(1) == 1


def test_the_lighthouse_hears_how_long_ago_a_rank_was_there() -> None:
    calls = Calls()
    node = NodeHeartbeats(calls, LONG_S)
    node.heartbeat(Beat("a", 0, 1), at_once=True)
    began = time.monotonic()
    node.heartbeat(Beat("a", 0, 1), at_once=False)
    waited_s = time.monotonic() - began
    (beat,) = calls.batches[1]
    assert 0.5 * LONG_S < beat.age_s <= waited_s


def test_everybody_hears_that_the_lighthouse_is_away_and_of_its_return() -> None:
    calls = Calls()
    node = NodeHeartbeats(calls, 0.05)
    calls.away = True
    with ThreadPoolExecutor(3) as ranks:
        asked = [ranks.submit(node.heartbeat, Beat("a", rank, 1), False) for rank in range(3)]
        for each in asked:
            with pytest.raises(ConnectionError, match="no answer"):
                each.result(10)
    calls.away = False
    assert node.heartbeat(Beat("a", 0, 1), at_once=False) == Word()


def test_the_end_of_a_process_is_told_where_its_group_has_been_heard_of() -> None:
    calls = Calls()
    hearts = Hearts()
    hearts.open(1, lambda: calls, NEVER_S)
    hearts.ended("1-0")
    assert calls.ended == [], "it has yet to meet the others: the driver sees to it"
    hearts.heartbeat(1, Beat("1-0", 0, 0), at_once=True)
    hearts.ended("1-0")
    assert calls.ended == ["1-0"]


def test_ranks_of_an_attempt_that_is_over_are_not_heard() -> None:
    before, now = Calls(), Calls()
    hearts = Hearts()
    hearts.open(1, lambda: before, NEVER_S)
    hearts.open(2, lambda: now, NEVER_S)
    hearts.open(1, lambda: before, NEVER_S)
    with pytest.raises(KeyError):
        hearts.heartbeat(1, Beat("1-0", 0, 3), at_once=True)
    hearts.heartbeat(2, Beat("2-0", 0, 0), at_once=True)
    assert before.batches == []
    assert len(now.batches) == 1
