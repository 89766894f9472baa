"""Requests of the gateway that are answered in one piece: embeddings, and text as the model's tokens."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from serve_apps.gateway.access import credential
from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.backend import ReplicaLostError, raise_if_failed
from serve_apps.gateway.broken_engines import Suspect
from serve_apps.gateway.call import BODY_BYTES_WITHOUT_APPS, BYTES_A_TOKEN
from serve_apps.gateway.choices import RETRIES
from serve_apps.gateway.service import GatewayService
from serve_apps.http.body import in_thread_if_large, read_body, read_json
from serve_apps.http.deadline import HEADER, Deadline
from serve_apps.http.event_stream import unless_gone
from serve_apps.http.record import current_record
from serve_apps.openai.answers import DetokenizeAnswer, EmbeddingAnswer, TokenizeAnswer
from serve_apps.openai.errors import (
    ApiError,
    bad_request,
    body_too_large,
    engines_broke,
    replica_lost,
    too_long,
)
from serve_apps.openai.parse import parse_fields
from serve_apps.openai.text_schema import DetokenizeRequest, EmbeddingRequest, TextRequest, TokenizeRequest

Result = Mapping[str, Any]


class TextCall:
    """One POST whose whole answer one replica, or several, give at once."""

    def __init__(self, service: GatewayService, http: HttpRequest) -> None:
        self._service = service
        self._http = http
        self._record = current_record()

    async def embeddings(self) -> Response:
        """Answer /v1/embeddings."""
        request, version = await self._read(EmbeddingRequest)

        for prompt in request.input:
            if not isinstance(prompt, str) and len(prompt) > version.context_length:
                raise too_long(len(prompt), version.context_length, None, "input")

        def asks() -> list[dict[str, Any]]:
            return [{"prompt": prompt} for prompt in request.input]

        try:
            results = await self._ask(version, "embed", len(request.input), asks)
        except ApiError as error:
            # What the replica knows as the prompt.
            error.param = "input" if error.param == "prompt" else error.param
            raise
        tokens = sum(result["start"]["prompt_tokens"] for result in results)
        answer: EmbeddingAnswer = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(result["embedding"], request.encoding_format),
                }
                for index, result in enumerate(results)
            ],
            "model": request.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return JSONResponse(answer, headers=_headers(results))

    async def tokenize(self) -> Response:
        """Answer /tokenize, as vLLM does."""
        request, version = await self._read(TokenizeRequest)
        if request.messages is None and request.prompt is None:
            raise bad_request("'prompt' or 'messages' is required.", code="missing_required_parameter")

        def asks() -> list[dict[str, Any]]:
            if request.messages is None:
                return [{"prompt": request.prompt}]
            messages = [message.for_template() for message in request.messages]
            return [{"messages": messages, "template": {"tools": request.tools} if request.tools else {}}]

        (result,) = results = await self._ask(version, "tokenize", 1, asks)
        tokens = result["tokens"]
        self._record.tokenized = len(tokens)
        answer: TokenizeAnswer = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": version.context_length,
        }
        return JSONResponse(answer, headers=_headers(results))

    async def detokenize(self) -> Response:
        """Answer /detokenize, as vLLM does."""
        request, version = await self._read(DetokenizeRequest)
        (result,) = results = await self._ask(
            version, "detokenize", 1, lambda: [{"tokens": list(request.tokens)}]
        )
        self._record.tokenized = len(request.tokens)
        answer: DetokenizeAnswer = {"prompt": result["prompt"]}
        return JSONResponse(answer, headers=_headers(results))

    async def _read(self, kind: type[TextRequest]) -> tuple[Any, AppVersion]:
        access, record = self._service.access, self._record
        self._caller = access.caller(credential(self._http.headers))
        record.tenant, record.stream = self._caller.tenant, False
        self._deadline = Deadline(record.began, self._http.headers.get(HEADER))
        table = self._service.table
        async with self._deadline.enforced():
            limit = (table.body_bytes if table else None) or BODY_BYTES_WITHOUT_APPS
            body = await read_body(self._http, limit)
            ignore = self._service.options.ignore_unknown
            request = await in_thread_if_large(
                body, lambda: parse_fields(kind, read_json(body), ignore_unknown=ignore)
            )
            version = await self._service.find(request.model, self._caller)
            record.app = request.model
            limits = version.spec.config.limits
            self._deadline.tighten(limits.request_timeout_s)
            if len(body) > limits.body_bytes:
                raise body_too_large(limits.body_bytes)
        self._body = body
        return request, version

    async def _ask(
        self, version: AppVersion, method: str, number: int, asks: Callable[[], list[dict[str, Any]]]
    ) -> list[Result]:
        """What the replicas of one version answer, in the order of the requests.

        Args:
            number: how many requests there are; they are made only when there is room for them.
        """
        engine_id = self._record.engine_id()
        traffic, app = self._service.traffic, version.spec.name
        # Many inputs go in turn, so that they take no more places than an app has.
        at_once = min(number, version.spec.config.limits.batch)
        suspect = Suspect(traffic.broken)

        async def all_by(taker: AppVersion, named: list[dict[str, Any]]) -> list[Result]:
            turns = asyncio.Semaphore(at_once)

            async def in_turn(one: dict[str, Any]) -> Result:
                async with turns:
                    return await self._one(taker, method, one, suspect)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(in_turn(one)) for one in named]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        async def all_of() -> list[Result]:
            requests = await in_thread_if_large(self._body, asks)
            named = [{"request_id": f"{engine_id}-{i}", **one} for i, one in enumerate(requests)]
            avoid: list[int] = []
            while True:
                taker = await traffic.take(app, at_once, avoid)
                try:
                    return await all_by(taker, named)
                except ApiError as error:
                    # Another version may do better, once.
                    if error.status < 500 or avoid or not traffic.other(app, taker):
                        raise
                    avoid.append(taker.revision)
                finally:
                    traffic.leave(taker, at_once)

        async with self._deadline.enforced():
            admission = await self._service.access.admit(self._caller, len(self._body) // BYTES_A_TOKEN)
        try:
            with admission, self._service.places(version, at_once, "input"):
                async with self._deadline.enforced():
                    results = await unless_gone(self._http.receive, all_of())
        finally:
            suspect.end()
        starts = [result["start"] for result in results]
        self._record.ran_on(_replicas(results), starts[0]["model_version"])
        tokens = sum(start.get("prompt_tokens", 0) for start in starts)
        if method == "embed":
            self._record.prompt_tokens = tokens
        await self._service.access.spend(self._caller, tokens)
        return results

    async def _one(
        self, version: AppVersion, method: str, request: Mapping[str, Any], suspect: Suspect
    ) -> Result:
        request = {**request, "revision": version.revision}
        traffic, runs = self._service.traffic, method == "embed"  # the others say nothing of the engine
        for retries_left in range(RETRIES, -1, -1):
            try:
                result = await self._service.backend.ask(version.application, method, request)
                raise_if_failed(result)
                if runs:
                    traffic.answered(version)
                return result
            except ReplicaLostError as lost:
                error, broken = replica_lost(), lost.broken
            except ApiError as refused:
                error, broken = refused, None
            if broken is not None:
                traffic.broke(version, broken, suspect)
                if suspect.guilty:
                    raise engines_broke()
            elif runs:
                traffic.refused(version, failed=error.status >= 500)
            if not (error.retry_elsewhere and retries_left):
                raise error
        raise AssertionError("the last try returns or raises")


def _encoded(values: Sequence[float], encoding: str | None) -> Any:
    if encoding != "base64":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _headers(results: Sequence[Result]) -> dict[str, str]:
    return {
        "x-shoal-replica": ",".join(_replicas(results)),
        "x-shoal-model-version": results[0]["start"]["model_version"],
    }


def _replicas(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["start"]["replica"] for result in results))
