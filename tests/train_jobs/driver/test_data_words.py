"""Which words about a job's data are said, and when."""

from __future__ import annotations

from train_jobs.data.preparation import FIRST_WORD_S, WORD_S
from train_jobs.driver.data_words import STILL_S, DataWords

FIRST = 100.0 + FIRST_WORD_S


def test_words_are_said_after_a_while_and_then_now_and_then() -> None:
    words = DataWords(100.0)
    assert words.hear("a", FIRST - 0.1) is None
    assert words.hear("b", FIRST) == "b"
    assert words.hear("c", FIRST + WORD_S - 0.1) is None
    assert words.hear("d", FIRST + WORD_S) == "d"


def test_words_that_came_too_early_are_said_later_where_no_others_come() -> None:
    words = DataWords(100.0)
    assert words.look(100.0 + 10 * WORD_S) is None, "nothing was told"
    assert words.hear("training", 101.0) is None
    said = [each for second in range(30) if (each := words.look(101.0 + second)) is not None]
    seconds = [STILL_S, STILL_S + WORD_S, STILL_S + 2 * WORD_S]
    assert said == [f"training, for {each:.0f} s now" for each in seconds]


def test_words_that_are_told_again_and_again_are_no_new_ones() -> None:
    words = DataWords(100.0)
    told = [words.hear("waiting", FIRST + second) for second in (0.0, 1.0, WORD_S + 1)]
    assert told == ["waiting", None, "waiting"]
    assert words.look(FIRST + 2 * WORD_S + 1) == f"waiting, for {2 * WORD_S + 1:.0f} s now"


def test_new_words_are_waited_for_rather_than_old_ones_said_again() -> None:
    words = DataWords(100.0)
    words.hear("one", FIRST)
    words.hear("two", FIRST + WORD_S - 1)
    assert words.look(FIRST + WORD_S) is None
    assert words.hear("three", FIRST + WORD_S + 1) == "three"
