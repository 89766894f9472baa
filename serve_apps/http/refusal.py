"""Answers to what is no request that can be served: they too have an id, are counted and logged."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope

from serve_apps.openai.errors import ApiError, bad_request

REFUSAL = "shoal.refusal"
"""Extension of a scope that is no readable request: the ApiError to answer with."""


async def refusal(app: ASGIApp, error: ApiError, client: object, server: object) -> bytes:
    """What `app` answers to a client whose request cannot be read: a whole answer of HTTP/1.1, the last one.

    Args:
        client, server: the connection's ends, as ASGI has them.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "",
        "path": "",
        "query_string": b"",
        "headers": [],
        "client": client,
        "server": server,
        "scheme": "http",
        "extensions": {REFUSAL: error},
    }
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            parts.append(_head(message["status"], message["headers"]))
        else:
            parts.append(message.get("body", b""))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await app(scope, receive, send)
    return b"".join(parts)


def _head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    kept = [(name, value) for name, value in headers if name != b"connection"]
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in [*kept, (b"connection", b"close")]]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def not_http() -> ApiError:
    return bad_request("This is not HTTP/1.1 that the gateway can read.", code="invalid_http")


def head_too_large(most_bytes: int) -> ApiError:
    return ApiError(
        431,
        f"The request's line and headers are larger than {most_bytes} bytes, the most that is taken.",
        code="headers_too_large",
    )


def too_many_pipelined(most: int) -> ApiError:
    return bad_request(
        f"At most {most} requests of one connection may wait for their answers.", code="too_many_pipelined"
    )


def too_many_connections() -> ApiError:
    return ApiError(
        503,
        "The gateway has as many connections as it can have; try again in a moment.",
        kind="server_error",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )
