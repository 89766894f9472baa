"""Reads the body of a request: bounded, as JSON, with a sentence for everything that can be wrong."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from serve_apps.openai_errors import bad_request, body_too_large

__all__ = ["ClientDisconnect", "read_body", "read_json"]


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes; what is larger is not read to its end.

    Raises:
        ApiError: 413.
        ClientDisconnect: the client went away first.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
    return b"".join(parts)


def read_json(body: bytes) -> Any:
    """The document in a body.

    Raises:
        ApiError: 400; it is no JSON, or JSON that no client means (NaN, half a surrogate pair).
    """
    try:
        document = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:
            # Half of a surrogate pair is valid JSON, but no text that a tokenizer could read.
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    except UnicodeError:
        raise bad_request(
            "The request body holds text that is not valid Unicode.", code="invalid_json"
        ) from None
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
