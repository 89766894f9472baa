"""What clients do with methods and paths, and every other server takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class Lenient:
    """Before the routes: slashes too many do not matter, HEAD is GET without a body, OPTIONS names methods.

    Args:
        methods: of the routes that a scope's path leads to; empty where it leads nowhere.
    """

    def __init__(self, app: ASGIApp, methods: Callable[[Scope], Collection[str]]) -> None:
        self._app = app
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        usual = "//" not in path and (path == "/" or path[-1:] != "/")
        if usual and scope["method"] not in ("HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        path = _SLASHES.sub("/", path)
        inner = {**scope, "path": path.rstrip("/") or "/"}
        if scope["method"] == "OPTIONS" and (methods := {*self._methods(inner)}):
            allowed = {*methods, "OPTIONS", *({"HEAD"} if "GET" in methods else ())}
            await Response(status_code=204, headers={"Allow": ", ".join(sorted(allowed))})(
                scope, receive, send
            )
            return
        if scope["method"] == "HEAD":
            inner["method"] = "GET"
            send = _without_body(send)
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]  # for whoever counts requests by it


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
