"""Whether a prompt and the answer asked for fit in a model's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.sections.serve import LimitsConfig
from serve_apps.engine.protocol import SamplingParams
from serve_apps.openai.errors import bad_request, too_long, too_many_tokens
from serve_apps.openai.schema import Request


def most_tokens(request: Request, limits: LimitsConfig) -> int | None:
    """Most tokens of each answer to a request, by the app's limits; None: as many as there is room for.

    Raises:
        ApiError: more are asked for than the app gives.
    """
    asked = request.most_tokens
    if asked is None or limits.max_tokens is None or asked <= limits.max_tokens:
        return asked
    if limits.over_max_tokens == "clamp":
        return limits.max_tokens
    raise too_many_tokens(asked, request.model, limits.max_tokens, request.most_tokens_field)


def check_fit(prompt_tokens: int, context_length: int, asked: int | None, param: str) -> None:
    """Raise ApiError where a prompt does not fit in a model's context with the answer asked for.

    Args:
        asked: tokens of the answer; None: at least one.
        param: the request's field that has the prompt.
    """
    if context_length - prompt_tokens < (1 if asked is None else asked):
        raise too_long(prompt_tokens, context_length, asked, param)


MOST_SCORES = 2**18
"""Most log-probabilities of one prompt, its tokens' own and those of alternatives."""


def cut_to(asked: int | None, context_length: int, answer_tokens: int | None) -> int | None:
    """Tokens of a prompt that are kept; None: all.

    Args:
        asked: so many; -1: as many as leave room for the answer.
        answer_tokens: of the answer; None: at least one.

    Raises:
        ApiError: more than the context has.
    """
    if asked is None or asked >= 0:
        if asked is not None and asked > context_length:
            raise bad_request(
                f"'truncate_prompt_tokens' is {asked}; this model's context has {context_length} tokens.",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        return asked
    return max(1, context_length - (1 if answer_tokens is None else answer_tokens))


def cut(
    tokens: list[int],
    request: Mapping[str, Any],
    context_length: int,
    answer_tokens: int | None,
    *,
    side: str = "left",
) -> list[int]:
    """A prompt's tokens as far as a request wants them read: its fields `cut` and `cut_side`.

    Args:
        side: where it is cut unless the request says it; "left" keeps its end.
    """
    most = cut_to(request.get("cut"), context_length, answer_tokens)
    if most is None or len(tokens) <= most:
        return tokens
    return tokens[-most:] if request.get("cut_side", side) == "left" else tokens[:most]


def fit(
    prompt: Mapping[str, Any],
    prompt_tokens: int,
    context_length: int,
    *,
    asked: int | None,
    limit: int | None,
    sampling: Mapping[str, Any],
) -> SamplingParams:
    """Sampling parameters with `max_tokens` fixed.

    Args:
        prompt: has `prompt` or `messages`.
        asked: tokens of the answer; None: as many as the limit allows and the context has room for.
        sampling: the other fields of SamplingParams.

    Raises:
        ApiError: prompt and answer do not fit, or the answer is to be longer than it may be.
    """
    check_fit(prompt_tokens, context_length, asked, "messages" if "messages" in prompt else "prompt")
    room = context_length - prompt_tokens
    most = asked if asked is not None else room if limit is None else min(limit, room)
    if sampling.get("min_tokens", 0) > most:
        raise bad_request(
            f"'min_tokens' is {sampling['min_tokens']}, but the answer may have {most} tokens.",
            param="min_tokens",
            code="invalid_value",
        )
    scores = sampling.get("prompt_logprobs")
    if scores is not None and prompt_tokens * (scores + 1) > MOST_SCORES:
        raise bad_request(
            f"The log-probabilities of the prompt's {prompt_tokens} tokens, with {scores} alternatives each,"
            f" are more than an answer's {MOST_SCORES}; shorten the prompt or ask for fewer alternatives.",
            param="prompt_logprobs",
            code="invalid_value",
        )
    return SamplingParams(max_tokens=most, **sampling)
