"""Text as it comes, against decoding all of it at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.engine.detokenize import REPLACEMENT, Detokenizer, StopMatcher
from serve_apps.engine.token_pieces import TokenPieces


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte: the hardest case."""
    return bytes(ids).decode("utf-8", errors="replace")


def one_byte(token: int) -> bytes:
    return bytes([token])


def streamed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


text = st.text(st.sampled_from("ab é你好世界😀🎉👩‍🚀ñ\n"), max_size=40)


@given(text, text)
def test_text_comes_whole_and_no_piece_has_half_a_character(prompt: str, answer: str) -> None:
    pieces = streamed(Detokenizer(decode_bytes, prompt.encode(), one_byte), answer.encode())
    assert "".join(pieces) == answer
    assert not any(REPLACEMENT in piece for piece in pieces)


anything = st.text(st.sampled_from("ab é你😀\ufffd\n"), max_size=12)


@given(anything, anything)
def test_a_replacement_character_is_one_as_any_other(prompt: str, answer: str) -> None:
    pieces = streamed(Detokenizer(decode_bytes, prompt.encode(), one_byte), answer.encode())
    assert "".join(pieces) == answer


@given(anything.filter(bool), st.data())
def test_what_a_prompt_breaks_off_in_the_middle_of_is_whole_in_the_answer_and_never_half(
    text: str, data: st.DataObject
) -> None:
    whole = text.encode()
    at = data.draw(st.integers(1, len(whole)))
    shown = "".join(streamed(Detokenizer(decode_bytes, whole[:at], one_byte), whole[at:]))
    begun = codecs.getincrementaldecoder("utf-8")().decode(whole[:at])
    assert begun + shown == text


@pytest.mark.parametrize("before", ["", "你", "你你"])
def test_replacement_characters_in_a_row_are_all_given_out_wherever_the_prompt_ends(before: str) -> None:
    for number in range(1, 12):
        whole = (before + REPLACEMENT * number).encode()
        for at in range(len(whole)):
            shown = "".join(streamed(Detokenizer(decode_bytes, whole[:at], one_byte), whole[at:]))
            begun = codecs.getincrementaldecoder("utf-8")().decode(whole[:at])
            assert begun + shown == before + REPLACEMENT * number, (number, at)


@given(anything.filter(bool), st.integers(1, 3), st.text(st.sampled_from("ab é\ufffd"), max_size=5))
def test_what_a_prompt_breaks_off_and_the_answer_does_not_complete_is_no_part_of_it(
    prompt: str, missing: int, answer: str
) -> None:
    begun = prompt.encode()[:-missing]
    shown = "".join(streamed(Detokenizer(decode_bytes, begun, one_byte), answer.encode()))
    assert shown == answer


@given(text.filter(bool), st.integers(1, 3))
def test_a_character_that_never_ends_is_dropped(answer: str, missing: int) -> None:
    cut = answer.encode()[:-missing]
    assert "".join(streamed(Detokenizer(decode_bytes, (), one_byte), cut)) == cut.decode(errors="ignore")


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_come_out_as_decoding_them_at_once_does(ids: list[int]) -> None:
    pieces = streamed(Detokenizer(decode_bytes, (), one_byte), ids)
    assert "".join(pieces).rstrip(REPLACEMENT) == decode_bytes(ids).rstrip(REPLACEMENT)


def test_rubbish_is_not_held_back_forever_nor_decoded_again_and_again() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode, (), one_byte)
    shown = "".join(detokenizer.add(0xFF) for _ in range(500))
    assert len(shown) >= 490
    assert longest < 30


@pytest.mark.parametrize(
    "sentence", ["你好，世界。今天天气很好", "😀🎉🚀👩‍🚀 done", "café naïve Zürich", "plain words only"]
)
def test_with_a_trained_tokenizer(reference: Any, sentence: str) -> None:
    tokenizer = reference.tokenizer
    ids = tokenizer.encode(sentence)
    single = [tokenizer.decode([token]) for token in ids]
    assert sentence.isascii() or any(REPLACEMENT in piece for piece in single), "nothing is split"
    pieces = streamed(
        Detokenizer(tokenizer.decode, (), lambda token: TokenPieces(tokenizer).of(token)[1]), ids
    )
    assert "".join(pieces) == sentence
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_the_blank_before_the_first_word_stays() -> None:
    # Like SentencePiece's decoders, which drop the blank at the start of what they are given.
    words = {1: " Hello", 2: " world"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[token] for token in ids).removeprefix(" ")

    assert streamed(Detokenizer(decode, [1], lambda token: words[token].encode()), [2, 1]) == [
        " world",
        " Hello",
        "",
    ]


def brute_force(whole: str, stop: Sequence[str]) -> str:
    """The text up to the stop string that is complete first, found by looking at every beginning."""
    for end in range(len(whole) + 1):
        matches = [string for string in stop if string and whole[:end].endswith(string)]
        if matches:
            return whole[: end - max(map(len, matches))]
    return whole


letters = st.text("ab", max_size=6)


@given(st.lists(letters, max_size=12), st.lists(letters, max_size=3))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    expected = brute_force("".join(pieces), stop)
    for piece in pieces:
        shown += matcher.add(piece)
        assert expected.startswith(shown), "shown text cannot be taken back"
    whole = "".join(pieces)
    assert (matcher.matched is not None) == (expected != whole)
    if matcher.matched is not None:
        assert matcher.matched in stop
        assert whole.startswith(expected + matcher.matched)
    assert shown + matcher.flush() == expected


def test_only_what_could_start_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.add("hello <") == "hello "
    assert matcher.add("b> and </e") == "<b> and "
    assert matcher.add("nd> more") == ""
    assert matcher.matched == "</end>"
