"""What a client is told where an engine refuses its request, or cannot go on with its answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from serve_apps.engine.protocol import (
    STRUCTURES,
    AnswerError,
    PromptError,
    QueueFullError,
    UnsupportedError,
)
from serve_apps.openai.errors import ApiError, answer_failed, bad_request, queue_full

logger = logging.getLogger(__name__)

REFUSALS = (PromptError, UnsupportedError, QueueFullError, AnswerError)
"""What an engine raises of one request; it goes on with all others."""


def refusal(
    error: PromptError | UnsupportedError | QueueFullError | AnswerError, request: Mapping[str, Any], app: str
) -> ApiError:
    """An engine's refusal, in the words and the fields of the API.

    Args:
        request: see `Replica.generate`.
    """
    if isinstance(error, PromptError):
        return bad_request(f"{error}.", param=_param(error.field, request), code="invalid_value")
    if isinstance(error, UnsupportedError):
        return bad_request(f"{error}.", code="unsupported_parameter")
    if isinstance(error, QueueFullError):
        return queue_full(app)
    logger.error("an answer cannot go on: %s", error)
    return answer_failed(str(error), own_fault=error.own_fault)


def _param(field: str, request: Mapping[str, Any]) -> str:
    """The field of OpenAI's request that a field of the engine's stands for."""
    if field == "prompt":
        return "messages" if "messages" in request else "prompt"
    if field in STRUCTURES:
        if request.get("reading", {}).get("mode") in ("required", "named"):
            return "tools"  # the calls that it forces are held to their functions' schemas
        return str(request.get("structure_field", "response_format"))
    return {"include_stop": "include_stop_str_in_output"}.get(field, field)
