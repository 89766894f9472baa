"""Requests of the gateway that are answered in one piece: embeddings, and text as the model's tokens."""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from serve_apps.app_table import AppVersion
from serve_apps.choices import RETRIES, ReplicaLostError
from serve_apps.event_stream import unless_gone
from serve_apps.gateway_call import BODY_BYTES_WITHOUT_APPS
from serve_apps.gateway_service import GatewayService
from serve_apps.openai_errors import ApiError, bad_request, body_too_large, replica_lost, timed_out
from serve_apps.openai_format import usage
from serve_apps.openai_schema import parse_fields
from serve_apps.request_body import read_body, read_json
from serve_apps.text_schema import DetokenizeRequest, EmbeddingRequest, TextRequest, TokenizeRequest

Result = Mapping[str, Any]


class TextCall:
    """One POST whose whole answer one replica, or several, give at once."""

    def __init__(self, service: GatewayService, http: HttpRequest) -> None:
        self._service = service
        self._http = http

    async def embeddings(self) -> Response:
        """Answer /v1/embeddings."""
        request, version = await self._read(EmbeddingRequest)
        asks = [{"request_id": f"embd-{uuid.uuid4().hex}", "prompt": prompt} for prompt in request.input]
        try:
            results = await self._ask(version, "embed", asks)
        except ApiError as error:
            # What the replica knows as the prompt.
            error.param = "input" if error.param == "prompt" else error.param
            raise
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(result["embedding"], request.encoding_format),
            }
            for index, result in enumerate(results)
        ]
        counted = usage((result["start"]["prompt_tokens"] for result in results), 0)
        counted.pop("completion_tokens")
        document = {"object": "list", "data": data, "model": request.model, "usage": counted}
        return JSONResponse(document, headers=_headers(results))

    async def tokenize(self) -> Response:
        """Answer /tokenize, as vLLM does."""
        request, version = await self._read(TokenizeRequest)
        if request.messages is not None:
            messages = [message.model_dump(exclude_none=True) for message in request.messages]
            ask: dict[str, Any] = {"messages": messages, "tools": request.tools}
        elif request.prompt is not None:
            ask = {"prompt": request.prompt}
        else:
            raise bad_request("'prompt' or 'messages' is required.", code="missing_required_parameter")
        (result,) = results = await self._ask(version, "tokenize", [ask])
        tokens = result["tokens"]
        document = {"tokens": tokens, "count": len(tokens), "max_model_len": version.context_length}
        return JSONResponse(document, headers=_headers(results))

    async def detokenize(self) -> Response:
        """Answer /detokenize, as vLLM does."""
        request, version = await self._read(DetokenizeRequest)
        (result,) = results = await self._ask(version, "detokenize", [{"tokens": list(request.tokens)}])
        return JSONResponse({"prompt": result["prompt"]}, headers=_headers(results))

    async def _read(self, kind: type[TextRequest]) -> tuple[Any, AppVersion]:
        access = self._service.access
        self._caller = access.caller(self._http.headers.get("authorization", ""))
        table = self._service.table
        body = await read_body(self._http, (table.body_bytes if table else None) or BODY_BYTES_WITHOUT_APPS)
        request = parse_fields(kind, read_json(body))
        version = await self._service.find(request.model, self._caller)
        if len(body) > version.spec.config.limits.body_bytes:
            raise body_too_large(version.spec.config.limits.body_bytes)
        await access.admit(self._caller)
        return request, version

    async def _ask(
        self, version: AppVersion, method: str, requests: Sequence[Mapping[str, Any]]
    ) -> list[Result]:
        """What the replicas answer, in the order of the requests."""
        timeout_s = version.spec.config.limits.request_timeout_s

        async def all_of() -> list[Result]:
            try:
                async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._one(version, method, one)) for one in requests]
            except TimeoutError:
                raise timed_out(timeout_s) from None
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        with self._service.places(version, len(requests)):
            results = await unless_gone(self._http.receive, all_of())
        tokens = sum(result["start"].get("prompt_tokens", 0) for result in results)
        await self._service.access.spend(self._caller, tokens)
        return results

    async def _one(self, version: AppVersion, method: str, request: Mapping[str, Any]) -> Result:
        for retries_left in range(RETRIES, -1, -1):
            try:
                result = await self._service.backend.ask(version.application, method, request)
                if "error" in result:
                    raise ApiError.from_item(result)
                return result
            except ReplicaLostError:
                error = replica_lost()
            except ApiError as refused:
                error = refused
            if not (error.retry_elsewhere and retries_left):
                raise error
        raise AssertionError("the last try returns or raises")


def _encoded(values: Sequence[float], encoding: str | None) -> Any:
    if encoding != "base64":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _headers(results: Sequence[Result]) -> dict[str, str]:
    replicas = dict.fromkeys(result["start"]["replica"] for result in results)
    return {
        "x-shoal-replica": ",".join(replicas),
        "x-shoal-model-version": results[0]["start"]["model_version"],
    }
