"""How long an answer may be: what the client asks, what the app gives, what the context leaves."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.sections.serve import LimitsConfig
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError
from serve_apps.openai.parse import parse
from serve_apps.openai.schema import CompletionRequest, Request
from serve_apps.replica.fit import fit, most_tokens

PROMPT = {"prompt": "x"}


def chat(**fields: Any) -> Request:
    return parse(ChatRequest, {"model": "chat", "messages": [{"role": "user", "content": "a"}], **fields})


def length(limits: LimitsConfig, prompt_tokens: int, context: int, **fields: Any) -> int:
    """Tokens of the answer to a chat whose prompt has so many."""
    asked = most_tokens(chat(**fields), limits)
    return fit(PROMPT, prompt_tokens, context, asked=asked, limit=limits.max_tokens, sampling={}).max_tokens


def test_without_a_number_an_answer_may_fill_what_the_context_leaves() -> None:
    assert LimitsConfig().max_tokens is None
    assert length(LimitsConfig(), 1000, 32_768) == 31_768
    assert length(LimitsConfig(), 1000, 32_768, max_tokens=20_000) == 20_000
    with pytest.raises(ApiError, match="maximum context length"):
        length(LimitsConfig(), 1000, 32_768, max_tokens=32_000)


def test_a_limit_that_is_set_is_the_most_and_what_is_given_without_a_number() -> None:
    limits = LimitsConfig(max_tokens=100)
    assert length(limits, 10, 1000) == 100
    assert length(limits, 950, 1000) == 50
    assert length(limits, 10, 1000, max_tokens=100) == 100


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_than_the_limit_is_refused_by_the_name_that_the_client_used_or_clamped(field: str) -> None:
    with pytest.raises(ApiError, match=f"'{field}' is 101; 'chat' gives at most 100") as refused:
        length(LimitsConfig(max_tokens=100), 10, 1000, **{field: 101})
    assert refused.value.param == field
    clamped = LimitsConfig(max_tokens=100, over_max_tokens="clamp")
    assert length(clamped, 10, 1000, **{field: 101}) == 100


def test_an_answer_cannot_have_to_be_longer_than_it_may_be() -> None:
    with pytest.raises(ApiError, match="'min_tokens' is 60, but the answer may have 50") as refused:
        fit(PROMPT, 950, 1000, asked=None, limit=None, sampling={"min_tokens": 60})
    assert refused.value.param == "min_tokens"


def test_the_newer_name_counts_where_both_are_given() -> None:
    limits = LimitsConfig(max_tokens=100)
    assert most_tokens(chat(max_tokens=500, max_completion_tokens=7), limits) == 7
    assert most_tokens(parse(CompletionRequest, {"model": "chat", "prompt": "a"}), limits) is None
