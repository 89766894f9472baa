"""Log-probabilities as clients read them: bytes, texts that are the same, numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.openai.chat_format import ChatFormat
from serve_apps.openai.format import (
    ChoiceEvent,
    CompletionFormat,
    Gathered,
    Heading,
    Logprob,
    usage,
)

HEADING = Heading("1", 1, "chat", 1, with_logprobs=True, with_usage=False)


def entry(piece: bytes, token_id: int = 1, *top: tuple[bytes, int, float], logprob: float = -1.0) -> Logprob:
    def shown(one: bytes) -> str:
        return one.decode("utf-8", "replace")

    return shown(piece), piece, logprob, [(shown(other), other, number, p) for other, number, p in top]


def item(text: str, *entries: Logprob) -> dict[str, Any]:
    return {"text": text, "token_ids": [1] * len(entries), "logprobs": list(entries)}


def completion(*items: dict[str, Any]) -> Any:
    gathered = Gathered(1)
    for one in items:
        gathered.add(ChoiceEvent(0, one))
    answer = CompletionFormat(HEADING).answer(gathered, usage([1], gathered))
    return json.loads(json.dumps(answer, allow_nan=False))["choices"][0]["logprobs"]


def test_half_characters_are_told_by_their_bytes_and_offsets_count_characters() -> None:
    emoji = "😀".encode()
    found = completion(
        item("", entry(b"a"), entry(emoji[:2])), item("a😀", entry(emoji[2:])), item("b", entry(b"b"))
    )
    assert found["tokens"] == ["a", r"bytes:\xf0\x9f", r"bytes:\x98\x80", "b"]
    assert found["text_offset"] == [0, 1, 1, 2]


def test_a_replacement_character_that_is_one_is_text() -> None:
    assert completion(item("\ufffd", entry("\ufffd".encode())))["tokens"] == ["\ufffd"]


def test_alternatives_of_the_same_text_are_kept_apart() -> None:
    same = entry(b"A", 5, (b"A", 5, -0.1), (b"A", 70, -2.0), (b"\xf0", 8, -3.0), (b"\xf1", 9, -4.0))
    (found,) = completion(item("A", same))["top_logprobs"]
    assert found == {"A": -0.1, "token_id:70": -2.0, r"bytes:\xf0": -3.0, r"bytes:\xf1": -4.0}


def test_without_alternatives_the_token_itself_is_there() -> None:
    assert completion(item("A", entry(b"A", logprob=-0.5)))["top_logprobs"] == [{"A": -0.5}]


def test_a_number_that_json_does_not_have_is_the_least_one() -> None:
    found = completion(item("A", entry(b"A", 1, (b"B", 2, -math.inf), logprob=-math.inf)))
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{"B": -9999.0, "A": -9999.0}]


@given(st.text(min_size=1), st.data())
def test_the_bytes_of_a_chats_tokens_are_its_text(text: str, data: st.DataObject) -> None:
    whole = text.encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)), max_size=8)) | {len(whole)})
    pieces = [whole[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    gathered = Gathered(1)
    gathered.add(ChoiceEvent(0, item(text, *(entry(piece) for piece in pieces))))
    (choice,) = ChatFormat(HEADING).answer(gathered, usage([1], gathered))["choices"]
    assert choice["logprobs"] is not None
    assert b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"]) == whole
