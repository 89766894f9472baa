"""Whether a prompt and the answer asked for fit in a model's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_apps.engine.protocol import SamplingParams
from serve_apps.openai.errors import too_long


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
    limit: int,
    sampling: Mapping[str, Any],
) -> SamplingParams:
    """Sampling parameters with `max_tokens` fixed.

    Args:
        prompt: has `prompt` or `messages`.
        asked: tokens of the answer; None: as many as the limit allows and the context has room for.
        sampling: the other fields of SamplingParams.

    Raises:
        ApiError: prompt and answer do not fit.
    """
    check_fit(prompt_tokens, context_length, asked, "messages" if "messages" in prompt else "prompt")
    return SamplingParams(max_tokens=asked or min(limit, context_length - prompt_tokens), **sampling)
