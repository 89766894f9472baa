"""Whether a prompt and the answer asked for fit in a model's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.serve_section import LimitsConfig
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
    if context_length - prompt_tokens < (asked or 1):
        raise too_long(prompt_tokens, context_length, asked, param)


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
    most = asked or (room if limit is None else min(limit, room))
    if sampling.get("min_tokens", 0) > most:
        raise bad_request(
            f"'min_tokens' is {sampling['min_tokens']}, but the answer may have {most} tokens.",
            param="min_tokens",
            code="invalid_value",
        )
    return SamplingParams(max_tokens=most, **sampling)
