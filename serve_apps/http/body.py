"""Reads the body of a request: bounded, as JSON, with a sentence for everything that can be wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from serve_apps.openai.errors import (
    bad_request,
    body_too_large,
    shortened,
    too_slow,
    unsupported_coding,
    unsupported_media_type,
)

__all__ = ["ClientDisconnect", "in_thread_if_large", "read_body", "read_json"]

Result = TypeVar("Result")

LARGE_BYTES = 64 * 1024
"""A body from which on its request is worked on beside the event loop, so that the others go on."""
BODY_S = 30.0
"""How long a body may take to arrive..."""
BODY_BYTES_PER_S = 4096
"""...and a second longer for so many bytes of it that have arrived."""

_JSON = re.compile(r"application/(json|[\w.-]+\+json)", re.ASCII)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes; what is larger, or comes too slowly, is not read to its end.

    Raises:
        ApiError: 408, 413, 415.
        ClientDisconnect: the client went away first.
    """
    media_type = request.headers.get("content-type")
    if media_type is not None and not _JSON.fullmatch(media_type.partition(";")[0].strip().lower()):
        raise unsupported_media_type(media_type)
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        raise unsupported_coding(coding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_S) as patience:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise body_too_large(limit)
                parts.append(part)
                patience.reschedule(began + BODY_S + size / BODY_BYTES_PER_S)
    except TimeoutError:
        raise too_slow("The request's body", BODY_S + size / BODY_BYTES_PER_S) from None
    return b"".join(parts)


async def in_thread_if_large(body: bytes, work: Callable[[], Result]) -> Result:
    """The result of what is done with a body, done in a thread where the body is large."""
    return work() if len(body) < LARGE_BYTES else await asyncio.to_thread(work)


def read_json(body: bytes) -> Any:
    """The document in a body.

    Raises:
        ApiError: 400; it is no JSON, or JSON that no client means (NaN, 1e999, half a surrogate pair).
    """
    try:
        with _without_collector() if len(body) >= LARGE_BYTES else nullcontext():
            document = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
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


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is collected meanwhile.

    A document of many small lists is all the time that nobody else can run until it is read, and four fifths
    of that time the collector looks through what was read so far, which is no garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shortened(text)} is larger than any number that can be read")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
