"""The gateway over HTTP: OpenAI's endpoints, health, metrics; every error in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from serve_apps.anthropic.answers import MessagesAnswer, MessagesErrorAnswer, MessagesEvent, TokenCount
from serve_apps.anthropic.errors import error_body
from serve_apps.anthropic.format import read_messages
from serve_apps.anthropic.schema import CountTokensRequest, MessagesRequest, read_count
from serve_apps.gateway.access import Caller, credential
from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.call import Call
from serve_apps.gateway.document import (
    ANY_ROUTE,
    MODEL_POST,
    body_of,
    events_too,
    openapi_document,
    refusals,
    streamed_too,
)
from serve_apps.gateway.embedding_call import EmbeddingCall
from serve_apps.gateway.operations import add_operations
from serve_apps.gateway.service import GatewayService
from serve_apps.gateway.text_call import TextCall
from serve_apps.http.accounts import RequestAccounts, gateway_failed
from serve_apps.http.behind_front import BehindFront
from serve_apps.http.leniency import Lenient
from serve_apps.http.request_record import CLIENT_CLOSED, current_id, current_record
from serve_apps.openai.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    EmbeddingAnswer,
    ErrorAnswer,
    ModelCard,
    ModelList,
    PoolingAnswer,
    RerankAnswer,
    ScoreAnswer,
    TokenizeAnswer,
    TokenizerInfo,
)
from serve_apps.openai.asked import read_chat, read_completion
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError, not_kept, unknown_model
from serve_apps.openai.responses_answers import InputTokens, ResponsesAnswer, ResponsesEvent, input_tokens_of
from serve_apps.openai.responses_format import read_response
from serve_apps.openai.responses_schema import ResponsesRequest, read_input
from serve_apps.openai.schema import CompletionRequest
from serve_apps.openai.text_schema import (
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

Handler = TypeVar("Handler", bound=Callable[..., Any])

_SHOWN_TO_PAGES = ("x-request-id", "x-shoal-replica", "x-shoal-model-version", "retry-after")
"""Headers that a browser lets a page of another origin see."""

_BODIES: tuple[type[BaseModel], ...] = (
    *(CompletionRequest, ChatRequest),
    *(EmbeddingRequest, PoolingRequest, ScoreRequest, RerankRequest, TokenizeRequest, DetokenizeRequest),
    *(ResponsesRequest, MessagesRequest, CountTokensRequest),
)


class _KeptResponse(Convertor[str]):
    """What stands behind /v1/responses/ and is about a response, not a route of its own."""

    regex = "(?!input_tokens$).*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("kept", _KeptResponse())


class _Api(FastAPI):
    """Keeps the accounts outside of everything, so that failures are in them too."""

    service: GatewayService

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = Lenient(super().build_middleware_stack(), self._methods)
        if self.service.options.cors:
            app = CORSMiddleware(
                app,
                allow_origins=self.service.options.cors,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=_SHOWN_TO_PAGES,
            )
        secret = self.service.options.front_secret
        if secret is not None:
            app = BehindFront(app, secret, has_keys=self.service.access.keys is not None)
        return RequestAccounts(app, self.service.metrics.count, self.service.load)

    def _methods(self, scope: Scope) -> set[str]:
        methods: set[str] = set()
        for route in self.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                methods |= route.methods or set()
        return methods

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi_document(
                self,
                _BODIES,
                (CompletionChunk, ChatChunk, ResponsesEvent, MessagesEvent, ErrorAnswer, MessagesErrorAnswer),
                ignore_unknown=self.service.options.ignore_unknown,
            )
        return self.openapi_schema


def build_api(service: GatewayService) -> FastAPI:
    """The gateway as an ASGI application."""
    api = _Api(
        title="Shoal",
        summary="OpenAI-compatible serving",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    api.service = service

    def post(
        path: str,
        kind: type[BaseModel],
        answer: type[Any],
        streamed: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
        *also: str,
        error: type[Any] = ErrorAnswer,
    ) -> Callable[[Handler], Handler]:
        """Register what answers a POST whose body is of this kind, under other paths `also`."""
        responses = {**refusals(MODEL_POST, error), **streamed}
        extra = body_of(kind)
        register = api.post(
            path, response_model=answer, responses=responses, openapi_extra=extra, tags=["models"]
        )

        def everywhere(handler: Handler) -> Handler:
            for other in also:
                api.post(other, include_in_schema=False, response_model=None)(handler)
            return register(handler)

        return everywhere

    def known_caller(request: Request) -> Caller:
        caller = service.access.caller(credential(request.headers))
        current_record().tenant = caller.tenant
        return caller

    @api.get("/v1/models", response_model=ModelList, responses=refusals((401, *ANY_ROUTE)), tags=["models"])
    async def models(request: Request) -> Response:
        """The apps of this gateway that the caller may ask."""
        caller = known_caller(request)
        table = service.table
        versions = [table.find(name) for name in table.names if caller.sees(name)] if table else []
        answer: ModelList = {"object": "list", "data": [_card(v) for v in versions if v]}
        return JSONResponse(answer)

    @api.get(
        "/v1/models/{model}",
        response_model=ModelCard,
        responses=refusals((401, 404, *ANY_ROUTE)),
        tags=["models"],
    )
    async def model(model: str, request: Request) -> Response:
        """One app."""
        caller = known_caller(request)
        version = service.table.find(model) if service.table else None
        if version is None or not caller.sees(model):
            names = service.table.names if service.table else []
            shown = [name for name in names if caller.sees(name)]
            raise unknown_model(model, shown, some_hidden=not caller.sees(model))
        return JSONResponse(_card(version))

    @post("/v1/completions", CompletionRequest, CompletionAnswer, streamed_too(CompletionChunk))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await Call(service, request, read_completion).answer()

    @post("/v1/chat/completions", ChatRequest, ChatAnswer, streamed_too(ChatChunk))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await Call(service, request, read_chat).answer()

    @post("/v1/responses", ResponsesRequest, ResponsesAnswer, events_too(ResponsesEvent))
    async def responses(request: Request) -> Response:
        """Answer a conversation, as OpenAI's newer API does."""
        return await Call(service, request, read_response).answer()

    @post("/v1/responses/input_tokens", ResponsesRequest, InputTokens)
    async def input_tokens(request: Request) -> Response:
        """The number of a conversation's tokens."""
        return await TextCall(service, request).count(read_input, input_tokens_of)

    @api.api_route("/v1/responses/{rest:kept}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def kept_response(rest: str) -> Response:
        """Nothing is kept of a response that has been sent."""
        raise not_kept()

    @post(
        "/v1/messages", MessagesRequest, MessagesAnswer, events_too(MessagesEvent), error=MessagesErrorAnswer
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        return await Call(service, request, read_messages(current_id())).answer()

    @post("/v1/messages/count_tokens", CountTokensRequest, TokenCount, error=MessagesErrorAnswer)
    async def count_tokens(request: Request) -> Response:
        """The number of a conversation's tokens."""
        return await TextCall(service, request).count(read_count, lambda count: {"input_tokens": count})

    @post("/v1/embeddings", EmbeddingRequest, EmbeddingAnswer)
    async def embeddings(request: Request) -> Response:
        """The mean of each input's last hidden states."""
        return await EmbeddingCall(service, request).embeddings()

    @post("/pooling", PoolingRequest, PoolingAnswer)
    async def pooling(request: Request) -> Response:
        """The embedding of each input."""
        return await EmbeddingCall(service, request).pooling()

    @post("/score", ScoreRequest, ScoreAnswer, {}, "/v1/score")
    async def score(request: Request) -> Response:
        """How alike texts are, by the cosine of their embeddings; /v1/score is the same."""
        return await EmbeddingCall(service, request).score()

    @post("/rerank", RerankRequest, RerankAnswer, {}, "/v1/rerank", "/v2/rerank")
    async def rerank(request: Request) -> Response:
        """Documents in the order in which they are like a query, by the cosine of their embeddings.

        /v1/rerank and /v2/rerank are the same.
        """
        return await EmbeddingCall(service, request).rerank()

    @api.get(
        "/tokenizer_info",
        response_model=TokenizerInfo,
        responses=refusals(sorted({401, 403, 404, 429, 504, *ANY_ROUTE})),
        tags=["models"],
    )
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        """The config of a model's tokenizer."""
        return await TextCall(service, request).tokenizer_info(model)

    @post("/tokenize", TokenizeRequest, TokenizeAnswer)
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation."""
        return await TextCall(service, request).tokenize()

    @post("/detokenize", DetokenizeRequest, DetokenizeAnswer)
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await TextCall(service, request).detokenize()

    # Routes are tried in their order: what is asked most comes first.
    add_operations(api, service)

    def refused(request: Request, error: ApiError) -> Response:
        current_record().error = error.code or str(error.status)
        of_messages = request.url.path.startswith("/v1/messages")
        body = error_body(error, current_id()) if of_messages else error.body()
        return JSONResponse(body, error.status, error.headers)

    @api.exception_handler(ApiError)
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refused(request, error)

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
        return refused(request, ApiError(error.status_code, message, code=code, headers=error.headers))

    @api.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        # The traceback is logged where the request ends; the client learns no internals.
        return refused(request, gateway_failed())

    return api


def _card(version: AppVersion) -> ModelCard:
    return {
        "id": version.spec.name,
        "object": "model",
        "created": version.created,
        "owned_by": "shoal",
        "version": version.spec.model_version,
        "context_length": version.context_length,
        "max_model_len": version.context_length,
    }
