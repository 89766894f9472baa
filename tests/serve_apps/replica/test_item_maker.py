"""What a gateway is told of prompts and tokens, by a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.engine.protocol import Delta, TokenLogprob
from serve_apps.openai.errors import ApiError
from serve_apps.replica.fit import MOST_SCORES, cut, fit
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.prompts import Prompts
from tests.serve_apps.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Prompts(str(directory))


def first(prompts: Prompts, prompt: Any, delta: Delta, whole: bool = True, **request: Any) -> dict[str, Any]:
    maker = ItemMaker(
        prompts,
        {"prompt": prompt, "sampling": {}, **request},
        prompts.encode({"prompt": prompt}),
        whole=whole,
    )
    item = maker.item(delta)
    assert "prompt" not in maker.item(delta), "only the first item tells of it"
    return item


def test_only_what_was_asked_for_is_told(prompts: Prompts) -> None:
    item = first(prompts, "ab", Delta("x", (5,), cached_tokens=3))
    assert item == {"text": "x", "token_ids": (5,), "cached_tokens": 3}


def test_an_echo_is_the_text_that_was_sent_or_what_is_left_of_it(prompts: Prompts) -> None:
    ids = prompts.encode({"prompt": "ab"})
    assert first(prompts, "ab", Delta(), echo=True)["prompt"] == {"text": "ab"}
    assert first(prompts, [0, *ids], Delta(), echo=True)["prompt"] == {"text": "<|end|>ab"}
    assert first(prompts, "ab", Delta(), whole=False, echo=True, token_ids=True)["prompt"] == {
        "text": "ab",
        "token_ids": ids,
    }


@pytest.mark.parametrize("by_id", [False, True])
def test_tokens_of_a_prompt_are_told_with_their_numbers(by_id: bool, prompts: Prompts) -> None:
    a, b = prompts.encode({"prompt": "ab"})
    scores = (TokenLogprob(b, -1.0, ((a, -0.5),), 2),)
    asked: dict[str, Any] = {"sampling": {"prompt_logprobs": 1}, "names_are_ids": by_id}
    delta = Delta("x", (a,), (TokenLogprob(a, -0.1),), prompt_logprobs=scores)
    item = first(prompts, "ab", delta, **asked)
    name_a, name_b = (f"token_id:{a}", f"token_id:{b}") if by_id else ("a", "b")
    assert item["prompt"]["logprobs"] == [
        (name_a, b"a", None, [], a, None),
        (name_b, b"b", -1.0, [(name_a, b"a", a, -0.5), (name_b, b"b", b, -1.0)], b, 2),
    ]
    assert item["logprobs"] == [(name_a, b"a", -0.1, [])]


def test_a_tokenizer_tells_what_json_can_hold(prompts: Prompts) -> None:
    import json

    info = json.loads(json.dumps(prompts.info()))
    assert (info["eos_token"], info["bos_token"]) == ("<|end|>", None)
    assert info["tokenizer_class"]
    assert not {"tokenizer_file", "name_or_path"} & info.keys()
    assert prompts.names(prompts.encode({"prompt": "a b"})) == ["a", "Ġ", "b"]


@pytest.mark.parametrize(
    ("asked", "answer", "left"),
    [
        ({}, 5, [1, 2, 3, 4, 5, 6]),
        ({"cut": 9}, 5, [1, 2, 3, 4, 5, 6]),
        ({"cut": 2}, 5, [5, 6]),
        ({"cut": 2, "cut_side": "right"}, 5, [1, 2]),
        ({"cut": -1}, 7, [4, 5, 6]),
        ({"cut": -1}, None, [1, 2, 3, 4, 5, 6]),
        ({"cut": -1}, 10, [6]),
    ],
    ids=str,
)
def test_of_a_prompt_as_much_is_read_as_was_asked_for(
    asked: dict[str, Any], answer: int | None, left: list[int]
) -> None:
    assert cut([1, 2, 3, 4, 5, 6], asked, 10, answer) == left


def test_more_than_the_context_is_no_length_and_more_numbers_than_an_answer_has_are_refused() -> None:
    with pytest.raises(ApiError, match="'truncate_prompt_tokens' is 11"):
        cut([1], {"cut": 11}, 10, 1)
    context = 2 * MOST_SCORES

    def scored(number: int) -> int:
        sampling = {"prompt_logprobs": number}
        return fit({"prompt": ""}, MOST_SCORES, context, asked=1, limit=None, sampling=sampling).max_tokens

    assert scored(0) == 1
    with pytest.raises(ApiError) as refused:
        scored(1)
    assert refused.value.param == "prompt_logprobs"
    assert fit({"prompt": ""}, 10, 10, asked=0, limit=None, sampling={"prompt_logprobs": 0}).max_tokens == 0
