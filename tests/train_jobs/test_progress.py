"""Hangs, as a watcher sees them: silence, and heartbeats that say nothing new."""

from __future__ import annotations

import pytest

from train_jobs.progress import HangWatch, Heartbeat, Progress

TIMEOUT_S = 10.0
FIRST_WORD_S = 60.0


def watch_of(*heartbeats: tuple[float, int, bool]) -> HangWatch:
    """One that heard (when, count, waits)."""
    watch = HangWatch(TIMEOUT_S, 90.0, FIRST_WORD_S)
    for when, count, waits in heartbeats:
        watch.heard(Heartbeat(count, waits), when)
    return watch


@pytest.mark.parametrize(("first_word_s", "allowed"), [(FIRST_WORD_S, FIRST_WORD_S), (1.0, TIMEOUT_S)])
def test_who_never_says_a_word_hangs_after_a_time_of_its_own(first_word_s: float, allowed: float) -> None:
    watch = HangWatch(TIMEOUT_S, 100.0, first_word_s)
    assert watch.hang(100.0 + allowed) is None
    assert watch.hang(100.5 + allowed) == f"has not said a word for {allowed + 0.5:.1f} s"


def test_silence_is_a_hang_after_the_timeout_even_of_who_waits() -> None:
    watch = watch_of((100.0, 1, True))
    assert watch.hang(110.0) is None
    assert watch.hang(110.5) == "has said nothing for 10.5 s"


def test_heartbeats_without_progress_are_a_hang_after_the_timeout() -> None:
    watch = watch_of(*((100.0 + second, 7, False) for second in range(11)))
    assert watch.hang(110.0) is None
    assert watch.hang(110.5) == "has done nothing for 10.5 s"
    watch.heard(Heartbeat(8, False), 110.6)
    assert watch.hang(120.0) is None


def test_who_waits_has_all_the_time_and_the_timeout_begins_when_it_goes_on() -> None:
    watch = watch_of(*((100.0 + second, 7, True) for second in range(60)))
    assert watch.hang(160.0) is None
    watch.heard(Heartbeat(7, False), 160.0)
    watch.heard(Heartbeat(7, False), 169.0)
    assert watch.hang(169.9) is None
    watch.heard(Heartbeat(7, False), 170.0)
    assert watch.hang(170.5) is not None


def test_progress_counts_and_waits_as_deep_as_it_is_told() -> None:
    progress = Progress()
    progress.tick()
    assert progress.heartbeat == Heartbeat(1, False)
    with progress.waiting():
        with progress.waiting():
            pass
        assert progress.heartbeat.waits
    assert not progress.heartbeat.waits
    assert progress.heartbeat.count > 1
