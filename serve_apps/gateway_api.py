"""The gateway over HTTP: OpenAI's endpoints, health, metrics; every error in OpenAI's shape."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_apps.app_table import AppVersion
from serve_apps.event_stream import CLIENT_CLOSED
from serve_apps.gateway_call import Call
from serve_apps.gateway_service import GatewayService
from serve_apps.gateway_text import TextCall
from serve_apps.openai_answers import ChatAnswer, CompletionAnswer, ErrorAnswer, ModelCard, ModelList
from serve_apps.openai_errors import ApiError, unknown_model
from serve_apps.openai_format import ChatFormat, CompletionFormat
from serve_apps.openai_schema import ChatRequest, CompletionRequest
from serve_apps.text_schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

Handler = TypeVar("Handler", bound=Callable[..., Any])

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_api(service: GatewayService, *, add_request_id: bool = True) -> FastAPI:
    """The gateway as an ASGI application.

    Args:
        add_request_id: send `x-request-id` with every answer; False where the server in front does.
    """
    api = FastAPI(title="Shoal", summary="OpenAI-compatible serving", docs_url=None, redoc_url=None)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 413, 429, 503, 504)
    }

    def post(path: str, kind: type[BaseModel], answer: type[BaseModel]) -> Callable[[Handler], Handler]:
        """Register what answers a POST whose body is of this kind."""
        extra = _body_of(kind)
        return api.post(path, response_model=answer, responses=errors, openapi_extra=extra, tags=["models"])

    @api.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        """The gateway lives."""
        return {"status": "ok"}

    @api.get("/ready", tags=["operations"])
    async def ready() -> Response:
        """200 when every app could answer now, else 503."""
        waiting = service.table.not_ready() if service.table is not None else []
        if service.table is not None and not waiting:
            return JSONResponse({"status": "ready", "apps": service.table.names})
        what = f"Not ready: {', '.join(waiting)}." if waiting else "The apps are not known yet."
        error = ApiError(503, what, kind="server_error", code="not_ready")
        return JSONResponse({**error.body(), "waiting_for": waiting}, 503)

    @api.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/apps", responses={401: {"model": ErrorAnswer}}, tags=["operations"])
    async def apps(request: Request) -> dict[str, dict[str, Any]]:
        """What each app was deployed with, and whether it is ready; looked up at this moment."""
        service.access.admin(request.headers.get("authorization", ""))
        table = service.table = await service.refresh()
        return {
            app: {"spec": versions[0].spec.as_json(), "ready": versions[0].ready}
            for app, versions in table.versions.items()
        }

    @api.get("/v1/models", response_model=ModelList, responses={401: {"model": ErrorAnswer}}, tags=["models"])
    async def models(request: Request) -> Response:
        """The apps of this gateway that the caller may ask."""
        caller = service.access.caller(request.headers.get("authorization", ""))
        table = service.table
        versions = [table.find(name) for name in table.names if caller.sees(name)] if table else []
        return JSONResponse({"object": "list", "data": [_card(v) for v in versions if v]})

    @api.get("/v1/models/{model}", response_model=ModelCard, responses=errors, tags=["models"])
    async def model(model: str, request: Request) -> Response:
        """One app."""
        caller = service.access.caller(request.headers.get("authorization", ""))
        version = service.table.find(model) if service.table else None
        if version is None or not caller.sees(model):
            names = service.table.names if service.table else []
            raise unknown_model(model, [name for name in names if caller.sees(name)])
        return JSONResponse(_card(version))

    @post("/v1/completions", CompletionRequest, CompletionAnswer)
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await Call(service, request, CompletionRequest, CompletionFormat).answer()

    @post("/v1/chat/completions", ChatRequest, ChatAnswer)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await Call(service, request, ChatRequest, ChatFormat).answer()

    @post("/v1/embeddings", EmbeddingRequest, EmbeddingAnswer)
    async def embeddings(request: Request) -> Response:
        """The mean of each input's last hidden states."""
        return await TextCall(service, request).embeddings()

    @post("/tokenize", TokenizeRequest, TokenizeAnswer)
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation."""
        return await TextCall(service, request).tokenize()

    @post("/detokenize", DetokenizeRequest, DetokenizeAnswer)
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await TextCall(service, request).detokenize()

    @api.exception_handler(ApiError)
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers)

    @api.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {
            404: f"There is nothing at {request.url.path}; see /openapi.json.",
            405: f"{request.method} is not allowed at {request.url.path}.",
        }
        message = known.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        shaped = ApiError(error.status_code, message, code=code, headers=error.headers)
        return JSONResponse(shaped.body(), shaped.status, shaped.headers)

    @api.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        # Starlette logs the traceback; the client learns no internals.
        failed = ApiError(500, "The gateway failed; see its log.", kind="server_error", code="internal_error")
        return JSONResponse(failed.body(), 500)

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _openapi(api)
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]
    if add_request_id:
        api.add_middleware(_RequestId)
    return api


class _RequestId:
    """Gives every answer an `x-request-id`: the client's, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _card(version: AppVersion) -> dict[str, Any]:
    return {
        "id": version.spec.name,
        "object": "model",
        "created": version.created,
        "owned_by": "shoal",
        "version": version.spec.model_version,
        "context_length": version.context_length,
    }


_SCHEMAS = "#/components/schemas/{model}"


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The request body's part of the OpenAPI document; bodies are read by hand, to bound them."""
    reference = {"$ref": _SCHEMAS.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _openapi(api: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=api.title, version=api.version, summary=api.summary, routes=api.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    kinds: tuple[type[BaseModel], ...] = (
        *(CompletionRequest, ChatRequest),
        *(EmbeddingRequest, TokenizeRequest, DetokenizeRequest),
    )
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=_SCHEMAS)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return document
