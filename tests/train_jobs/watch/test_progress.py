"""Hangs, as a watcher sees them: silence, and heartbeats that say nothing new."""

from __future__ import annotations

import math

import pytest

from train_jobs.watch.progress import Activity, HangWatch, Progress

TIMEOUT_S = 10.0
FIRST_WORD_S = 60.0


LIMIT_S = 50.0
"""Of a phase."""


def watch_of(*heartbeats: tuple[float, int, str | None], limit_s: float = LIMIT_S) -> HangWatch:
    """One that heard (when, count, phase)."""
    watch = HangWatch(TIMEOUT_S, 90.0, FIRST_WORD_S)
    for when, count, phase in heartbeats:
        watch.heard(Activity(count, phase, limit_s), when)
    return watch


@pytest.mark.parametrize(("first_word_s", "allowed"), [(FIRST_WORD_S, FIRST_WORD_S), (1.0, TIMEOUT_S)])
def test_who_never_says_a_word_hangs_after_a_time_of_its_own(first_word_s: float, allowed: float) -> None:
    watch = HangWatch(TIMEOUT_S, 100.0, first_word_s)
    assert watch.hang(100.0 + allowed) is None
    assert watch.hang(100.5 + allowed) == f"has not said a word for {allowed + 0.5:.1f} s"


def test_silence_is_a_hang_after_the_timeout_even_of_who_waits() -> None:
    watch = watch_of((100.0, 1, "saving"))
    assert watch.hang(110.0) is None
    assert watch.hang(110.5) == "has said nothing for 10.5 s"


def test_heartbeats_without_progress_are_a_hang_after_the_timeout() -> None:
    watch = watch_of(*((100.0 + second, 7, None) for second in range(11)))
    assert watch.hang(110.0) is None
    assert watch.hang(110.5) == "has done nothing for 10.5 s"
    watch.heard(Activity(8), 110.6)
    assert watch.hang(120.0) is None


@pytest.mark.parametrize("phase", ["starting", "saving", "waiting for other groups"])
def test_a_phase_has_a_limit_of_its_own_and_the_timeout_begins_when_it_is_over(phase: str) -> None:
    watch = watch_of(*((100.0 + second, 7, phase) for second in range(52)))
    assert watch.hang(150.0) is None
    assert watch.hang(150.5) == f"has been {phase} for 50.5 s"
    watch.heard(Activity(8), 151.0)
    watch.heard(Activity(8), 160.0)
    assert watch.hang(160.9) is None
    watch.heard(Activity(8), 161.0)
    assert watch.hang(161.5) == "has done nothing for 10.5 s"


def test_a_phase_has_no_less_time_than_a_step_and_what_only_the_user_knows_has_all() -> None:
    short = watch_of(*((100.0 + second, 7, "saving") for second in range(12)), limit_s=1.0)
    assert short.hang(109.0) is None
    assert short.hang(110.5) == "has been saving for 10.5 s"
    heard = ((100.0 + second, 7, "waiting") for second in range(1000))
    assert watch_of(*heard, limit_s=math.inf).hang(1100.0) is None


def test_progress_counts_and_of_phases_in_one_another_the_longest_is_told() -> None:
    progress = Progress(start_s=30.0, save_s=60.0)
    progress.tick()
    assert progress.activity == Activity(1)
    with progress.starting():
        assert progress.activity == Activity(1, "starting", 30.0)
        with progress.saving():
            assert progress.activity == Activity(1, "saving", 60.0)
            with progress.meeting():
                assert progress.activity == Activity(1, "saving", 60.0)
        assert progress.activity == Activity(3, "starting", 30.0)
        with progress.waiting():
            assert progress.activity == Activity(3, "waiting", math.inf)
    assert progress.activity == Activity(5)


def test_whatever_else_it_is_at_it_says_that_it_saves() -> None:
    progress = Progress(start_s=60.0, save_s=30.0)
    told = [progress.activity.saves]
    with progress.starting():
        told.append(progress.activity.saves)
        with progress.saving():
            told.append(progress.activity.saves)
            assert progress.activity.phase == "starting", "which may take longer"
    told.append(progress.activity.saves)
    assert told == [False, False, True, False]


def test_who_waits_for_a_group_that_saves_does_not_hang_and_who_waits_for_any_other_does() -> None:
    progress, watch = Progress(start_s=30.0, save_s=60.0), HangWatch(TIMEOUT_S, 90.0, FIRST_WORD_S)

    def hang_after(seconds: int, begin: int) -> str | None:
        for second in range(seconds + 1):
            watch.heard(progress.activity, begin + second)
        return watch.hang(begin + seconds)

    with progress.exchanging():
        assert hang_after(9, 100) is None
        progress.others_save = True
        assert hang_after(1000, 109) is None
        progress.others_save = False
        assert hang_after(10, 1110) is None, "the time of a step begins when the save is over"
        assert hang_after(1, 1120) == "has done nothing for 11.0 s"
    progress.others_save = True
    assert hang_after(11, 1122) == "has done nothing for 11.0 s", "it waits for nobody"
