"""Errors as the OpenAI API gives them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.wording import logs_of
from serve_apps.openai.answers import ErrorAnswer


class ApiError(Exception):
    """An answer that is an error; `param` names the request's field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.retry_elsewhere = retry_elsewhere
        """Whether another replica may do better (this one is broken or leaving)."""

    def body(self) -> ErrorAnswer:
        """The document that the client sees."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def as_item(self) -> dict[str, Any]:
        """What a replica sends to the gateway in place of tokens; `from_item` reads it."""
        return {**self.body(), "status": self.status, "retry_elsewhere": self.retry_elsewhere}

    @classmethod
    def from_item(cls, item: Mapping[str, Any]) -> ApiError:
        error = item["error"]
        return cls(
            item["status"],
            error["message"],
            kind=error["type"],
            param=error["param"],
            code=error["code"],
            headers={"Retry-After": "1"} if item["status"] in (429, 503) else None,
            retry_elsewhere=item["retry_elsewhere"],
        )


def shortened(given: str) -> str:
    """What a client sent, as an answer may repeat it."""
    return given if len(given) <= 60 else given[:57] + "…"


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_long(prompt_tokens: int, context_length: int, max_tokens: int | None, param: str) -> ApiError:
    """The prompt, with the answer asked for, does not fit in the model's context."""
    asked = f" and the answer may have {max_tokens}" if max_tokens else ""
    return bad_request(
        f"This model's maximum context length is {context_length} tokens, but the prompt has "
        f"{prompt_tokens}{asked}. Shorten the prompt{' or ask for fewer tokens' if max_tokens else ''}.",
        param=param,
        code="context_length_exceeded",
    )


def too_many_tokens(asked: int, model: str, limit: int, param: str) -> ApiError:
    """More tokens are asked for than the app gives to one request."""
    return bad_request(
        f"'{param}' is {asked}; '{model}' gives at most {limit}.",
        param=param,
        code="max_tokens_exceeded",
    )


def unknown_model(model: str, known: list[str], *, some_hidden: bool = False) -> ApiError:
    """There is no such model, or (`some_hidden`) maybe one that the caller's key does not open."""
    missing = "does not exist, or this API key does not open it" if some_hidden else "does not exist"
    none = "This key opens no model that is served now" if some_hidden else "No model is served now"
    served = f"{'This key opens' if some_hidden else 'This gateway serves'}: {', '.join(known)}."
    return ApiError(
        404,
        f"The model '{shortened(model)}' {missing}. {served if known else none + '.'}",
        param="model",
        code="model_not_found",
    )


def not_kept() -> ApiError:
    """What clients ask of a response that was sent before."""
    return ApiError(
        404,
        "This server keeps no responses: each is gone when it has been sent. POST /v1/responses makes one.",
        code="not_found",
    )


def not_allowed(app: str) -> ApiError:
    return ApiError(
        403, f"This API key does not open the model '{app}'.", param="model", code="model_not_allowed"
    )


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the most this gateway takes.",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def queue_full(app: str) -> ApiError:
    return ApiError(
        429,
        f"As many requests wait for '{app}' as may wait; try again in a moment.",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "1"})


def replica_lost() -> ApiError:
    return ApiError(
        503,
        "The replica that answered this request ended; send the request again.",
        kind="server_error",
        code="replica_lost",
        headers={"Retry-After": "1"},
        retry_elsewhere=True,
    )


def gateway_unreachable(node: str, endpoint: str) -> ApiError:
    """A replica has no way to the gateway by which to send tokens; another may have one."""
    return ApiError(
        503,
        f"The replica on {node} cannot reach the gateway at {endpoint}, where tokens are received: something"
        " between them blocks that port (cluster.gateway.token_ports names ports that may be opened).",
        kind="server_error",
        code="gateway_unreachable",
        headers={"Retry-After": "1"},
        retry_elsewhere=True,
    )


def engines_broke(app: str, request_id: str) -> ApiError:
    """More than one engine broke under the request: sent again, it would break the next one."""
    return bad_request(
        "Two engines broke while they answered this request, so it is not sent to another one. Do not send it"
        f" again as it is; {logs_of(app, request=request_id)} says what broke.",
        code="engines_broke",
    )


def answer_failed(message: str, *, own_fault: bool) -> ApiError:
    """An answer could not go on, by what the request asks for (`own_fault`) or by the model."""
    status, kind = (400, "invalid_request_error") if own_fault else (500, "server_error")
    return ApiError(status, f"The answer cannot go on: {message}.", kind=kind, code="answer_failed")


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504, f"The request was not done after {seconds:g} s.", kind="server_error", code="timeout"
    )


def unsupported_media_type(given: str) -> ApiError:
    return ApiError(
        415,
        "The request body must be JSON: send 'Content-Type: application/json' "
        f"(given: {shortened(given)!r}).",
        code="unsupported_media_type",
    )


def unsupported_coding(given: str) -> ApiError:
    return ApiError(
        415,
        f"The request body must not be compressed (given: 'Content-Encoding: {shortened(given)}').",
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": "identity"},
    )


def too_slow(what: str, seconds: float) -> ApiError:
    """The client sends too slowly."""
    return ApiError(
        408,
        f"{what} was not there after {seconds:g} s.",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def internal(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")
