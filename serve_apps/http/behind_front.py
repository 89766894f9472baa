"""What a gateway behind a front takes, and from whom it takes it to come."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_apps.front.secret import HEADER, ID_HEADER, SENT_HEADER
from serve_apps.http.request_record import current_record
from serve_apps.openai.errors import ApiError

DIRECT = "shoal.direct"
"""Set in the scope of a request that did not come through the front."""
SENT = "shoal.sent"
"""In the scope of one that did: its id, and when the front has sent it first (Unix time of its clock)."""
_OPEN_TO_ALL = frozenset({"/health", "/ping", "/version"})
_FOR_OBSERVERS = frozenset({"/metrics", "/load"})


class BehindFront:
    """Who asks is who the front says, by a secret that only it knows. Whoever else comes is told nothing
    where nobody needs a key: then the gateway can be reached from where the front cannot.

    Args:
        secret: see `front_secret`.
        has_keys: whether who asks needs a key.
    """

    def __init__(self, app: ASGIApp, secret: str, *, has_keys: bool) -> None:
        self._app = app
        self._secret = secret.encode()
        self._has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if hmac.compare_digest(headers.get(HEADER, "").encode(), self._secret):
            scope["client"] = headers.get("x-forwarded-for", ""), 0
            scope["scheme"] = headers.get("x-forwarded-proto", scope.get("scheme", "http"))
            scope[SENT] = headers.get(ID_HEADER, ""), int(headers.get(SENT_HEADER, "0")) / 1000
        elif self._has_keys or scope["path"] in _OPEN_TO_ALL | _FOR_OBSERVERS:
            scope[DIRECT] = True
        else:
            error = ApiError(
                403,
                "This gateway is asked through its front; `shoal status` says where that is.",
                code="not_through_the_front",
            )
            current_record().error = error.code
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)
