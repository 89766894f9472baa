"""Errors as Anthropic's API gives them: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from collections.abc import Mapping

from serve_apps.anthropic.answers import MessagesErrorAnswer
from serve_apps.openai.errors import ApiError

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str | None) -> MessagesErrorAnswer:
    """The document that the client sees."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, usual)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }
